use super::finding::Finding;
use super::manifest::Member;
use super::workspace::TextFile;
use std::collections::{BTreeMap, BTreeSet};

/// Line above the table in ARCHITECTURE.md.
const TABLE_MARK: &str = "<!-- crate dependencies: checked by `cargo xtask tidy` -->";

/// Crate that the tests of any crate may depend on, in addition to the crate's own dependencies.
const TEST_CRATE: &str = "testkit";

/// Libraries for the command line, which only crates with commands may depend on.
const COMMAND_LINE_CRATES: [&str; 2] = ["anyhow", "clap"];
const COMMAND_CRATES: [&str; 2] = ["cli", "xtask"];

struct Row {
    line: usize,
    dependencies: BTreeSet<String>,
}

/// Checks that a crate depends on exactly the crates that its row in the table of `architecture` lists. Its tests may also depend on the
/// test crate.
pub(crate) fn check(architecture: &TextFile, members: &[Member]) -> Vec<Finding> {
    let table = read_table(&architecture.text);
    let mut findings = Vec::new();
    for (name, row) in &table {
        if !members.iter().any(|member| member.name == *name) {
            let what = format!("the table has a crate '{name}', the workspace has none");
            findings.push(Finding::violation(&architecture.path, row.line, what, "remove its row"));
        }
    }
    for member in members {
        match table.get(&member.name) {
            Some(row) => findings.extend(check_member(architecture, row, member)),
            None => {
                let what = format!("'{}' has no row in the table of {}", member.name, architecture.path);
                let remedy = format!("add one below '{TABLE_MARK}'");
                findings.push(Finding::violation(&member.manifest.path, 1, what, remedy));
            }
        }
    }
    findings
}

fn check_member(architecture: &TextFile, row: &Row, member: &Member) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut used = BTreeSet::new();
    for dependency in &member.dependencies {
        let Some(name) = dependency.member() else { continue };
        if !dependency.is_for_tests() {
            used.insert(name);
        }
        let is_test_crate = dependency.is_for_tests() && name == TEST_CRATE;
        if !row.dependencies.contains(name) && !is_test_crate {
            let what = format!("'{}' may not depend on '{name}'", member.name);
            let remedy =
                format!("do without it, or change the direction in {}:{}", architecture.path, row.line);
            findings.push(Finding::violation(&member.manifest.path, 1, what, remedy));
        }
    }
    for name in row.dependencies.iter().filter(|name| !used.contains(name.as_str())) {
        let what = format!("the row of '{}' lists '{name}', which it does not depend on", member.name);
        findings.push(Finding::violation(&architecture.path, row.line, what, "remove it from the row"));
    }
    findings
}

/// Returns the rows below the mark, by crate, from lines such as `` | `parallel` | `base`, `comm` | ``.
fn read_table(text: &str) -> BTreeMap<String, Row> {
    let lines = (1..).zip(text.lines());
    let below_mark = lines.skip_while(|(_, line)| line.trim() != TABLE_MARK).skip(1);
    let mut table = BTreeMap::new();
    for (line, text) in below_mark.skip_while(|(_, text)| !text.starts_with('|')) {
        let Some(cells) = text.strip_prefix('|') else { break };
        let mut cells = cells.split('|').map(quoted_names);
        // The header rows of the table quote no name.
        let name = cells.next().and_then(|names| names.into_iter().next());
        let Some(name) = name else { continue };
        let dependencies = cells.next().unwrap_or_default().into_iter().collect();
        table.insert(name, Row { line, dependencies });
    }
    table
}

/// Returns the names between backticks.
fn quoted_names(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Checks that libraries do not depend on crates of the command line. Libraries return errors of their own and take their settings as
/// arguments.
pub(crate) fn check_command_line_crates(members: &[Member]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for member in members.iter().filter(|member| !COMMAND_CRATES.contains(&member.name.as_str())) {
        for dependency in &member.dependencies {
            if COMMAND_LINE_CRATES.contains(&dependency.package.as_str()) {
                let what = format!("'{}' depends on '{}'", member.name, dependency.package);
                let remedy = "add a variant to the crate's error enum, or leave it to cli";
                findings.push(Finding::violation(&member.manifest.path, 1, what, remedy));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::manifest::tests::member;
    use super::*;

    fn findings(rows: &str, members: &[Member]) -> Vec<String> {
        let text = format!(
            "# A\n\n| `not` | the table |\n\n{TABLE_MARK}\n\n| crate | uses |\n|---|---|\n{rows}\nEnd.\n"
        );
        let architecture = TextFile { path: "ARCHITECTURE.md".into(), text };
        check(&architecture, members).iter().map(ToString::to_string).collect()
    }

    fn comm(dependencies: &[(&str, Option<&str>)]) -> [Member; 2] {
        [member("base", &[]), member("comm", dependencies)]
    }

    const USES_BASE: [(&str, Option<&str>); 2] = [("trireme-base", None), ("serde", None)];

    #[test]
    fn a_table_that_is_right_passes() {
        assert_eq!(findings("| `base` | |\n| `comm` | `base` |", &comm(&USES_BASE)), [""; 0]);
        let tested = [USES_BASE[0], ("trireme-testkit", Some("dev"))];
        assert_eq!(findings("| `base` | |\n| `comm` | `base` |", &comm(&tested)), [""; 0]);
        let generated = [("trireme-base", Some("build"))];
        assert_eq!(findings("| `base` | |\n| `comm` | `base` |", &comm(&generated)), [""; 0]);
    }

    #[test]
    fn every_difference_is_found() {
        let rest = "; do without it, or change the direction in ARCHITECTURE.md:10";
        let forbidden = format!("crates/comm/Cargo.toml:1: 'comm' may not depend on 'base'{rest}");
        assert_eq!(findings("| `base` | |\n| `comm` | |", &comm(&USES_BASE)), [forbidden]);

        let unused = findings("| `base` | |\n| `comm` | `base` |", &comm(&[]));
        assert!(unused.len() == 1 && unused[0].starts_with("ARCHITECTURE.md:10: "), "{unused:?}");

        let missing = findings("| `base` | |", &comm(&[]));
        assert!(missing.len() == 1 && missing[0].starts_with("crates/comm/Cargo.toml:1: "), "{missing:?}");

        let unknown = findings("| `base` | |\n| `comm` | |\n| `old` | |", &comm(&[]));
        assert!(unknown.len() == 1 && unknown[0].starts_with("ARCHITECTURE.md:11: "), "{unknown:?}");
    }

    #[test]
    fn the_test_crate_is_for_tests() {
        for dependency in [("trireme-testkit", None), ("trireme-base", Some("dev"))] {
            assert_eq!(findings("| `base` | |\n| `comm` | |", &comm(&[dependency])).len(), 1);
        }
    }

    #[test]
    fn libraries_leave_the_command_line_alone() {
        let dependencies = [("anyhow", None), ("clap", Some("dev"))];
        let found = check_command_line_crates(&[member("comm", &dependencies)]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(check_command_line_crates(&[member("cli", &dependencies)]).is_empty());
    }
}
