//! `trireme prove-kernels`, which other commands start.

use crate::console::Output;
use crate::simd::{KernelVerification, verifications, verify_kernels};
use anyhow::Result;
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};

/// Name of the command.
pub(crate) const NAME: &str = "prove-kernels";

/// CPU seconds for all kernels together. A kernel that never ends is ended by SIGXCPU.
const SECONDS_MAX: u64 = 10;

/// Compare this machine's matrix multiplication kernels with the portable ones.
///
/// For each kernel, prints the name before trying it and the result afterwards. An instruction that the system
/// refuses kills this process.
#[derive(Debug, clap::Args)]
pub(crate) struct ProveKernelsArgs {
    /// Names of kernels. By default, all.
    kernels: Vec<String>,
}

pub(crate) fn run(args: &ProveKernelsArgs) -> Result<()> {
    // A crash of this process needs no core dump.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let Rlimit { current, maximum } = getrlimit(Resource::Cpu);
    let seconds = current.map_or(SECONDS_MAX, |current| current.min(SECONDS_MAX));
    setrlimit(Resource::Cpu, Rlimit { current: Some(seconds), maximum })?;
    let is_chosen =
        |trial: &&KernelVerification| args.kernels.is_empty() || args.kernels.contains(&trial.kernel);
    Ok(verify_kernels(verifications().iter().filter(is_chosen), &mut Output)?)
}
