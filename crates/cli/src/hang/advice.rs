use crate::process_state::{AbnormalExit, ProcessState, ProcessStates};
use trireme_base::format_ranks;
use trireme_comm::{Diagnosis, Difference, Finding, OperationState, Source};

/// Returns what to try, according to the first cause that is found.
pub(super) fn advice(diagnosis: &Diagnosis, process_states: &ProcessStates) -> Option<String> {
    let difference = diagnosis.disagreement.as_ref().map(|found| found.difference);
    let found = [
        of_processes(diagnosis, process_states),
        difference.and_then(of_difference).map(str::to_owned),
        of_crossed_groups(&diagnosis.findings),
        of_missing_ranks(diagnosis),
        difference.filter(|difference| *difference == Difference::Line).map(|_| {
            "the ranks are at different lines of their programs: compare their configs and their program.txt"
                .to_owned()
        }),
        of_slow_transfers(diagnosis),
    ];
    found.into_iter().flatten().next()
}

fn of_processes(diagnosis: &Diagnosis, process_states: &ProcessStates) -> Option<String> {
    process_states.iter().find_map(|(&rank, fate)| match fate {
        ProcessState::Suspended => {
            let process = diagnosis.findings.get(rank)?.process_id;
            let process = process.map_or_else(String::new, |id| format!(", process {id}"));
            Some(format!(
                "find out what stopped rank {rank}{process}: SIGSTOP, a debugger, or a batch system that suspends jobs"
            ))
        }
        ProcessState::Exited(AbnormalExit::Signal(9)) => Some(format!(
            "check whether rank {rank} was killed because memory ran out (dmesg | grep -i oom); if so, lower \
             [training] local_batch_size"
        )),
        ProcessState::Exited(AbnormalExit::Signal(_)) => Some(format!("look at the log of rank {rank}")),
        ProcessState::Exited(AbnormalExit::Exit(_)) => None,
    })
}

fn of_difference(difference: Difference) -> Option<&'static str> {
    Some(match difference {
        Difference::Order | Difference::Operation => {
            "all ranks must issue the same operations in the same order: compare their configs, their \
             program.txt and their trireme versions"
        }
        Difference::Dtype => "compare [training] dtype and reduce_dtype of these ranks",
        Difference::Size => "compare the models and [training] of these ranks, and their trireme versions",
        Difference::Line => return None,
    })
}

/// Finds two ranks that wait for each other in different groups.
fn of_crossed_groups(findings: &[Finding]) -> Option<String> {
    let group = |finding: &Finding| Some(finding.place.as_ref()?.group.clone());
    findings.iter().find_map(|one| {
        let other = one.waits_for.iter().filter_map(|&rank| findings.get(rank)).find(|other| {
            other.waits_for.contains(&one.rank) && group(one).is_some() && group(one) != group(other)
        })?;
        Some(format!(
            "ranks {} and {} wait for each other in different groups: issue the operations of several groups in the \
             same order on all ranks",
            one.rank, other.rank
        ))
    })
}

fn of_missing_ranks(diagnosis: &Diagnosis) -> Option<String> {
    let waits = diagnosis.findings.iter().flat_map(|finding| &finding.waits_for);
    let missing = waits.copied().min_by_key(|&rank| (is_waiting(diagnosis, rank), rank))?;
    let finding = diagnosis.findings.get(missing)?;
    let process = match (&finding.host, finding.process_id) {
        (Some(host), Some(id)) => format!(" (process {id} on {host})"),
        _ => String::new(),
    };
    Some(match finding.source {
        Source::Nothing | Source::Earlier => format!(
            "look for the process of rank {missing}{process}: it is dead, stopped or unreachable; its log may say why"
        ),
        Source::Own | Source::Told => format!(
            "find out what keeps rank {missing}{process} from making progress, such as a disk that hangs; if this is expected, raise \
             [comm] timeout_seconds (bench: --timeout)"
        ),
    })
}

/// Returns whether the rank waits for other ranks. The advice prefers a rank that waits for none, because it is more likely to be the
/// cause.
fn is_waiting(diagnosis: &Diagnosis, rank: usize) -> bool {
    diagnosis.findings.get(rank).is_some_and(|finding| !finding.waits_for.is_empty())
}

fn of_slow_transfers(diagnosis: &Diagnosis) -> Option<String> {
    let is_in_operation = |finding: &&Finding| {
        let operation = finding.place.as_ref().and_then(|place| place.operation.as_ref());
        operation.is_some_and(|found| matches!(found.state, OperationState::Running | OperationState::Failed))
    };
    let slow: Vec<usize> =
        diagnosis.findings.iter().filter(is_in_operation).map(|finding| finding.rank).collect();
    if slow.is_empty() {
        return None;
    }
    Some(format!(
        "look at the logs of {}: they have exchanged no data for the whole timeout; if such pauses are normal on this network, raise [comm] timeout_seconds (bench: --timeout)",
        format_ranks(slow)
    ))
}
