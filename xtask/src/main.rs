//! Chores of the workspace: `cargo xtask tidy`.

mod tidy;

use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask tidy

  tidy   checks what the compiler does not: which crate may depend on which, where unsafe code lies, words and
         calls that do not belong here, the form and length of files";

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments != ["tidy"] {
        eprintln!("{USAGE}");
        return Ok(ExitCode::from(2));
    }
    let findings = tidy::check(workspace_root())?;
    findings.iter().for_each(|finding| println!("{finding}"));
    let num_refused = findings.iter().filter(|finding| finding.is_refused()).count();
    println!("tidy: {num_refused} to mend, {} to consider", findings.len() - num_refused);
    Ok(if num_refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace's folder")
}
