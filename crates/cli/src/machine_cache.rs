//! Results of kernel verifications and measurements, kept in the user's cache for one processor, system and program.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use trireme_base::read_at_most;

/// Maximum size of a file that is read. Real files have a few KiB.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Bytes of /proc/cpuinfo that are read. The part about the first processor is shorter.
const PROCESSOR_BYTES_MAX: u64 = 16 << 10;

/// Fields of a processor that do not change, as Linux names them on x86-64 and on Arm.
const PROCESSOR_FIELDS: [&str; 13] = [
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "microcode",
    "flags",
    "Features",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "CPU revision",
];

/// The machine and program for which results are valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    processor: String,
    /// The system decides which processor states are saved and what is emulated.
    system: String,
    program: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document<T> {
    identity: Identity,
    results: T,
}

/// A file with results for this machine and program.
#[derive(Debug)]
pub(crate) struct MachineCache {
    path: PathBuf,
    identity: Identity,
}

impl MachineCache {
    /// Returns the cache of results of this `kind`, which is the prefix of the file's name. `None` if the machine, the program or the
    /// user's cache folder cannot be determined.
    pub(crate) fn of_this_machine(kind: &str) -> Option<Self> {
        let identity = Identity::of_this_process()?;
        // One file for each kind of processor: hosts may share the folder.
        let mut hasher = DefaultHasher::new();
        identity.processor.hash(&mut hasher);
        let path = folder()?.join("trireme").join(format!("{kind}-{:016x}.json", hasher.finish()));
        Some(MachineCache { path, identity })
    }

    #[cfg(test)]
    pub(crate) fn at(path: &Path) -> Self {
        let identity = Identity::of_this_process().expect("the system identifies the machine");
        MachineCache { path: path.to_owned(), identity }
    }

    /// Reads the results, if the file has results of this machine and program. The caller checks their values, because other programs can
    /// write the file.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Option<T> {
        let text = read_at_most(&self.path, FILE_BYTES_MAX).ok()?;
        let Document { identity, results } = serde_json::from_slice(&text).ok()?;
        (identity == self.identity).then_some(results)
    }

    /// Writes results. A reader finds the old file or the new one, never a part.
    pub(crate) fn write(&self, results: &impl Serialize) -> io::Result<()> {
        let document = Document { identity: self.identity.clone(), results };
        fs::create_dir_all(self.path.parent().unwrap_or(Path::new(".")))?;
        let aside = self.path.with_extension(format!("{}.partial", std::process::id()));
        let written = fs::write(&aside, serde_json::to_vec_pretty(&document)?);
        written.and_then(|()| fs::rename(&aside, &self.path)).inspect_err(|_| drop(fs::remove_file(&aside)))
    }
}

impl Identity {
    fn of_this_process() -> Option<Self> {
        let mut text = Vec::new();
        File::open("/proc/cpuinfo").ok()?.take(PROCESSOR_BYTES_MAX).read_to_end(&mut text).ok()?;
        let processor = processor(&String::from_utf8_lossy(&text));
        let system = rustix::system::uname();
        let system =
            [system.sysname(), system.release(), system.version()].map(|text| text.to_string_lossy());
        let path = std::env::current_exe().ok()?;
        let metadata = fs::metadata(&path).ok()?;
        let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
        let program = format!(
            "{} {}, {} bytes of {modified}",
            path.display(),
            env!("CARGO_PKG_VERSION"),
            metadata.len()
        );
        Some(Identity { processor, system: system.join(" "), program })
    }
}

/// Returns the lines about the first processor that do not change while it runs.
fn processor(text: &str) -> String {
    let is_kept = |line: &&str| {
        line.split_once(':').is_some_and(|(field, _)| PROCESSOR_FIELDS.contains(&field.trim_end()))
    };
    let first = text.lines().take_while(|line| !line.trim().is_empty());
    first.filter(is_kept).collect::<Vec<_>>().join("\n")
}

/// Returns the user's cache folder (XDG Base Directory Specification).
fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use tempfile::TempDir;

    type Results = BTreeMap<String, u32>;

    fn cache(folder: &TempDir) -> MachineCache {
        let text = |text: &str| text.to_owned();
        let identity = Identity { processor: text("one"), system: text("one"), program: text("one") };
        MachineCache { path: folder.path().join("trireme/kernels.json"), identity }
    }

    fn results() -> Results {
        [("good".to_owned(), 1), ("bad".to_owned(), 2)].into()
    }

    #[test]
    fn results_are_kept_for_the_same_machine_and_program_only() {
        let folder = tempfile::tempdir().unwrap();
        let own = cache(&folder);
        assert_eq!(own.read::<Results>(), None);
        own.write(&results()).unwrap();
        assert_eq!(own.read(), Some(results()));
        assert_eq!(fs::read_dir(folder.path().join("trireme")).unwrap().count(), 1, "nothing else is left");
        let changes: [fn(&mut Identity); 3] = [
            |identity| identity.processor = "other".to_owned(),
            |identity| identity.system = "other".to_owned(),
            |identity| identity.program = "other".to_owned(),
        ];
        for change in changes {
            let mut other = cache(&folder);
            change(&mut other.identity);
            assert_eq!(other.read::<Results>(), None);
        }
    }

    #[test]
    fn files_that_are_broken_or_forged_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let own = cache(&folder);
        own.write(&results()).unwrap();
        let whole = fs::read_to_string(&own.path).unwrap();
        for end in 0..whole.len() {
            fs::write(&own.path, &whole[..end]).unwrap();
            assert_eq!(own.read::<Results>(), None, "the first {end} bytes");
        }
        for forged in [
            whole.replace("good", &"x".repeat(FILE_BYTES_MAX as usize)),
            whole.replace("\"good\": 1", "\"good\": null"),
            whole.replacen('{', "{\"other\": 1,", 1),
            format!("{whole} {{}}"),
            "[".repeat(10_000),
        ] {
            assert_ne!(forged, whole);
            fs::write(&own.path, forged).unwrap();
            assert_eq!(own.read::<Results>(), None);
        }
        fs::write(&own.path, [0xff; 100]).unwrap();
        assert_eq!(own.read::<Results>(), None);
        fs::write(&own.path, &whole).unwrap();
        assert_eq!(own.read(), Some(results()));
        fs::remove_file(&own.path).unwrap();
        fs::create_dir(&own.path).unwrap();
        assert_eq!(own.read::<Results>(), None);
        assert!(own.write(&results()).is_err());
        assert_eq!(fs::read_dir(folder.path().join("trireme")).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_processor_is_identified_by_constant_fields() {
        let text = "processor\t: 0\nmodel name\t: Fast\ncpu MHz\t\t: 1234.5\nflags\t\t: fma avx2\n\nprocessor\t: 1\n\
                    model name\t: Other\n";
        assert_eq!(processor(text), "model name\t: Fast\nflags\t\t: fma avx2");
        let own = Identity::of_this_process().unwrap();
        assert_eq!(own, Identity::of_this_process().unwrap());
    }
}
