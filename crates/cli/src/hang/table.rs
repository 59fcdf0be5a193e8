use super::advice::advice;
use crate::process_state::{AbnormalExit, ProcessState, ProcessStates, signal_name};
use trireme_base::{Bytes, format_ranks};
use trireme_comm::{
    Diagnosis, Difference, Direction, Disagreement, Finding, OperationReport, OperationState,
    OperationVariant, Place, Source,
};

const HEADER: [&str; 6] = ["rank", "host", "state", "since", "waits for", "operation"];

/// Returns the lines of the table, the first mismatch and the advice; empty if there are no findings.
pub(crate) fn lines(diagnosis: &Diagnosis, process_states: &ProcessStates) -> Vec<String> {
    if diagnosis.findings.is_empty() {
        return Vec::new();
    }
    let mut rows = vec![HEADER.map(str::to_owned)];
    rows.extend(diagnosis.findings.iter().map(|finding| row(finding, process_states.get(&finding.rank))));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [rank, host, state, since, waits, _] = [0, 1, 2, 3, 4, 5].map(width);
    let first = diagnosis.findings.iter().find_map(|finding| finding.host.as_ref());
    let is_elsewhere = |finding: &Finding| finding.host.is_some() && finding.host.as_ref() != first;
    let spans_hosts = diagnosis.findings.iter().any(is_elsewhere);
    let shown = |[a, b, c, d, e, f]: &[String; 6]| {
        let b = if spans_hosts { format!("{b:host$}  ") } else { String::new() };
        format!("{a:>rank$}  {b}{c:state$}  {d:>since$}  {e:waits$}  {f}").trim_end().to_owned()
    };
    let mut lines: Vec<String> = rows.iter().map(shown).collect();
    lines.extend(diagnosis.disagreement.as_ref().map(first_mismatch));
    lines.extend(advice(diagnosis, process_states).map(|advice| format!("try: {advice}")));
    lines.iter().map(|line| escape_controls(line)).collect()
}

/// Escapes control characters, so that text from files and other hosts cannot steer the terminal.
pub(crate) fn escape_controls(line: &str) -> String {
    line.chars()
        .map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() })
        .collect()
}

fn row(finding: &Finding, fate: Option<&ProcessState>) -> [String; 6] {
    let since = match &finding.place {
        Some(place) if place.operation.is_some() => format!("{:.1} s", place.seconds),
        _ => String::new(),
    };
    let host = finding.host.clone().unwrap_or_default();
    [
        finding.rank.to_string(),
        host,
        state(finding, fate),
        since,
        if finding.waits_for.is_empty() {
            String::new()
        } else {
            format_ranks(finding.waits_for.iter().copied())
        },
        operation(finding),
    ]
}

fn state(finding: &Finding, fate: Option<&ProcessState>) -> String {
    let operation = finding.place.as_ref().and_then(|place| place.operation.as_ref());
    match (fate, finding.source, operation) {
        (Some(ProcessState::Suspended), ..) => "stopped".to_owned(),
        (Some(ProcessState::Exited(AbnormalExit::Signal(signal))), ..) => {
            format!("killed by {}", signal_name(*signal))
        }
        (Some(ProcessState::Exited(AbnormalExit::Exit(code))), Source::Nothing | Source::Earlier, _) => {
            format!("exited with {code}")
        }
        (_, Source::Nothing, _) => "silent".to_owned(),
        (.., None) => "in no operation".to_owned(),
        (.., Some(operation)) => match operation.state {
            OperationState::Queued => "queued",
            OperationState::Running => "waiting",
            OperationState::Done => "in no operation",
            OperationState::Failed => "failed",
        }
        .to_owned(),
    }
}

fn operation(finding: &Finding) -> String {
    match (&finding.place, finding.source) {
        (None, _) => "no report".to_owned(),
        (Some(Place { operation: None, .. }), _) => "none yet".to_owned(),
        (Some(place @ Place { operation: Some(operation), .. }), source) => {
            let after = if operation.state == OperationState::Done { "after " } else { "" };
            let earlier = if source == Source::Earlier { " (last report)" } else { "" };
            format!("{after}{}{earlier}", describe_operation(&place.group, operation))
        }
    }
}

/// Describes an operation with its place in its group and in the program.
pub(crate) fn describe_operation(group: &str, report: &OperationReport) -> String {
    let OperationReport { sequence, operation, line, .. } = report;
    let peer = report.peer.map(|peer| match peer.direction {
        Direction::Send => format!(" to rank {}", peer.rank),
        Direction::Receive => format!(" from rank {}", peer.rank),
    });
    let bytes = match operation.bytes() {
        0 => String::new(),
        bytes => format!(", {}", Bytes(bytes)),
    };
    format!("{operation}{}{bytes}, {group} {sequence}{}", peer.unwrap_or_default(), in_line(line))
}

fn in_line(line: &str) -> String {
    if line.is_empty() { String::new() } else { format!(", {line}") }
}

fn first_mismatch(disagreement: &Disagreement) -> String {
    let Disagreement { group, sequence, difference, sides } = disagreement;
    let side = |side: &OperationVariant| {
        format!(
            "{} issued {}{}",
            format_ranks(side.ranks.iter().copied()),
            side.operation,
            in_line(&side.line)
        )
    };
    let sides = sides.iter().map(side).collect::<Vec<_>>().join("; ");
    let first = match difference {
        Difference::Line => "first difference",
        _ => "first mismatch",
    };
    format!("{first}: {difference} of {group} {sequence}: {sides}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_a_column_where_there_are_several() {
        let finding = |rank, host: Option<&str>| Finding {
            rank,
            source: Source::Nothing,
            place: None,
            waits_for: Vec::new(),
            failure: None,
            host: host.map(str::to_owned),
            process_id: None,
        };
        let table = |hosts: [Option<&str>; 3]| {
            let findings = hosts.into_iter().enumerate().map(|(rank, host)| finding(rank, host)).collect();
            lines(&Diagnosis { findings, disagreement: None }, &ProcessStates::new())
        };
        let across = table([Some("node-7"), Some("node-7"), Some("n8")]);
        assert_eq!(across[0], "rank  host    state   since  waits for  operation");
        assert_eq!(across[3], "   2  n8      silent                    no report");
        for within in [[Some("a"), Some("a"), None], [None; 3]] {
            assert_eq!(table(within)[1], "   0  silent                    no report");
        }
    }
}
