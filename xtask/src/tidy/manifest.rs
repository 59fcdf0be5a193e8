use super::finding::Finding;
use super::workspace::TextFile;
use crate::commands;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// A crate of the workspace.
pub(crate) struct Member {
    /// Name of the crate's folder.
    pub(crate) name: String,
    /// The crate's `Cargo.toml`.
    pub(crate) manifest: TextFile,
    pub(crate) dependencies: Vec<Dependency>,
}

/// A dependency as `cargo metadata` describes it.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    #[serde(rename = "name")]
    pub(crate) package: String,
    kind: Option<String>,
    path: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
}

impl Dependency {
    /// Returns the folder name of the dependency, if it is a crate of the workspace.
    pub(crate) fn member(&self) -> Option<&str> {
        self.path.as_deref().map(folder_name)
    }

    /// Returns whether only tests, examples and benchmarks use the dependency.
    pub(crate) fn is_for_tests(&self) -> bool {
        self.kind.as_deref() == Some("dev")
    }
}

impl Member {
    /// Returns the members of the workspace in `root`, with their dependencies for all targets.
    pub(crate) fn all(root: &Path) -> Result<Vec<Self>> {
        let text =
            commands::output(commands::cargo(root).args(["metadata", "--no-deps", "--format-version", "1"]))?;
        let metadata: Metadata =
            serde_json::from_str(&text).context("cannot read what `cargo metadata` prints")?;
        let member = |Package { manifest_path, dependencies }: Package| {
            let manifest = TextFile::read(root, &manifest_path)?;
            let name = folder_name(manifest_path.parent().context("a manifest lies in a folder")?).to_owned();
            Ok(Member { name, manifest, dependencies })
        };
        metadata.packages.into_iter().map(member).collect()
    }
}

fn folder_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Checks that every crate inherits the lints of the workspace, and that these deny unsafe code.
pub(crate) fn check_lints(workspace: &TextFile, members: &[Member]) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let level = entry(workspace, &["workspace", "lints", "rust", "unsafe_code"])?;
    let level = level.as_ref().and_then(Value::as_str);
    if !matches!(level, Some("deny" | "forbid")) {
        let remedy = "set unsafe_code = \"deny\" in [workspace.lints.rust]";
        findings.push(Finding::violation(&workspace.path, 1, "unsafe code is not denied", remedy));
    }
    for Member { manifest, .. } in members {
        let inherited = entry(manifest, &["lints", "workspace"])?;
        if inherited != Some(true.into()) {
            let remedy = "write 'workspace = true' under [lints]";
            findings.push(Finding::violation(&manifest.path, 1, "without the workspace's lints", remedy));
        }
    }
    Ok(findings)
}

/// Returns the value of a key of a manifest, if it is set.
fn entry(manifest: &TextFile, path: &[&str]) -> Result<Option<Value>> {
    let table: Table = manifest.text.parse().with_context(|| manifest.path.clone())?;
    Ok(path.iter().try_fold(Value::Table(table), |value, key| value.get(key).cloned()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn manifest(path: &str, text: &str) -> TextFile {
        TextFile { path: path.into(), text: text.into() }
    }

    /// Returns the crate `name` with dependencies of these kinds. Packages whose names begin with `trireme-` are crates of the workspace.
    pub(crate) fn member(name: &str, dependencies: &[(&str, Option<&str>)]) -> Member {
        let dependency = |&(package, kind): &(&str, Option<&str>)| Dependency {
            package: package.into(),
            kind: kind.map(str::to_owned),
            path: package.strip_prefix("trireme-").map(|folder| Path::new("/crates").join(folder)),
        };
        let manifest = manifest(&format!("crates/{name}/Cargo.toml"), "");
        Member { name: name.into(), manifest, dependencies: dependencies.iter().map(dependency).collect() }
    }

    #[test]
    fn dependencies_of_all_kinds_are_found() {
        let members = Member::all(crate::workspace_root()).unwrap();
        let named = |name: &str| members.iter().find(|member| member.name == name).unwrap();
        let found = |member: &Member, package: &str| {
            let dependency = member.dependencies.iter().find(|dependency| dependency.package == package)?;
            Some((dependency.member().map(str::to_owned), dependency.is_for_tests()))
        };
        assert_eq!(found(named("xtask"), "anyhow"), Some((None, false)));
        assert_eq!(found(named("comm"), "trireme-base"), Some((Some("base".into()), false)));
        assert_eq!(found(named("comm"), "trireme-testkit"), Some((Some("testkit".into()), true)));
        assert_eq!(found(named("comm"), "clap"), None);
        assert_eq!(named("comm").manifest.path, "crates/comm/Cargo.toml");
    }

    #[test]
    fn lints_that_are_not_inherited_are_found() {
        let denied = manifest("Cargo.toml", "[workspace.lints.rust]\nunsafe_code = \"deny\"\n");
        let plan =
            |text: &str| Member { manifest: manifest("crates/plan/Cargo.toml", text), ..member("plan", &[]) };
        assert_eq!(check_lints(&denied, &[plan("[lints]\nworkspace = true\n")]).unwrap(), []);
        for text in ["", "[lints]\nworkspace = false\n", "[lints.rust]\nunsafe_code = \"allow\"\n"] {
            let found = check_lints(&denied, &[plan(text)]).unwrap();
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].to_string().starts_with("crates/plan/Cargo.toml:1: "), "{found:?}");
        }
        let allowed = manifest("Cargo.toml", "[workspace.lints.rust]\nunsafe_code = \"allow\"\n");
        assert_eq!(check_lints(&allowed, &[]).unwrap().len(), 1);
    }
}
