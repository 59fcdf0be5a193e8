//! `cargo xtask gpu`: checks Trireme on the GPUs of a machine, and compares its speed with PyTorch and nccl-tests.

mod checks;
mod programs;
mod row;
mod speed;

use anyhow::{Result, bail};
use programs::Programs;
use row::Row;
use std::path::{Path, PathBuf};
use std::time::Duration;

const HELP: &str = "\
The machine with the GPUs needs NVIDIA's driver, the libraries that `trireme
doctor` lists, this repository, and the folder that --prepare fills on any
machine with Cargo. It needs neither Cargo nor a network. PyTorch is compared if
--python has it; compute-sanitizer and nccl-tests are used if they are in PATH.
A part that takes longer than eight minutes is stopped. See docs/gpu.md.

Parts: conformance, losses, layouts, sanitizer, kernels, collectives,
step-gpt2-124m, step-gpt2-350m, step-gpt2-1.5b, step-llama-1b.

Examples:
  cargo xtask gpu --prepare
      Build what the parts run into target/gpu.
  target/gpu/xtask gpu > gpu.md
      All parts, in the repository's root on the machine with the GPUs.
  target/gpu/xtask gpu --part conformance,losses
      Some parts.
  cargo xtask gpu --quick
      A smoke test: do all commands work? Its figures mean nothing.";

/// Check Trireme on this machine's GPUs, and compare its speed with PyTorch and nccl-tests.
///
/// Prints one Markdown table to the standard output, and everything else to the error output.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct GpuArgs {
    /// Build the programs of the parts into the folder, and run nothing.
    #[arg(long)]
    prepare: bool,
    /// Folder of the built programs.
    #[arg(long, value_name = "DIR", default_value = "target/gpu")]
    folder: PathBuf,
    /// Run only these parts, separated by commas.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    part: Vec<String>,
    /// Python, with PyTorch for CUDA if it is to be compared.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
    /// Run small models for few steps, to check that all commands work.
    #[arg(long)]
    quick: bool,
}

/// Time after which a part is ended.
const PART_DURATION_MAX: Duration = Duration::from_secs(8 * 60);

/// Adds the rows of a part. Rows that it has added before an error are kept.
type Run = dyn Fn(&Programs, &mut Vec<Row>) -> Result<()>;

/// A part of the measurements.
struct Part {
    name: String,
    run: Box<Run>,
}

fn parts() -> Vec<Part> {
    let part = |name: &str, run: fn(&Programs, &mut Vec<Row>) -> Result<()>| Part {
        name: name.to_owned(),
        run: Box::new(run),
    };
    let steps = speed::MODELS.iter().map(|model| Part {
        name: format!("step-{}", model.name),
        run: Box::new(|programs, rows| speed::steps(model, programs, rows)),
    });
    let checks = [
        part("conformance", checks::conformance),
        part("losses", checks::losses),
        part("layouts", checks::layouts),
        part("sanitizer", checks::sanitizer),
        part("kernels", speed::kernels),
        part("collectives", speed::collectives),
    ];
    checks.into_iter().chain(steps).collect()
}

/// Runs `cargo xtask gpu`. Returns whether every part succeeded.
pub(crate) fn run(args: &GpuArgs, root: &Path) -> Result<bool> {
    // `root` is the workspace's path on the machine that built this program. It may not exist here.
    let root = if root.is_dir() { root.to_owned() } else { std::env::current_dir()? };
    let folder = root.join(&args.folder);
    if args.prepare {
        Programs::build(&root, &folder)?;
        eprintln!(
            "built: {}; next, on the machine with GPUs: {}/xtask gpu",
            folder.display(),
            args.folder.display()
        );
        return Ok(true);
    }
    let parts = chosen_parts(&args.part)?;
    let programs = Programs::open(root, folder, args.python.clone(), args.quick)?;
    let (device, num_gpus) = (programs.device(), programs.num_gpus());
    eprintln!("{num_gpus} x {device}");
    let mut rows = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        eprintln!("{}/{}  {}", index + 1, parts.len(), part.name);
        if let Err(error) = (part.run)(&programs.until(PART_DURATION_MAX), &mut rows) {
            eprintln!("error: {}: {error:#}", part.name);
            rows.push(Row::failed(&part.name, &format!("{error:#}")));
        }
    }
    print!("{}", row::table(&programs.title(), &rows));
    Ok(!rows.iter().any(|row| row.has_failed))
}

fn chosen_parts(names: &[String]) -> Result<Vec<Part>> {
    let all = parts();
    let known: Vec<String> = all.iter().map(|part| part.name.clone()).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(name)) {
        bail!("there is no part '{unknown}'; the parts are {}", known.join(", "));
    }
    Ok(all.into_iter().filter(|part| names.is_empty() || names.contains(&part.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_all_parts() {
        assert!(parts().iter().all(|part| HELP.contains(&part.name)));
    }

    #[test]
    fn parts_are_chosen_by_their_names() {
        assert_eq!(chosen_parts(&[]).unwrap().len(), 6 + speed::MODELS.len());
        let names = ["losses".to_owned(), "step-gpt2-124m".to_owned()];
        assert_eq!(
            chosen_parts(&names).unwrap().iter().map(|part| &part.name).collect::<Vec<_>>(),
            names.each_ref()
        );
        let error = chosen_parts(&["speed".to_owned()]).err().unwrap().to_string();
        assert!(error.contains("no part 'speed'") && error.contains("conformance, losses"), "{error}");
    }
}
