use super::finding::Finding;
use super::workspace::TextFile;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use toml::{Table, Value};

/// The workspace's own `Cargo.toml`.
pub(crate) struct Manifest {
    file: TextFile,
    table: Table,
}

/// A crate of the workspace and what its `Cargo.toml` says.
pub(crate) struct Member {
    /// Its folder's name.
    pub(crate) name: String,
    pub(crate) file: TextFile,
    table: Table,
    /// Dependencies of the code itself and of its build script.
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) dev_dependencies: Vec<Dependency>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Dependency {
    pub(crate) package: String,
    /// Folder's name of the crate, where it is one of the workspace.
    pub(crate) member: Option<String>,
    /// Line of the manifest, from 1.
    pub(crate) line: usize,
}

/// Crates of the workspace by the key under which a manifest names them: folder names.
pub(crate) type LocalDependencies = BTreeMap<String, String>;

impl Manifest {
    pub(crate) fn parse(file: TextFile) -> Result<Self> {
        let table = parse(&file)?;
        Ok(Manifest { file, table })
    }

    /// The entries of `[workspace.dependencies]` that are crates of this workspace.
    pub(crate) fn local_dependencies(&self) -> LocalDependencies {
        let entries = section(&self.table, &["workspace", "dependencies"]).into_iter().flatten();
        entries.filter_map(|(key, entry)| Some((key.clone(), folder_name(entry)?))).collect()
    }
}

impl Member {
    pub(crate) fn parse(file: TextFile, local: &LocalDependencies) -> Result<Self> {
        let table = parse(&file)?;
        let name = file.path.rsplit('/').nth(1).context("a member has a folder")?.to_owned();
        let of_kinds = |kinds: &[&str]| dependencies(&file.text, &table, kinds, local);
        let dependencies = of_kinds(&["dependencies", "build-dependencies"]);
        let dev_dependencies = of_kinds(&["dev-dependencies"]);
        Ok(Member { name, file, table, dependencies, dev_dependencies })
    }
}

fn parse(file: &TextFile) -> Result<Table> {
    file.text.parse().with_context(|| file.path.clone())
}

fn section<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Table> {
    path.iter().try_fold(table, |table, key| table.get(*key)?.as_table())
}

/// The folder's name that a dependency's `path` ends with.
fn folder_name(entry: &Value) -> Option<String> {
    let path = entry.get("path")?.as_str()?;
    path.trim_end_matches('/').rsplit('/').next().map(str::to_owned)
}

/// The dependencies of these kinds, those of single targets included.
fn dependencies(text: &str, table: &Table, kinds: &[&str], local: &LocalDependencies) -> Vec<Dependency> {
    let targets = section(table, &["target"]).into_iter().flat_map(Table::values).filter_map(Value::as_table);
    let mut found = Vec::new();
    for table in targets.chain([table]) {
        let entries = kinds.iter().filter_map(|kind| section(table, &[kind])).flatten();
        found.extend(entries.map(|(key, entry)| Dependency {
            package: entry.get("package").and_then(Value::as_str).unwrap_or(key).to_owned(),
            member: folder_name(entry).or_else(|| local.get(key).cloned()),
            line: line_of(text, key),
        }));
    }
    found.sort();
    found
}

/// The line that begins with `key`, from 1; the first if there is none.
fn line_of(text: &str, key: &str) -> usize {
    let sets_key = |line: &str| {
        line.trim_start().strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with(['.', '=']))
    };
    text.lines().position(sets_key).map_or(1, |index| index + 1)
}

/// Every crate has the lints of the workspace, and these deny unsafe code.
pub(crate) fn check_lints(workspace: &Manifest, members: &[Member]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let lints = section(&workspace.table, &["workspace", "lints", "rust"]);
    let level = lints.and_then(|lints| lints.get("unsafe_code")?.as_str());
    if !matches!(level, Some("deny" | "forbid")) {
        let remedy = "set unsafe_code = \"deny\" in [workspace.lints.rust]";
        findings.push(Finding::refuse(&workspace.file.path, 1, "unsafe code is not denied", remedy));
    }
    for Member { file, table, .. } in members {
        let inherited = section(table, &["lints"]).and_then(|lints| lints.get("workspace")?.as_bool());
        if inherited != Some(true) {
            let remedy = "write 'workspace = true' under [lints]";
            findings.push(Finding::refuse(&file.path, 1, "without the workspace's lints", remedy));
        }
    }
    findings
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn manifest(text: &str) -> Manifest {
        Manifest::parse(TextFile { path: "Cargo.toml".into(), text: text.into() }).unwrap()
    }

    /// The crate `name` of a workspace with the crates `base`, `comm` and `testkit`.
    pub(crate) fn member(name: &str, text: &str) -> Member {
        let local = ["base", "comm", "testkit"].map(|name| (format!("trireme-{name}"), name.to_owned()));
        let file = TextFile { path: format!("crates/{name}/Cargo.toml"), text: text.into() };
        Member::parse(file, &local.into()).unwrap()
    }

    #[test]
    fn dependencies_of_all_kinds_are_found_with_their_lines() {
        let text = "[dependencies]\ntrireme-base.workspace = true\nother = { path = \"../comm\" }\n\
                    [target.'cfg(unix)'.dependencies]\nlibc = \"1\"\n[dev-dependencies]\nshort = { package = \"long\" }\n";
        let Member { name, dependencies, dev_dependencies, .. } = member("plan", text);
        assert_eq!(name, "plan");
        let found = |package: &str, member: Option<&str>, line| Dependency {
            package: package.to_owned(),
            member: member.map(str::to_owned),
            line,
        };
        let expected =
            [found("libc", None, 5), found("other", Some("comm"), 3), found("trireme-base", Some("base"), 2)];
        assert_eq!(dependencies, expected);
        assert_eq!(dev_dependencies, [found("long", None, 7)]);
    }

    #[test]
    fn crates_of_the_workspace_are_those_with_a_path() {
        let text = "[workspace.dependencies]\ntrireme-base = { path = \"crates/base\" }\nserde = \"1\"\n";
        let expected = [("trireme-base".to_owned(), "base".to_owned())];
        assert_eq!(manifest(text).local_dependencies(), expected.into());
    }

    #[test]
    fn lints_that_are_not_inherited_are_found() {
        let denied = manifest("[workspace.lints.rust]\nunsafe_code = \"deny\"\n");
        let good = member("plan", "[lints]\nworkspace = true\n");
        assert_eq!(check_lints(&denied, &[good]), []);
        for text in ["", "[lints]\nworkspace = false\n", "[lints.rust]\nunsafe_code = \"allow\"\n"] {
            let found = check_lints(&denied, &[member("plan", text)]);
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].to_string().starts_with("crates/plan/Cargo.toml:1: "), "{found:?}");
        }
        let allowed = manifest("[workspace.lints.rust]\nunsafe_code = \"allow\"\n");
        assert_eq!(check_lints(&allowed, &[]).len(), 1);
    }
}
