//! Joining the world as a worker.
//!
//! A worker that fails before it has joined prints its error first. Then it reports the error to rank 0, or, if it is rank 0, to the
//! ranks that connect to it, so that they do not wait for it ([`NotJoined`]).

use super::WorkerEnvironment;
use super::slurm::node_address;
use super::worker_processes::is_under_launcher;
use crate::diagnostics::{print_diagnostic, set_rank};
use crate::hang;
use crate::hints;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::time::Duration;
use trireme_base::Rank;
use trireme_comm::{
    CommError, Group, JoinOptions, LineListener, OnRefusal, RecorderOptions, Secret, join, report_failure,
};

/// Environment variable with the secret that all workers of a job share. Only processes of the same user can read it.
pub(super) const SECRET_VARIABLE: &str = "TRIREME_SECRET";

/// Maximum time for which a failed worker waits for the places of the others, if Trireme's launcher did not start it.
const PEER_REPORTS_TIMEOUT: Duration = Duration::from_millis(1500);

/// Returns the options of a worker whose place in the world is known; the rest are defaults. The secret comes from the environment, else
/// from `secret_file`. Connections that are refused while the world joins are reported on standard error.
pub(crate) fn join_options(
    environment: &WorkerEnvironment,
    secret_file: Option<&Path>,
) -> Result<JoinOptions, CommError> {
    let text = std::env::var(SECRET_VARIABLE).ok();
    let on_refusal = OnRefusal::new(|refusal| {
        let hint =
            hints::refusal_hint(&refusal.to_string()).map_or(String::new(), |hint| format!("; {hint}"));
        print_diagnostic(&format!("warning: refused a connection: {refusal}{hint}"));
    });
    // One worker of each host, and always rank 0, reports for which ranks it waits.
    let reports_waiting = environment.local_rank == 0 || environment.rank == Rank::ROOT;
    let on_note = LineListener::new(|line| print_diagnostic(&format!("note: {line}")));
    Ok(JoinOptions {
        master_addr: match std::env::var_os("SLURM_JOB_ID") {
            Some(_) => node_address(&environment.master_addr),
            None => environment.master_addr.clone(),
        },
        master_port: environment.master_port,
        secret: secret(text.as_deref(), secret_file)?,
        on_refusal: Some(on_refusal),
        orders_by_host: true,
        on_note: reports_waiting.then_some(on_note),
        ..JoinOptions::new(environment.rank, environment.world_size)
    })
}

/// Returns the network interface on which this worker listens for the others. The environment of this host takes precedence over the
/// config, which all hosts share. Variables of other programs count last, and only if the world spans several hosts.
pub(crate) fn interface(environment: &WorkerEnvironment, configured: Option<&str>) -> Option<String> {
    choose_interface(environment, configured, &|name| std::env::var(name).ok())
}

fn choose_interface(
    environment: &WorkerEnvironment,
    of_config: Option<&str>,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Option<String> {
    let given = |name| lookup(name).filter(|value| !value.trim().is_empty());
    let own = given("TRIREME_INTERFACE").or_else(|| of_config.map(str::to_owned));
    let spans_hosts = environment.local_world_size < environment.world_size;
    let foreign = || given("NCCL_SOCKET_IFNAME").or_else(|| given("GLOO_SOCKET_IFNAME"));
    own.or_else(|| foreign().filter(|_| spans_hosts))
}

/// Does `work` before a worker joins its world. A failure becomes [`NotJoined`], with which the other workers can be informed, so that they
/// do not wait for this worker. Under Trireme's launcher the failure stays as it is, because the launcher notices the end of the worker.
pub(crate) fn before_joining<T>(
    environment: Option<&WorkerEnvironment>,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if let Some(environment) = environment {
        attribute_diagnostics_to(environment.rank);
    }
    work().map_err(|failure| match environment.map(|environment| join_options(environment, None)) {
        Some(Ok(options)) => NotJoined::of(failure, options),
        _ => failure,
    })
}

/// The failure of a worker before it joined its world.
#[derive(Debug, thiserror::Error)]
#[error("{failure:#}")]
pub(crate) struct NotJoined {
    pub(crate) failure: anyhow::Error,
    options: Box<JoinOptions>,
}

impl NotJoined {
    fn of(failure: anyhow::Error, options: JoinOptions) -> anyhow::Error {
        if is_under_launcher() { failure } else { NotJoined { failure, options: Box::new(options) }.into() }
    }

    /// Reports the failure to the other workers. Takes some seconds at most.
    pub(crate) fn report_to_peers(&self) {
        let informed = match self.failure.downcast_ref() {
            Some(CommError::RankFailed { informed, .. }) => informed,
            // The failure was found on this host, before rank 0 admitted this rank.
            None
            | Some(
                CommError::Options { .. }
                | CommError::Interface { .. }
                | CommError::ListenForPeers { .. }
                | CommError::SecretMissing { .. }
                | CommError::SecretUnfit { .. }
                | CommError::SecretFile { .. }
                | CommError::TlsFile { .. }
                | CommError::TlsUnavailable,
            ) => &Vec::new(),
            // The other workers know of any other failure, or cannot be reached.
            Some(_) => return,
        };
        let hint = hints::hint(&self.failure).map(|hint| format!("; {hint}")).unwrap_or_default();
        report_failure(&self.options, &format!("{:#}{hint}", self.failure), informed);
    }
}

/// Joins the world and does `work` there. A failure between workers is reported with the state of all of them: by Trireme's launcher from
/// the reports in `recorder_folder`, or, without that launcher, by this worker.
pub(crate) fn work_in_world(
    options: JoinOptions,
    recorder_folder: Option<PathBuf>,
    work: impl FnOnce(Group) -> Result<()>,
) -> Result<()> {
    attribute_diagnostics_to(options.rank);
    let explains_failures = !is_under_launcher();
    let on_stall = LineListener::new(|line| print_diagnostic(&format!("warning: {line}")));
    let flight_recorder = RecorderOptions {
        folder: recorder_folder,
        on_stall: Some(on_stall),
        peer_reports_timeout: if explains_failures { PEER_REPORTS_TIMEOUT } else { Duration::ZERO },
    };
    let options = JoinOptions { flight_recorder, ..options };
    let group = join(&options).map_err(|failure| NotJoined::of(failure.into(), options))?;
    // Joining may have renumbered the ranks.
    attribute_diagnostics_to(group.rank());
    let recorder = group.flight_recorder().clone();
    let result = work(group);
    if explains_failures { result.map_err(|failure| hang::explain(failure, &recorder)) } else { result }
}

/// Attributes diagnostics to `rank`. Ranks other than 0 share standard error, unless Trireme's launcher has started them.
fn attribute_diagnostics_to(rank: Rank) {
    set_rank(rank, rank != Rank::ROOT && !is_under_launcher());
}

/// Returns the secret `text` if it is set, else the secret of the file, if there is one.
fn secret(text: Option<&str>, file: Option<&Path>) -> Result<Option<Secret>, CommError> {
    match (text, file) {
        (Some(text), _) if !text.is_empty() => Secret::new(text).map(Some),
        (_, Some(file)) => Secret::read(file).map(Some),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_interface_of_the_host_counts_before_that_of_the_config() {
        let environment = |local_world_size| WorkerEnvironment {
            rank: Rank(0),
            world_size: 4,
            local_rank: 0,
            local_world_size,
            master_addr: "a".to_owned(),
            master_port: 1,
        };
        let choose = |set: &[&str], of_config, local_world_size| {
            let lookup = |name: &str| set.contains(&name).then(|| name.to_lowercase());
            choose_interface(&environment(local_world_size), of_config, &lookup)
        };
        let all = ["TRIREME_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"];
        assert_eq!(choose(&all, Some("eth0"), 2).as_deref(), Some("trireme_interface"));
        assert_eq!(choose(&all[1..], Some("eth0"), 2).as_deref(), Some("eth0"));
        assert_eq!(choose(&all[1..], None, 2).as_deref(), Some("nccl_socket_ifname"));
        assert_eq!(choose(&all[2..], None, 2).as_deref(), Some("gloo_socket_ifname"));
        assert_eq!(choose(&all[1..], None, 4), None);
    }

    #[test]
    fn the_environment_counts_before_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "that of the file\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let read = |text, file| secret(text, file).unwrap().map(|secret| secret.expose().to_owned());
        assert_eq!(read(Some("that of the environment"), Some(&path)).unwrap(), "that of the environment");
        for unset in [None, Some("")] {
            assert_eq!(read(unset, Some(&path)).unwrap(), "that of the file");
            assert_eq!(read(unset, None), None);
        }
        assert!(matches!(secret(Some("short"), Some(&path)), Err(CommError::SecretUnfit { bytes: 5 })));
        let missing = folder.path().join("none");
        assert!(matches!(secret(None, Some(&missing)), Err(CommError::SecretFile { .. })));
    }
}
