use super::manifest::Member;
use super::rust_text::RustFile;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose files are checked. Other folders in a checkout (builds, runs, a user's texts) do not belong to the project.
const FOLDERS: [&str; 8] = [".cargo", ".ci", "configs", "crates", "docs", "examples", "peers", "xtask"];

const ARCHITECTURE_FILE: &str = "ARCHITECTURE.md";

#[derive(Debug)]
pub(crate) struct TextFile {
    /// Path relative to the workspace, with `/` between names.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl TextFile {
    pub(crate) fn read(root: &Path, path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let relative = path.strip_prefix(root).unwrap_or(path);
        let names: Vec<_> = relative.iter().map(|name| name.to_string_lossy()).collect();
        Ok(TextFile { path: names.join("/"), text })
    }
}

/// All files that the checks read.
pub(crate) struct Workspace {
    pub(crate) architecture: TextFile,
    /// The workspace's own `Cargo.toml`.
    pub(crate) manifest: TextFile,
    /// The crates, xtask included.
    pub(crate) members: Vec<Member>,
    /// Every file written by hand whose form is checked.
    pub(crate) texts: Vec<TextFile>,
    pub(crate) sources: Vec<RustFile>,
}

impl Workspace {
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let texts: Vec<TextFile> =
            paths(root)?.iter().map(|path| TextFile::read(root, path)).collect::<Result<_>>()?;
        let manifest = TextFile::read(root, &root.join("Cargo.toml"))?;
        let members = Member::all(root)?;
        let is_rust = |file: &&TextFile| file.path.ends_with(".rs");
        let parse = |file: &TextFile| RustFile::parse(&file.path, &file.text);
        let sources = texts.iter().filter(is_rust).map(parse).collect::<Result<_>>()?;
        let architecture = TextFile::read(root, &root.join(ARCHITECTURE_FILE))?;
        Ok(Workspace { architecture, manifest, members, texts, sources })
    }
}

/// Returns the files whose form is checked: in the [`FOLDERS`], and in the root itself.
fn paths(root: &Path) -> Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> = entries(root)?.into_iter().filter(|path| path.is_file()).collect();
    for folder in FOLDERS.map(|name| root.join(name)) {
        if folder.is_dir() {
            add_files(&folder, &mut paths)?;
        }
    }
    paths.retain(|path| is_checked(path));
    Ok(paths)
}

fn add_files(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for path in entries(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !path.is_dir() {
            paths.push(path);
        } else if name != "target" && !name.starts_with('.') {
            add_files(&path, paths)?;
        }
    }
    Ok(())
}

/// Returns whether a file is a text written by hand, according to its name.
fn is_checked(path: &Path) -> bool {
    let by_extension = path
        .extension()
        .is_some_and(|extension| ["rs", "toml", "md", "py", "c"].iter().any(|known| extension == *known));
    by_extension || path.ends_with(".ci/run")
}

/// Returns the entries of a folder, sorted by name.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot_read = || format!("cannot read the folder {}", folder.display());
    let entries = fs::read_dir(folder).with_context(cannot_read)?;
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>().with_context(cannot_read)?;
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_and_documents_are_checked_and_data_is_not() {
        for name in ["README.md", "crates/base/src/lib.rs", "Cargo.toml", "peers/a.py", "/elsewhere/.ci/run"]
        {
            assert!(is_checked(Path::new(name)), "{name}");
        }
        for name in ["Cargo.lock", "model.safetensors", "reference.json", "LICENSE-APACHE", "run"] {
            assert!(!is_checked(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn this_file_is_found() {
        let workspace = Workspace::read(crate::workspace_root()).unwrap();
        assert!(workspace.sources.iter().any(|source| source.path == "xtask/src/tidy/workspace.rs"));
        assert!(workspace.members.iter().any(|member| member.name == "xtask"));
    }
}
