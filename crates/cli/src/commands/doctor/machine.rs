//! Facts that the system reports about the machine.

use crate::host::{CpuLimit, MemoryLimit};
use crate::numbers::size_with_unit;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};

/// Instruction sets that matter to the kernels or are often asked for, as Linux calls them.
const INSTRUCTION_SETS: [&str; 16] = [
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512vl",
    "avx512bw",
    "avx512dq",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
];

/// The machine as the system describes it; the fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) processor: Option<String>,
    pub(super) architecture: &'static str,
    /// Logical cores that are online.
    pub(super) num_cores: usize,
    /// Logical cores that this process may use.
    pub(super) num_cores_available: usize,
    /// CPU time that this process's control group allows, in cores, if it is limited.
    pub(super) cpu_limit_cores: Option<f64>,
    pub(super) cpu_limit_file: Option<PathBuf>,
    pub(super) threads_per_core: usize,
    /// Vendor and product name of a virtual machine.
    pub(super) hypervisor: Option<String>,
    pub(super) instruction_sets: Vec<&'static str>,
    pub(super) caches: Vec<Cache>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) memory_available_bytes: Option<u64>,
    /// Memory limit of this process's control groups, if it is lower than `memory_bytes`.
    pub(super) memory_limit_bytes: Option<u64>,
    pub(super) memory_limit_file: Option<PathBuf>,
    /// Mode of transparent huge pages: always, madvise or never.
    pub(super) huge_pages: Option<String>,
    /// Memory that the host has reserved in huge pages of 2 MiB, for `[memory] huge_pages = "reserved"`.
    pub(super) huge_pages_reserved_bytes: u64,
    pub(super) dev_shm_bytes: Option<u64>,
    /// Mean number of processes that ran or waited to run in the last minute.
    pub(super) load: Option<f64>,
}

/// A cache of the first core.
#[derive(Debug, Serialize, PartialEq)]
pub(super) struct Cache {
    /// Such as L1d.
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Logical cores that share it.
    pub(super) num_cores: usize,
}

impl Machine {
    /// Reads the facts below `root`, which is `/` except in tests. Facts that the system does not report stay unknown.
    pub(super) fn read(root: &Path) -> Self {
        let text = |path: &str| text(root, path);
        let (processor, memory) = (text("proc/cpuinfo"), text("proc/meminfo"));
        let bytes = |key| Some(number(field(&memory, key)?.strip_suffix("kB")?)? * 1024);
        let flags = field(&processor, "flags").or(field(&processor, "Features")).unwrap_or_default();
        let has = |flag: &str| flags.split_whitespace().any(|found| found == flag);
        let per_package = |key| field(&processor, key).and_then(number);
        let threads_per_core = match (per_package("siblings"), per_package("cpu cores")) {
            (Some(threads), Some(cores)) => threads.checked_div(cores).unwrap_or(1).max(1) as usize,
            _ => 1,
        };
        let memory_bytes = bytes("MemTotal");
        let limit = MemoryLimit::lowest_of_groups(root)
            .filter(|limit| memory_bytes.is_none_or(|all| limit.bytes < all));
        let cpu_limit = CpuLimit::lowest_of_groups(root);
        Machine {
            processor: field(&processor, "model name").map(str::to_owned),
            architecture: std::env::consts::ARCH,
            num_cores: processor.lines().filter(|line| line.starts_with("processor")).count().max(1),
            num_cores_available: trireme_train::share_of_cores(1),
            cpu_limit_cores: cpu_limit.as_ref().map(|limit| limit.num_cores),
            cpu_limit_file: cpu_limit.map(|limit| limit.file),
            threads_per_core,
            hypervisor: has("hypervisor").then(|| hypervisor(root)),
            instruction_sets: INSTRUCTION_SETS.into_iter().filter(|set| has(set)).collect(),
            caches: caches(root),
            memory_bytes,
            memory_available_bytes: bytes("MemAvailable"),
            memory_limit_bytes: limit.as_ref().map(|limit| limit.bytes),
            memory_limit_file: limit.and_then(|limit| limit.file),
            huge_pages: chosen(&text("sys/kernel/mm/transparent_hugepage/enabled")),
            huge_pages_reserved_bytes: MemoryLimit::of_pool(root).bytes,
            dev_shm_bytes: rustix::fs::statvfs(root.join("dev/shm"))
                .ok()
                .map(|files| files.f_frsize.saturating_mul(files.f_blocks)),
            load: text("proc/loadavg").split_whitespace().next().and_then(|load| load.parse().ok()),
        }
    }
}

/// Returns a file's text; empty if it cannot be read.
fn text(root: &Path, path: &str) -> String {
    fs::read(root.join(path))
        .map_or_else(|_| String::new(), |text| String::from_utf8_lossy(&text).into_owned())
}

fn hypervisor(root: &Path) -> String {
    let known = ["sys_vendor", "product_name"].map(|name| text(root, &format!("sys/class/dmi/id/{name}")));
    match known.map(|text| text.trim().to_owned()) {
        [maker, name] if maker.is_empty() && name.is_empty() => "unknown".to_owned(),
        [maker, name] => format!("{maker} {name}").trim().to_owned(),
    }
}

fn caches(root: &Path) -> Vec<Cache> {
    let cache = |index: usize| {
        let folder = format!("sys/devices/system/cpu/cpu0/cache/index{index}");
        let text = |name| text(root, &format!("{folder}/{name}")).trim().to_owned();
        let kind = match &*text("type") {
            "Data" => "d",
            "Instruction" => "i",
            _ => "",
        };
        let name = format!("L{}{kind}", number(&text("level"))?);
        let bytes = size_with_unit(&text("size"))?;
        Some(Cache { name, bytes, num_cores: list_len(&text("shared_cpu_list")) })
    };
    (0..16).map_while(cache).filter(|cache| !cache.name.ends_with('i')).collect()
}

/// Returns the value of a line `key : value`.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(found, _)| found.trim() == key).map(|(_, value)| value.trim())
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// Counts the elements of a list such as `0-3,8`.
fn list_len(list: &str) -> usize {
    let len = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        usize::try_from(last.checked_sub(first)?.checked_add(1)?).ok()
    };
    list.split(',').filter_map(len).fold(0, usize::saturating_add)
}

/// Returns the word in brackets, such as `madvise` in `always [madvise] never`.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESSOR: &str = "\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8481C
siblings\t: 4
cpu cores\t: 2
flags\t\t: fpu avx2 fma avx512f avx512_bf16 hypervisor amx_bf16 amx_tile
processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8481C
";

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn all_reported_facts_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for (path, text) in [
            ("proc/cpuinfo", PROCESSOR),
            ("proc/meminfo", "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\n"),
            ("proc/loadavg", "1.25 0.5 0.25 3/85 2663\n"),
            ("proc/self/cgroup", "4:memory:/a/b\n3:cpu:/\n0::/\n"),
            ("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "16\n"),
            ("sys/class/dmi/id/sys_vendor", "QEMU\n"),
            ("sys/class/dmi/id/product_name", "Standard PC\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/level", "1\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/type", "Data\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/size", "48K\n"),
            ("sys/devices/system/cpu/cpu0/cache/index0/shared_cpu_list", "0\n"),
            ("sys/devices/system/cpu/cpu0/cache/index1/level", "1\n"),
            ("sys/devices/system/cpu/cpu0/cache/index1/type", "Instruction\n"),
            ("sys/devices/system/cpu/cpu0/cache/index1/size", "32K\n"),
            ("sys/devices/system/cpu/cpu0/cache/index2/level", "3\n"),
            ("sys/devices/system/cpu/cpu0/cache/index2/type", "Unified\n"),
            ("sys/devices/system/cpu/cpu0/cache/index2/size", "2M\n"),
            ("sys/devices/system/cpu/cpu0/cache/index2/shared_cpu_list", "0-1,4\n"),
        ] {
            write(root, path, text);
        }
        let machine = Machine::read(root);
        assert_eq!(machine.processor.as_deref(), Some("Intel(R) Xeon(R) Platinum 8481C"));
        assert_eq!((machine.num_cores, machine.threads_per_core), (2, 2));
        assert_eq!(machine.hypervisor.as_deref(), Some("QEMU Standard PC"));
        assert_eq!(
            machine.instruction_sets,
            ["avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"]
        );
        let cache = |name: &str, bytes, num_cores| Cache { name: name.to_owned(), bytes, num_cores };
        assert_eq!(machine.caches, [cache("L1d", 48 << 10, 1), cache("L3", 2 << 20, 3)]);
        assert_eq!((machine.memory_bytes, machine.memory_available_bytes), (Some(2 << 20), Some(1 << 20)));
        assert_eq!((machine.memory_limit_bytes, machine.load), (Some(1000), Some(1.25)));
        let file = Path::new("/sys/fs/cgroup/memory/a/memory.limit_in_bytes");
        assert_eq!(machine.memory_limit_file.as_deref(), Some(file));
        assert_eq!(machine.huge_pages.as_deref(), Some("madvise"));
        assert_eq!(machine.huge_pages_reserved_bytes, 32 << 20);
    }

    #[test]
    fn missing_or_malformed_facts_stay_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let nothing = Machine::read(root);
        assert_eq!((nothing.num_cores, nothing.threads_per_core), (1, 1));
        assert!(nothing.processor.is_none() && nothing.hypervisor.is_none() && nothing.caches.is_empty());
        assert!(nothing.memory_bytes.is_none() && nothing.memory_limit_bytes.is_none());
        for (path, text) in [
            ("proc/cpuinfo", "siblings: 4\ncpu cores: 0\nflags: hypervisor"),
            ("proc/meminfo", "MemTotal: many kB\nMemAvailable: 5\n"),
            ("proc/loadavg", "low"),
            ("proc/self/cgroup", "0\n::\n0::/../../x\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "[always"),
            ("sys/devices/system/cpu/cpu0/cache/index0/level", "1"),
            ("sys/devices/system/cpu/cpu0/cache/index0/size", "99999999999999999999K"),
        ] {
            write(root, path, text);
        }
        let nonsense = Machine::read(root);
        assert!(nonsense.memory_bytes.is_none() && nonsense.memory_available_bytes.is_none());
        assert!(nonsense.caches.is_empty() && nonsense.huge_pages.is_none() && nonsense.load.is_none());
        assert_eq!(nonsense.threads_per_core, 1);
        assert_eq!([list_len("0-3,8"), list_len("3-0"), list_len("x"), list_len("")], [5, 0, 0, 0]);
    }
}
