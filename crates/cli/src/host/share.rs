//! A worker's share of its host, which several workers, and perhaps several launchers, use together.
//!
//! All workers exchange the resources that each is granted: CPUs, and the CPU and memory limits of its control groups and their ancestors.
//! From these, every worker derives its threads, its CPUs, and the workers with which it shares each limit, by the same rules. Binding to
//! CPUs changes no result.

use super::control_groups::identity;
use super::cpu_limit::CpuLimit;
use super::memory_limit::{MemoryLimit, SharedLimit};
use anyhow::Result;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;
use trireme_base::format_ranges;
use trireme_comm::{Group, host_name};
use trireme_train::all_gather_json;
use trireme_train::config::{Bind, HugePages};

/// The resources that this host grants a worker, as the worker sees them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct WorkerResources {
    /// Boot id of the running kernel, which identifies the machine. Empty if unknown.
    machine: String,
    host: String,
    /// CPUs that the worker may run on. CPUs that share caches and memory are next to each other.
    cpus: Vec<usize>,
    /// CPU limits of control groups, in cores.
    cpu_limits: Vec<LimitWithOrigin<f64>>,
    /// Memory limits, inner ones before outer ones.
    memory_limits: Vec<LimitWithOrigin<MemoryLimit>>,
    /// Mean number of processes that ran or waited to run in the last minute.
    load: f64,
}

/// A limit on the total use of all processes of a control group, or of the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct LimitWithOrigin<T> {
    setter: LimitOrigin,
    limit: T,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum LimitOrigin {
    Machine,
    /// The machine's pool of huge pages. Its file has another identity in each network namespace.
    Pool,
    /// A control group, by the identity of its file.
    Group((u64, u64)),
}

impl LimitOrigin {
    fn of(limit: &MemoryLimit) -> Self {
        match &limit.file {
            None => LimitOrigin::Machine,
            Some(_) if limit.is_pool() => LimitOrigin::Pool,
            Some(file) => LimitOrigin::Group(identity(file)),
        }
    }
}

impl<T> LimitWithOrigin<T> {
    /// Returns the number of `workers` to which the limit applies.
    fn num_limited(
        &self,
        workers: &[(usize, &WorkerResources)],
        limits: impl Fn(&WorkerResources) -> &[LimitWithOrigin<T>],
    ) -> usize {
        let is_limited =
            |resources: &WorkerResources| limits(resources).iter().any(|other| other.setter == self.setter);
        workers.iter().filter(|(_, resources)| is_limited(resources)).count()
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HostShare {
    /// Number of workers that share memory segments on this host.
    pub(crate) num_workers: usize,
    pub(crate) limits: Vec<SharedLimit>,
    /// CPUs of this worker. A CPU that several workers may use counts in equal parts, and control groups may limit the sum.
    pub(crate) num_cpus: f64,
    /// Number of threads with a CPU each, at least 1.
    pub(crate) num_threads: usize,
    /// The CPUs that this worker is bound to, if any.
    binding: Option<Vec<usize>>,
    /// The reason why the worker is not bound, unless binding does not apply to it (see `binding`).
    pub(crate) why_unbound: Option<String>,
}

impl HostShare {
    /// Returns the share of one of `num_workers` workers that have not exchanged their resources yet. Their shares are assumed to be equal.
    pub(crate) fn of_equal_workers(num_workers: usize, huge_pages: HugePages) -> Self {
        HostShare {
            num_workers,
            limits: SharedLimit::all(huge_pages),
            num_cpus: trireme_train::share_of_cores(1) as f64 / num_workers as f64,
            num_threads: trireme_train::share_of_cores(num_workers),
            binding: None,
            why_unbound: None,
        }
    }

    /// Returns the share of this rank. All ranks gather the resources of all workers, and compute the shares from them. Collective.
    pub(crate) fn of_world(group: &Group, huge_pages: HugePages, bind: Bind) -> Result<Self> {
        let mut own = WorkerResources::of_this_process(huge_pages);
        if own.machine.is_empty() {
            // A worker whose machine is unknown counts as alone on it.
            own.machine = format!("that of rank {}", group.rank());
        }
        let resources = all_gather_json(group, &own)?;
        group
            .flight_recorder()
            .name_hosts(resources.iter().map(|resources| resources.host.clone()).collect());
        let hosts = group.hosts();
        let num_workers = hosts.ranks(hosts.host_of(group.rank())).len();
        Ok(Self::from_resources(&resources, group.rank().0, num_workers, bind))
    }

    fn from_resources(resources: &[WorkerResources], rank: usize, num_workers: usize, bind: Bind) -> Self {
        let own = &resources[rank];
        let neighbors: Vec<(usize, &WorkerResources)> =
            resources.iter().enumerate().filter(|(_, resources)| resources.machine == own.machine).collect();
        let limits = own.memory_limits.iter().map(|bound| SharedLimit {
            limit: bound.limit.clone(),
            num_sharing: Some(bound.num_limited(&neighbors, |resources| &resources.memory_limits)),
        });
        // A CPU that several workers may use counts in equal parts.
        let users = |cpu| neighbors.iter().filter(|(_, resources)| resources.cpus.contains(&cpu)).count();
        let num_cpus: f64 = own.cpus.iter().map(|&cpu| 1.0 / users(cpu) as f64).sum();
        let quotas = own.cpu_limits.iter().map(|bound| {
            bound.limit / bound.num_limited(&neighbors, |resources| &resources.cpu_limits) as f64
        });
        let num_cpus = quotas.fold(num_cpus, f64::min);
        // The addend of 1e-9 accounts for rounding: three thirds may sum to just below 1.
        let num_threads = ((num_cpus + 1e-9) as usize).max(1);
        let binding = binding(own, rank, &neighbors, bind);
        let (binding, why_unbound) = match binding {
            Ok(binding) => (binding, None),
            Err(why) => (None, Some(why)),
        };
        let limits = limits.collect();
        HostShare { num_workers, limits, num_cpus, num_threads, binding, why_unbound }
    }

    /// Describes the CPUs that `num_workers` workers of this host would be bound to.
    pub(crate) fn preview(num_workers: usize) -> String {
        let resources = vec![WorkerResources::of_this_process(HugePages::Transparent); num_workers];
        let shares =
            (0..num_workers).map(|rank| Self::from_resources(&resources, rank, num_workers, Bind::Auto));
        let texts = shares.enumerate().map(|(rank, share)| match (share.bound_to(), share.why_unbound) {
            (Some(cpus), _) => Ok(format!("rank {rank}: {cpus}")),
            (None, Some(why)) => Err(format!("{num_workers} workers are not bound to cores: {why}")),
            (None, None) => Ok("one worker may use all".to_owned()),
        });
        let texts: Result<Vec<String>, String> = texts.collect();
        texts.map_or_else(|why| why, |texts| texts.join("; "))
    }

    /// Binds the calling thread, and the threads that it starts later, to the CPUs of this worker, if it has its own.
    pub(crate) fn bind(&self) -> io::Result<()> {
        let Some(cpus) = &self.binding else { return Ok(()) };
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        Ok(sched_setaffinity(None, &set)?)
    }

    /// Describes the CPUs that this worker is bound to; `None` if it is not bound.
    pub(crate) fn bound_to(&self) -> Option<String> {
        Some(format!("CPUs {}", format_ranges(self.binding.clone()?)))
    }
}

/// Returns the CPUs to bind a worker to. `None` if binding does not apply: with `bind = "none"`, for a single worker, or if the launcher
/// has chosen CPUs for the workers. The error is the reason why the worker cannot or should not be bound.
fn binding(
    own: &WorkerResources,
    rank: usize,
    neighbors: &[(usize, &WorkerResources)],
    bind: Bind,
) -> Result<Option<Vec<usize>>, String> {
    let are_chosen = neighbors.iter().any(|(_, resources)| resources.cpus != own.cpus);
    if bind == Bind::None || are_chosen || neighbors.len() == 1 {
        return Ok(None);
    }
    let num_workers = neighbors.len();
    if own.cpus.iter().any(|&cpu| cpu >= CpuSet::MAX_CPU) || sched_getaffinity(None).is_err() {
        return Err("the system has more CPUs than can be chosen from".to_owned());
    }
    if num_workers > own.cpus.len() {
        return Err(format!("{num_workers} workers share {} CPUs", own.cpus.len()));
    }
    let load = neighbors.iter().map(|(_, resources)| resources.load).fold(0.0, f64::max);
    if bind == Bind::Auto && !own.cpu_limits.is_empty() {
        return Err("a control group limits the time of all together".to_owned());
    }
    // Two programs that are bound to the same CPUs would each wait for the other.
    if bind == Bind::Auto && load > own.cpus.len() as f64 / 2.0 {
        return Err(format!("other programs use this host (load {load:.1})"));
    }
    let place = neighbors.iter().position(|&(other, _)| other == rank).expect("a rank is its own neighbor");
    let border = |place: usize| place * own.cpus.len() / num_workers;
    Ok(Some(own.cpus[border(place)..border(place + 1)].to_vec()))
}

impl WorkerResources {
    fn of_this_process(huge_pages: HugePages) -> Self {
        let cpu_limits = CpuLimit::all(Path::new("/")).into_iter();
        let memory_limits = MemoryLimit::all(Path::new("/"), huge_pages).into_iter();
        WorkerResources {
            host: host_name(),
            machine: fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
            cpus: by_topology(allowed_cpus(), Path::new("/")),
            cpu_limits: cpu_limits
                .map(|limit| LimitWithOrigin {
                    setter: LimitOrigin::Group(identity(&limit.file)),
                    limit: limit.num_cores,
                })
                .collect(),
            memory_limits: memory_limits
                .map(|limit| LimitWithOrigin { setter: LimitOrigin::of(&limit), limit })
                .collect(),
            load: load_average(),
        }
    }
}

/// Returns the mean number of processes that ran or waited to run in the last minute; 0 if unknown.
pub(crate) fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0)
}

fn allowed_cpus() -> Vec<usize> {
    let Ok(allowed) = sched_getaffinity(None) else {
        // The system has more CPUs than a set can hold.
        return (0..trireme_train::share_of_cores(1)).collect();
    };
    (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect()
}

/// Sorts CPUs by memory node, package and core, read from the files below `root`. Adjacent CPUs share caches and memory where possible.
fn by_topology(mut cpus: Vec<usize>, root: &Path) -> Vec<usize> {
    let folder = |cpu: usize| root.join(format!("sys/devices/system/cpu/cpu{cpu}"));
    let number = |cpu: usize, name: &str| {
        let text = fs::read_to_string(folder(cpu).join("topology").join(name)).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    let node = |cpu: usize| {
        let files = fs::read_dir(folder(cpu)).into_iter().flatten().filter_map(Result::ok);
        let names = files.filter_map(|file| file.file_name().into_string().ok());
        let mut nodes = names.filter_map(|name| name.strip_prefix("node")?.parse::<u64>().ok());
        nodes.next().unwrap_or(0)
    };
    cpus.sort_by_cached_key(|&cpu| {
        (node(cpu), number(cpu, "physical_package_id"), number(cpu, "core_id"), cpu)
    });
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Pages;

    fn limit(bytes: u64) -> MemoryLimit {
        MemoryLimit { bytes, file: None, pages: Pages::Ordinary }
    }

    fn resources(cpus: impl IntoIterator<Item = usize>) -> WorkerResources {
        let machine = "one".to_owned();
        WorkerResources {
            machine,
            host: String::new(),
            cpus: cpus.into_iter().collect(),
            cpu_limits: Vec::new(),
            memory_limits: vec![LimitWithOrigin { setter: LimitOrigin::Machine, limit: limit(100) }],
            load: 0.0,
        }
    }

    fn shares(resources: &[WorkerResources], bind: Bind) -> Vec<HostShare> {
        (0..resources.len())
            .map(|rank| HostShare::from_resources(resources, rank, resources.len(), bind))
            .collect()
    }

    fn threads(resources: &[WorkerResources]) -> Vec<usize> {
        shares(resources, Bind::None).iter().map(|share| share.num_threads).collect()
    }

    #[test]
    fn a_worker_with_its_own_processors_uses_all_of_them() {
        let own: Vec<WorkerResources> = (0..4).map(|rank| resources(8 * rank..8 * rank + 8)).collect();
        assert_eq!(threads(&own), [8; 4]);
        assert!(shares(&own, Bind::Cores).iter().all(|share| share.bound_to().is_none()));
        assert_eq!(threads(&vec![resources(0..32); 4]), [8; 4]);
        assert_eq!(threads(&[resources(0..2), resources(0..2), resources(2..8)]), [1, 1, 6]);
        assert_eq!(threads(&vec![resources(0..2); 3]), [1; 3]);
        let cpus: f64 =
            shares(&vec![resources(0..2); 3], Bind::None).iter().map(|share| share.num_cpus).sum();
        assert!((cpus - 2.0).abs() < 1e-9, "{cpus} CPUs of 2");
        let elsewhere = WorkerResources { machine: "another".to_owned(), ..resources(0..8) };
        assert_eq!(threads(&[resources(0..8), elsewhere]), [8; 2]);
    }

    #[test]
    fn the_time_that_a_control_group_allows_is_shared_by_its_workers() {
        let limited = |limits: &[(u64, f64)]| {
            let limits = limits
                .iter()
                .map(|&(group, limit)| LimitWithOrigin { setter: LimitOrigin::Group((0, group)), limit });
            WorkerResources { cpu_limits: limits.collect(), ..resources(0..16) }
        };
        assert_eq!(threads(&[limited(&[(1, 4.0)]), limited(&[(1, 4.0)])]), [2; 2]);
        assert_eq!(threads(&[limited(&[(1, 4.0)]), limited(&[(2, 0.5)])]), [4, 1]);
        // Sibling groups with their own limits, in a group whose limit is below their sum.
        assert_eq!(threads(&[limited(&[(1, 4.0), (9, 6.0)]), limited(&[(2, 2.0), (9, 6.0)])]), [3, 2]);
    }

    #[test]
    fn two_launchers_on_one_host_share_its_memory() {
        let in_groups = |groups: &[u64]| {
            let mut resources = resources(0..4);
            let limits = groups.iter().map(|&group| LimitWithOrigin {
                setter: LimitOrigin::Group((0, group)),
                limit: limit(10 * group),
            });
            resources.memory_limits.splice(0..0, limits);
            resources
        };
        let sharing = |resources: &[WorkerResources]| -> Vec<Vec<(u64, usize)>> {
            let shares = shares(resources, Bind::None).into_iter();
            let told = |shared: &SharedLimit| (shared.limit.bytes, shared.num_sharing.unwrap());
            shares.map(|share| share.limits.iter().map(told).collect()).collect()
        };
        assert_eq!(sharing(&[in_groups(&[]), in_groups(&[])]), [[(100, 2)], [(100, 2)]]);
        // Sibling groups with their own limits, in a group whose limit is below their sum.
        let siblings = [in_groups(&[4, 6]), in_groups(&[2, 6]), in_groups(&[4, 6])];
        let first = vec![(40, 2), (60, 3), (100, 3)];
        assert_eq!(sharing(&siblings), [first.clone(), vec![(20, 1), (60, 3), (100, 3)], first]);
    }

    #[test]
    fn workers_are_bound_to_their_own_cores_unless_a_launcher_has_chosen() {
        let bound = |resources: &[WorkerResources], bind| -> Vec<Option<String>> {
            shares(resources, bind).iter().map(HostShare::bound_to).collect()
        };
        let texts = |texts: [&str; 2]| texts.map(|text| Some(text.to_owned())).to_vec();
        let all = vec![resources([0, 2, 4, 1, 3, 5]); 2];
        assert_eq!(bound(&all, Bind::Auto), texts(["CPUs 0, 2, 4", "CPUs 1, 3, 5"]));
        assert_eq!(bound(&all, Bind::None), [None, None]);
        let busy: Vec<WorkerResources> =
            all.iter().map(|resources| WorkerResources { load: 3.5, ..resources.clone() }).collect();
        assert_eq!(bound(&busy, Bind::Auto), [None, None]);
        assert!(shares(&busy, Bind::Auto)[0].why_unbound.as_ref().unwrap().contains("load 3.5"));
        assert_eq!(bound(&busy, Bind::Cores), texts(["CPUs 0, 2, 4", "CPUs 1, 3, 5"]));
        assert_eq!(bound(&vec![resources(0..2); 3], Bind::Cores), vec![None; 3]);
        assert_eq!(bound(&[resources(0..4)], Bind::Cores), [None]);
    }

    #[test]
    fn neighbors_share_caches_and_memory() {
        let folder = tempfile::tempdir().unwrap();
        for (cpu, node, core) in [(0, 0, 0), (1, 1, 0), (2, 0, 0), (3, 1, 0), (4, 0, 1)] {
            let path = folder.path().join(format!("sys/devices/system/cpu/cpu{cpu}"));
            fs::create_dir_all(path.join("topology")).unwrap();
            fs::create_dir(path.join(format!("node{node}"))).unwrap();
            fs::write(path.join("topology/physical_package_id"), format!("{node}\n")).unwrap();
            fs::write(path.join("topology/core_id"), format!("{core}\n")).unwrap();
        }
        assert_eq!(by_topology(vec![0, 1, 2, 3, 4], folder.path()), [0, 2, 4, 1, 3]);
        assert_eq!(by_topology(vec![7, 5], Path::new("/nowhere")), [5, 7]);
    }
}
