//! Checks of the workspace that the compiler does not make. Each check is a function from the files that were read to findings.

mod comments;
mod dependencies;
mod finding;
mod forbidden_words;
mod formatting;
mod import_cycles;
mod manifest;
mod rust_text;
mod soundness;
mod workspace;

use anyhow::Result;
use finding::Finding;
use std::path::Path;
use workspace::Workspace;

/// Runs `cargo xtask tidy`. Returns whether there are no violations.
pub(crate) fn run(root: &Path) -> Result<bool> {
    let findings = check(root)?;
    findings.iter().for_each(|finding| println!("{finding}"));
    let num_refused = findings.iter().filter(|finding| finding.is_violation).count();
    println!("tidy: {num_refused} to fix, {} to consider", findings.len() - num_refused);
    Ok(num_refused == 0)
}

/// Returns all findings in the workspace at `root`, by file and line.
fn check(root: &Path) -> Result<Vec<Finding>> {
    let workspace = Workspace::read(root)?;
    let mut findings = dependencies::check(&workspace.architecture, &workspace.members);
    findings.extend(dependencies::check_command_line_crates(&workspace.members));
    findings.extend(manifest::check_lints(&workspace.manifest, &workspace.members)?);
    for file in &workspace.texts {
        findings.extend(formatting::check(file));
    }
    for file in &workspace.sources {
        findings.extend(soundness::check(file));
        findings.extend(forbidden_words::check(file));
        findings.extend(comments::check(file));
    }
    findings.extend(import_cycles::check(&workspace.texts));
    findings.sort();
    Ok(findings)
}

#[cfg(test)]
mod tests {
    /// Enforces the rules in `cargo test --workspace`.
    #[test]
    fn the_workspace_is_tidy() {
        let findings = super::check(crate::workspace_root()).expect("the workspace can be read");
        let refused: Vec<String> =
            findings.iter().filter(|finding| finding.is_violation).map(ToString::to_string).collect();
        assert!(refused.is_empty(), "{} to fix:\n{}", refused.len(), refused.join("\n"));
    }
}
