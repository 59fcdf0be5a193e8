//! The world that this process belongs to, as the environment describes it.
//!
//! The first family of variables that describes a worker is used:
//!
//! 1. torchrun's: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, and `LOCAL_RANK` with
//!    `LOCAL_WORLD_SIZE`. Without the last two, a loopback `MASTER_ADDR` means that the whole world is on this
//!    host, unless `PET_NNODES` says that there are several hosts. In all other cases, this worker is assumed to be alone on its host.
//! 2. Open MPI's: `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE`.
//! 3. SLURM's: `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID`, and the number of tasks
//!    of each node.
//! 4. PMI's: `PMI_RANK`, `PMI_SIZE`, and `MPI_LOCALRANKID` with `MPI_LOCALNRANKS`.
//!
//! torchrun's own store may keep listening on `MASTER_PORT` (`TORCHELASTIC_USE_AGENT_STORE`); the workers then meet at the
//! next port.
//!
//! `MASTER_ADDR` and `MASTER_PORT` may be set in addition to any family; alone they do not describe a worker. Without them the workers meet
//! on the first host of SLURM's list, or on this host if all are here, at a port that follows from the job's name.
//!
//! SLURM sets some of its variables in processes that are not workers. A batch script has `SLURM_PROCID` = 0 and the `SLURM_NTASKS` of the
//! whole job, but also `ENVIRONMENT` = `BATCH`, and no `SLURM_STEP_ID`, which `srun` sets for its tasks. The shell of `salloc` has no
//! `SLURM_PROCID`. An interactive shell is the only task of its step. None of these processes is a worker, and neither is the only process
//! of a PMI world.

use super::LaunchError;
use super::host_list::{first_host, tasks_on_node};
use std::net::IpAddr;
use trireme_base::Rank;

/// Maximum world size. No launcher starts more workers, so a larger number is a mistake.
const WORLD_SIZE_MAX: usize = 1 << 20;

/// torchrun's default port, for launchers that name no job.
const DEFAULT_MASTER_PORT: u16 = 29_500;

/// The facts about its world that a worker needs to join it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WorkerEnvironment {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_world_size: usize,
    /// Name or address of the host on which rank 0 listens.
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
}

impl WorkerEnvironment {
    /// Reads the variables of this process; `None` if it is not a worker.
    pub(crate) fn of_this_process() -> Result<Option<Self>, LaunchError> {
        Self::from_variables(&|name| std::env::var(name).ok())
    }

    /// Reads the given variables; `None` if they do not describe a worker.
    pub(crate) fn from_variables(
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, LaunchError> {
        let variables = Variables { lookup };
        let family = if variables.has("RANK") {
            Some(torchrun(&variables)?)
        } else if let Some(present) = variables.first_of(&["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]) {
            Some(open_mpi(&variables, present)?)
        } else if let Some(family) = slurm(&variables)? {
            Some(family)
        } else {
            pmi(&variables)?
        };
        match (family, variables.first_of(&["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])) {
            (Some(family), _) => family.into_worker(&variables).map(Some),
            (None, Some(present)) => Err(LaunchError::MissingVariable { present, missing: "RANK" }),
            (None, None) => Ok(None),
        }
    }
}

/// The environment. Empty variables count as unset.
struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn first_of(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.has(name))
    }

    fn number(&self, variable: &'static str, max: usize) -> Result<Option<usize>, LaunchError> {
        let Some(value) = self.text(variable) else { return Ok(None) };
        match value.trim().parse() {
            Ok(number) if number <= max => Ok(Some(number)),
            _ => {
                let expected = format!("a whole number from 0 to {max}");
                Err(LaunchError::InvalidVariable { variable, value, expected })
            }
        }
    }

    /// Returns a number that must be set because `present` is.
    fn required(
        &self,
        variable: &'static str,
        present: &'static str,
    ) -> Result<NumericVariable, LaunchError> {
        match self.number(variable, WORLD_SIZE_MAX)? {
            Some(value) => Ok(NumericVariable { variable, value }),
            None => Err(LaunchError::MissingVariable { present, missing: variable }),
        }
    }
}

#[derive(Clone, Copy)]
struct NumericVariable {
    variable: &'static str,
    value: usize,
}

impl NumericVariable {
    /// Refuses numbers for which `compare` is false.
    fn require(self, compare: fn(&usize, &usize) -> bool, other: NumericVariable) -> Result<(), LaunchError> {
        if compare(&self.value, &other.value) {
            return Ok(());
        }
        let NumericVariable { variable: first, value: first_value } = self;
        let NumericVariable { variable: second, value: second_value } = other;
        Err(LaunchError::ContradictoryVariables { first, first_value, second, second_value })
    }
}

struct LauncherVariables {
    rank: NumericVariable,
    world_size: NumericVariable,
    /// Rank and number of workers on this host.
    local: Option<(NumericVariable, NumericVariable)>,
    /// The host of rank 0, if the family knows it.
    first_host: Option<String>,
    /// A name that distinguishes this world from others on the same hosts.
    job: Option<String>,
}

impl LauncherVariables {
    fn into_worker(self, variables: &Variables<'_>) -> Result<WorkerEnvironment, LaunchError> {
        self.check(variables)?;
        let master_addr = self.master_addr(variables)?;
        let is_loopback = master_addr == "localhost"
            || master_addr.parse().is_ok_and(|address: IpAddr| address.is_loopback());
        let several_nodes =
            variables.number("PET_NNODES", WORLD_SIZE_MAX).ok().flatten().is_some_and(|nodes| nodes > 1);
        let (local_rank, local_world_size) = match self.local {
            Some((rank, size)) => (rank.value, size.value),
            // Kubeflow's operator sets `MASTER_ADDR` to `localhost` in the container of rank 0, although the other ranks are elsewhere.
            None if is_loopback && !several_nodes => (self.rank.value, self.world_size.value),
            None => (0, 1),
        };
        let master_port = match variables.number("MASTER_PORT", usize::from(u16::MAX))? {
            Some(0) => {
                return Err(LaunchError::InvalidVariable {
                    variable: "MASTER_PORT",
                    value: "0".to_owned(),
                    expected: "the number of a port that all workers know".to_owned(),
                });
            }
            Some(port) if variables.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True") => {
                (port as u16).checked_add(1).unwrap_or(u16::MAX - 1)
            }
            Some(port) => port as u16,
            None => self.job.as_deref().map_or(DEFAULT_MASTER_PORT, port_of_job),
        };
        let (rank, world_size) = (Rank(self.rank.value), self.world_size.value);
        Ok(WorkerEnvironment { rank, world_size, local_rank, local_world_size, master_addr, master_port })
    }

    fn check(&self, variables: &Variables<'_>) -> Result<(), LaunchError> {
        self.rank.require(usize::lt, self.world_size)?;
        if let Some((rank, size)) = self.local {
            rank.require(usize::lt, size)?;
            size.require(usize::le, self.world_size)?;
            rank.require(usize::le, self.rank)?;
        }
        // Scripts may export `WORLD_SIZE` in addition to the variables of another launcher.
        if let Some(value) = variables.number("WORLD_SIZE", WORLD_SIZE_MAX)? {
            NumericVariable { variable: "WORLD_SIZE", value }.require(usize::eq, self.world_size)?;
        }
        Ok(())
    }

    fn master_addr(&self, variables: &Variables<'_>) -> Result<String, LaunchError> {
        if let Some(address) = variables.text("MASTER_ADDR") {
            // An IPv6 address may be in brackets, as in a URL.
            let bare = address.strip_prefix('[').and_then(|address| address.strip_suffix(']'));
            return Ok(bare.map(str::to_owned).unwrap_or(address));
        }
        if self.local.is_some_and(|(_, size)| size.value == self.world_size.value) {
            return Ok("127.0.0.1".to_owned());
        }
        let missing = LaunchError::MissingVariable { present: self.rank.variable, missing: "MASTER_ADDR" };
        self.first_host.clone().ok_or(missing)
    }
}

fn torchrun(variables: &Variables<'_>) -> Result<LauncherVariables, LaunchError> {
    let rank = variables.required("RANK", "RANK")?;
    let world_size = variables.required("WORLD_SIZE", "RANK")?;
    for missing in ["MASTER_ADDR", "MASTER_PORT"] {
        if !variables.has(missing) {
            return Err(LaunchError::MissingVariable { present: "RANK", missing });
        }
    }
    let local = local_counts(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
    Ok(LauncherVariables { rank, world_size, local, first_host: None, job: None })
}

fn open_mpi(variables: &Variables<'_>, present: &'static str) -> Result<LauncherVariables, LaunchError> {
    Ok(LauncherVariables {
        rank: variables.required("OMPI_COMM_WORLD_RANK", present)?,
        world_size: variables.required("OMPI_COMM_WORLD_SIZE", present)?,
        local: Some((
            variables.required("OMPI_COMM_WORLD_LOCAL_RANK", present)?,
            variables.required("OMPI_COMM_WORLD_LOCAL_SIZE", present)?,
        )),
        first_host: None,
        job: variables.text("PMIX_NAMESPACE").or_else(|| variables.text("OMPI_MCA_ess_base_jobid")),
    })
}

fn slurm(variables: &Variables<'_>) -> Result<Option<LauncherVariables>, LaunchError> {
    let is_batch_script = variables.text("ENVIRONMENT").as_deref() == Some("BATCH")
        && variables.first_of(&["SLURM_STEP_ID", "SLURM_STEPID"]).is_none();
    if is_batch_script || !variables.has("SLURM_PROCID") {
        return Ok(None);
    }
    let rank = variables.required("SLURM_PROCID", "SLURM_PROCID")?;
    let num_tasks = variables.first_of(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]).unwrap_or("SLURM_NTASKS");
    let world_size = variables.required(num_tasks, "SLURM_PROCID")?;
    if world_size.value == 1 {
        return Ok(None);
    }
    // Inside a SLURM job, the launcher of an MPI may start helper processes with srun. SLURM's variables then describe the helpers.
    for (variable, count) in [("PMI_RANK", rank), ("PMI_SIZE", world_size)] {
        if let Some(value) = variables.number(variable, WORLD_SIZE_MAX)? {
            NumericVariable { variable, value }.require(usize::eq, count)?;
        }
    }
    let local_rank = variables.required("SLURM_LOCALID", "SLURM_PROCID")?;
    let hosts = variables.text("SLURM_STEP_NODELIST").or_else(|| variables.text("SLURM_JOB_NODELIST"));
    let job = variables.text("SLURM_JOB_ID").map(|job| {
        // Steps of one job may run side by side.
        format!("{job}.{}", variables.text("SLURM_STEP_ID").unwrap_or_default())
    });
    Ok(Some(LauncherVariables {
        rank,
        world_size,
        local: Some((local_rank, slurm_local_world_size(variables)?)),
        // The launch node comes last: it is where srun was called, and need not be part of the job.
        first_host: hosts
            .and_then(|hosts| first_host(&hosts))
            .or_else(|| variables.text("SLURM_LAUNCH_NODE_IPADDR")),
        job,
    }))
}

fn slurm_local_world_size(variables: &Variables<'_>) -> Result<NumericVariable, LaunchError> {
    let node = variables.number("SLURM_NODEID", WORLD_SIZE_MAX)?.unwrap_or(0);
    for variable in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(value) = variables.text(variable) else { continue };
        return match tasks_on_node(&value, node) {
            Some(value) if value <= WORLD_SIZE_MAX => Ok(NumericVariable { variable, value }),
            _ => {
                let expected = format!("the number of tasks per node, such as 4(x2), including node {node}");
                Err(LaunchError::InvalidVariable { variable, value, expected })
            }
        };
    }
    variables.required("SLURM_NTASKS_PER_NODE", "SLURM_PROCID")
}

fn pmi(variables: &Variables<'_>) -> Result<Option<LauncherVariables>, LaunchError> {
    let Some(present) = variables.first_of(&["PMI_RANK", "PMI_SIZE"]) else { return Ok(None) };
    let rank = variables.required("PMI_RANK", present)?;
    let world_size = variables.required("PMI_SIZE", present)?;
    if world_size.value == 1 {
        return Ok(None);
    }
    let local = local_counts(variables, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")?;
    let job = variables.text("SLURM_JOB_ID").or_else(|| variables.text("PMI_ID"));
    Ok(Some(LauncherVariables { rank, world_size, local, first_host: None, job }))
}

/// Returns the rank and the number of workers on this host if both variables are set; an error if only one is.
fn local_counts(
    variables: &Variables<'_>,
    rank: &'static str,
    size: &'static str,
) -> Result<Option<(NumericVariable, NumericVariable)>, LaunchError> {
    match variables.first_of(&[rank, size]) {
        Some(present) => Ok(Some((variables.required(rank, present)?, variables.required(size, present)?))),
        None => Ok(None),
    }
}

/// Returns a port from 20000 to 29999 that follows from the job's name. All workers find the same port, and two jobs on one host are
/// unlikely to collide. Linux gives outgoing connections ports from 32768 on.
fn port_of_job(job: &str) -> u16 {
    let hash = job.bytes().fold(0_u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
    20_000 + (hash % 10_000) as u16
}

#[cfg(test)]
#[path = "environment_tests.rs"]
mod tests;
