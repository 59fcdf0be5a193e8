//! Choice of the SIMD level of kernels: the highest level whose matmul kernels match the portable ones on this machine.
//!
//! Before a command computes, each kernel is compared with the portable one in a child process, because the system may kill a process that
//! runs it (`verification`). The results are cached for this processor and this program (`MachineCache`). A kernel that could not be tried
//! is not used, and the next command tries it again. `TRIREME_SIMD` chooses a lower level. A launcher chooses for its workers.

mod verification;

pub(crate) use verification::{KernelVerification, verify_kernels};

use crate::diagnostics::print_diagnostic;
use crate::launch::LaunchError;
use crate::machine_cache::MachineCache;
use anyhow::Result;
use serde::{Serialize, Serializer};
use std::process::Command;
use trireme_tensor::probe::{ExecutionUnit, reason_unsupported};
use trireme_tensor::verification::MatmulKernel;
use trireme_tensor::{DeviceOptions, Precision, SimdLevel};
use verification::{REASON_CHARS_MAX, Verdict, Verdicts};

/// Environment variable with the highest level that the user allows.
const LEVEL_VARIABLE: &str = "TRIREME_SIMD";

/// Environment variable with the level that a launcher has chosen for its workers.
const CHOSEN_VARIABLE: &str = "TRIREME_SIMD_CHOSEN";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verification {
    Cached,
    /// Tries all kernels again.
    Fresh,
}

/// A SIMD level, and why it was chosen.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Simd {
    pub(crate) level: SimdLevel,
    /// The highest level of the machine that the user allows.
    pub(crate) max_level: SimdLevel,
    /// Kernels of the machine that must not be used.
    pub(crate) excluded: Vec<Excluded>,
}

/// A kernel that must not be used: its results are wrong, the system kills it, or it could not be tried. The fields are keys of `doctor
/// --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Excluded {
    #[serde(serialize_with = "serialize_text")]
    pub(crate) kernel: MatmulKernel,
    pub(crate) reason: String,
}

fn serialize_text<S: Serializer>(kernel: &MatmulKernel, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(kernel)
}

impl Simd {
    /// Chooses the level of this process.
    ///
    /// # Errors
    /// If an environment variable does not name a level of this machine.
    pub(crate) fn choose(proof: Verification) -> Result<Self> {
        let supported = SimdLevel::detect();
        let named = |variable| level_of(variable, std::env::var(variable).ok(), supported);
        if let Some(level) = named(CHOSEN_VARIABLE)? {
            return Ok(Simd { level, max_level: level, excluded: Vec::new() });
        }
        let max_level = named(LEVEL_VARIABLE)?.unwrap_or(supported);
        if max_level == SimdLevel::Portable {
            return Ok(Simd { level: max_level, max_level, excluded: Vec::new() });
        }
        let names: Vec<String> = kernels().iter().map(MatmulKernel::to_string).collect();
        let cache = MachineCache::of_this_machine("kernels");
        let cached = cache.as_ref().filter(|_| proof == Verification::Cached).and_then(MachineCache::read);
        let cached = cached.filter(|verdicts| are_valid_verdicts(verdicts, &names));
        let verdicts = cached.unwrap_or_else(|| {
            let verdicts = verify(&names);
            let is_certain = !verdicts.values().any(|verdict| matches!(verdict, Verdict::Untried(_)));
            if let Some(cache) = cache.as_ref().filter(|_| is_certain) {
                // A cache that cannot be written costs the next command the time of the verification.
                let _ = cache.write(&verdicts);
            }
            verdicts
        });
        Ok(Self::from_verdicts(max_level, verdicts))
    }

    fn from_verdicts(most: SimdLevel, mut verdicts: Verdicts) -> Self {
        let exclude = |kernel: MatmulKernel| match verdicts.remove(&kernel.to_string())? {
            Verdict::Proven => None,
            Verdict::Wrong(reason) | Verdict::Untried(reason) => Some(Excluded { kernel, reason }),
        };
        let excluded: Vec<Excluded> = MatmulKernel::up_to(most).into_iter().filter_map(exclude).collect();
        let is_proven = |level: &SimdLevel| {
            let kernels = Precision::ALL.map(|precision| MatmulKernel::of(*level, precision));
            excluded.iter().all(|excluded| !kernels.contains(&excluded.kernel))
        };
        let levels = SimdLevel::ALL.into_iter().rev().filter(|level| *level <= most);
        let level = levels.clone().find(is_proven).expect("portable kernels are never excluded");
        Simd { level, max_level: most, excluded }
    }

    pub(crate) fn variable(&self) -> (&'static str, String) {
        (CHOSEN_VARIABLE, self.level.to_string())
    }

    /// Returns a warning for each kernel that would be used if it were proven.
    pub(crate) fn warnings(&self) -> impl Iterator<Item = String> {
        let missed =
            self.excluded.iter().filter(|excluded| excluded.kernel.unit.min_simd_level() > self.level);
        missed.map(|Excluded { kernel, reason }| {
            let instead = ExecutionUnit::of(self.level, kernel.precision);
            format!(
                "warning: {kernel} are not used, because {reason}; {} products run on {instead}",
                kernel.precision
            )
        })
    }

    pub(crate) fn warn(&self) {
        self.warnings().for_each(|line| print_diagnostic(&line));
    }

    /// Returns why a proven kernel of a higher level is not used.
    pub(crate) fn reason_unused(&self) -> &'static str {
        if self.level < self.max_level {
            "another kernel of its SIMD level is excluded"
        } else {
            "TRIREME_SIMD selects a lower level"
        }
    }

    pub(crate) fn reason(&self) -> &'static str {
        if self.level < self.max_level {
            "the highest level whose matmul kernels match the portable ones"
        } else if self.max_level < SimdLevel::detect() {
            "set by TRIREME_SIMD"
        } else if self.level == SimdLevel::Portable {
            "the only level of this machine"
        } else {
            "the highest level of this machine; its matmul kernels match the portable ones"
        }
    }
}

/// Returns the options of a device with `num_threads` threads, for a command of one process. Warns of excluded kernels.
pub(crate) fn device_options(num_threads: usize) -> Result<DeviceOptions> {
    let simd = Simd::choose(Verification::Cached)?;
    simd.warn();
    Ok(DeviceOptions { num_threads, simd_level_max: Some(simd.level), ..DeviceOptions::default() })
}

/// Whether verdicts that come from a file are of these kernels and safe to print.
fn are_valid_verdicts(verdicts: &Verdicts, names: &[String]) -> bool {
    let is_plain = |verdict: &Verdict| match verdict {
        Verdict::Proven => true,
        Verdict::Wrong(reason) | Verdict::Untried(reason) => {
            reason.chars().count() <= REASON_CHARS_MAX && !reason.chars().any(char::is_control)
        }
    };
    verdicts.len() == names.len()
        && names.iter().all(|name| verdicts.contains_key(name))
        && verdicts.values().all(is_plain)
}

/// Returns the kernels of this machine that must be verified: all but the portable ones.
fn kernels() -> Vec<MatmulKernel> {
    let all = MatmulKernel::up_to(SimdLevel::detect()).into_iter();
    all.filter(|kernel| !kernel.is_portable()).collect()
}

pub(crate) fn verifications() -> Vec<KernelVerification> {
    let trial = |kernel: MatmulKernel| KernelVerification {
        kernel: kernel.to_string(),
        verify: Box::new(move || kernel.verify().map_err(|wrong| wrong.to_string())),
    };
    kernels().into_iter().map(trial).collect()
}

fn verify(names: &[String]) -> Verdicts {
    let command = |names: &[String]| {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(crate::commands::prove_kernels::NAME).args(names);
        Ok(command)
    };
    verification::verify_in_children(names, &command)
}

/// Returns the level that a variable names, if it is set.
fn level_of(
    variable: &'static str,
    value: Option<String>,
    supported: SimdLevel,
) -> Result<Option<SimdLevel>, LaunchError> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    let named = SimdLevel::ALL.into_iter().find(|level| level.to_string() == value);
    if let Some(level) = named.filter(|level| *level <= supported) {
        return Ok(Some(level));
    }
    let levels = SimdLevel::ALL.into_iter().filter(|level| *level <= supported);
    let levels = levels.map(|level| level.to_string()).collect::<Vec<_>>().join(", ");
    let why = named.and_then(reason_unsupported).map(|why| format!(" ({why})")).unwrap_or_default();
    let expected = format!("a SIMD level of this machine: {levels}{why}");
    Err(LaunchError::InvalidVariable { variable, value, expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chooses a level up to `most` on a machine where the kernels `excluded` are excluded.
    fn chosen(most: SimdLevel, excluded: &[(SimdLevel, Precision)]) -> Simd {
        let name = |&(level, precision): &(SimdLevel, Precision)| {
            (MatmulKernel::of(level, precision).to_string(), Verdict::Wrong("it was wrong".to_owned()))
        };
        let all = MatmulKernel::up_to(SimdLevel::AmxBf16).into_iter();
        let mut verdicts: Verdicts = all.map(|kernel| (kernel.to_string(), Verdict::Proven)).collect();
        verdicts.extend(excluded.iter().map(name));
        Simd::from_verdicts(most, verdicts)
    }

    #[test]
    fn verdicts_of_a_file_are_of_these_kernels_or_not_believed() {
        let names = ["good", "bad"].map(str::to_owned);
        let read = |text: &str| serde_json::from_str::<Verdicts>(text).ok();
        let is_believed =
            |text: &str| read(text).is_some_and(|verdicts| are_valid_verdicts(&verdicts, &names));
        let whole = r#"{"good": "proven", "bad": {"wrong": "1 is 2"}}"#;
        assert!(is_believed(whole));
        for forged in [
            whole.replace("1 is 2", "\\u001b[31m"),
            whole.replace("1 is 2", &"x".repeat(REASON_CHARS_MAX + 1)),
            whole.replace("\"proven\"", "null"),
            whole.replace("\"wrong\"", "\"untried\""),
            whole.replace("good", "third"),
            r#"{"good": "proven"}"#.to_owned(),
        ] {
            assert!(forged != whole && !is_believed(&forged), "{forged}");
        }
        // One verdict more than there are kernels.
        assert!(!are_valid_verdicts(&read(whole).unwrap(), &names[..1]));
    }

    #[test]
    fn the_highest_level_without_an_excluded_kernel_is_chosen() {
        use Precision::{Bf16, F16, F32};
        use SimdLevel::{AmxBf16, Avx2, Avx512, Avx512Bf16, Portable};
        for (most, excluded, level, num_warnings) in [
            (AmxBf16, &[][..], AmxBf16, 0),
            (AmxBf16, &[(AmxBf16, Bf16)], Avx512Bf16, 1),
            (AmxBf16, &[(AmxBf16, Bf16), (Avx512Bf16, Bf16)], Avx512, 2),
            // A kernel that several levels share; AMX alone does not make a level.
            (AmxBf16, &[(Avx512, F32)], Avx2, 1),
            (Avx512, &[(Avx512, F16), (Avx2, F32), (Avx2, Bf16)], Portable, 3),
            // Excluded kernels that would not be used anyway.
            (AmxBf16, &[(Avx512Bf16, Bf16), (Avx2, F32)], AmxBf16, 0),
            (Avx2, &[(AmxBf16, Bf16), (Avx512, F32)], Avx2, 0),
        ] {
            let simd = chosen(most, excluded);
            assert_eq!((simd.level, simd.warnings().count()), (level, num_warnings), "{most} {excluded:?}");
        }
    }

    #[test]
    fn a_warning_names_the_kernel_the_mistake_and_what_is_used_instead() {
        let simd = chosen(SimdLevel::AmxBf16, &[(SimdLevel::AmxBf16, Precision::Bf16)]);
        assert_eq!(
            simd.warnings().collect::<Vec<_>>(),
            [
                "warning: bf16 products on tdpbf16ps are not used, because it was wrong; bf16 products run on vdpbf16ps"
            ]
        );
        assert!(simd.reason().starts_with("the highest level whose"));
        assert_eq!(simd.variable(), (CHOSEN_VARIABLE, "avx512_bf16".to_owned()));
    }

    #[test]
    fn a_variable_names_a_level_of_the_machine() {
        let level = |value: &str| level_of(LEVEL_VARIABLE, Some(value.to_owned()), SimdLevel::Avx512);
        assert_eq!(level("").unwrap(), None);
        assert_eq!(level_of(LEVEL_VARIABLE, None, SimdLevel::Avx512).unwrap(), None);
        assert_eq!(level("avx2").unwrap(), Some(SimdLevel::Avx2));
        assert_eq!(level("portable").unwrap(), Some(SimdLevel::Portable));
        for unfit in ["AVX2", "amx_bf16", "sse", "avx512_bf16", "avx2 "] {
            let error = level(unfit).unwrap_err().to_string();
            let facts =
                [format!("TRIREME_SIMD is '{unfit}'"), "this machine: portable, avx2, avx512".to_owned()];
            assert!(facts.iter().all(|fact| error.contains(fact)), "{error}");
        }
    }
}
