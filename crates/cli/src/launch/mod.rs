//! Workers of a world: processes that another launcher has described by its environment, or that this process starts on its host.

mod command_workers;
mod environment;
mod error;
mod host_list;
mod joining;
mod slurm;
mod supervisor;
mod time_limit;
mod worker_processes;

pub(crate) use command_workers::{launch_workers, recorder_folder};
pub(crate) use environment::WorkerEnvironment;
pub(crate) use error::LaunchError;
pub(crate) use joining::{NotJoined, before_joining, interface, join_options, work_in_world};
pub(crate) use supervisor::{
    INVOKED_AS_VARIABLE, LocalWorld, OnSignal, ignored_signals, run_local_workers, worker_command,
};
pub(crate) use time_limit::run_end;
pub(crate) use worker_processes::{LOST_PEER_EXIT_CODE, die_with_parent, error_log, is_under_launcher};
