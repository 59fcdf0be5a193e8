use super::advice::advice;
use super::{Fate, Fates};
use crate::launch::Death;
use trireme_base::Bytes;
use trireme_comm::{
    Diagnosis, Difference, Direction, Disagreement, Finding, OperationReport, OperationState, Place, Side,
    Source,
};

const HEADER: [&str; 5] = ["rank", "state", "since", "waits for", "operation"];

/// The table with all that follows from it, line by line; nothing if nothing is known.
pub(crate) fn lines(diagnosis: &Diagnosis, fates: &Fates) -> Vec<String> {
    if diagnosis.findings.is_empty() {
        return Vec::new();
    }
    let mut rows = vec![HEADER.map(str::to_owned)];
    rows.extend(diagnosis.findings.iter().map(|finding| row(finding, fates.get(&finding.rank))));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [rank, state, since, waits, _] = [0, 1, 2, 3, 4].map(width);
    let shown = |[a, b, c, d, e]: &[String; 5]| {
        format!("{a:>rank$}  {b:state$}  {c:>since$}  {d:waits$}  {e}").trim_end().to_owned()
    };
    let mut lines: Vec<String> = rows.iter().map(shown).collect();
    lines.extend(diagnosis.disagreement.as_ref().map(first_mismatch));
    lines.extend(advice(diagnosis, fates).map(|advice| format!("try: {advice}")));
    lines.iter().map(|line| plain(line)).collect()
}

/// What came from files and other hosts cannot steer the terminal.
pub(crate) fn plain(line: &str) -> String {
    line.chars()
        .map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() })
        .collect()
}

fn row(finding: &Finding, fate: Option<&Fate>) -> [String; 5] {
    let since = match &finding.place {
        Some(place) if place.operation.is_some() => format!("{:.1} s", place.seconds),
        _ => String::new(),
    };
    [finding.rank.to_string(), state(finding, fate), since, ranks(&finding.waits_for), operation(finding)]
}

fn state(finding: &Finding, fate: Option<&Fate>) -> String {
    let operation = finding.place.as_ref().and_then(|place| place.operation.as_ref());
    match (fate, finding.source, operation) {
        (Some(Fate::Stopped), ..) => "stopped".to_owned(),
        (Some(Fate::Dead(Death::Signal(signal))), ..) => {
            format!("killed by {}", crate::launch::signal_name(*signal))
        }
        (Some(Fate::Dead(Death::Exit(code))), Source::Nothing | Source::Earlier, _) => {
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
            format!("{after}{}{earlier}", described(&place.group, operation))
        }
    }
}

/// An operation with its place in its group and in the program.
pub(crate) fn described(group: &str, report: &OperationReport) -> String {
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

/// Ranks as a text; empty for none.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let list = || ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks {
        [] => String::new(),
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", list()),
    }
}

fn first_mismatch(disagreement: &Disagreement) -> String {
    let Disagreement { group, sequence, difference, sides } = disagreement;
    let side =
        |side: &Side| format!("{} issued {}{}", ranks(&side.ranks), side.operation, in_line(&side.line));
    let sides = sides.iter().map(side).collect::<Vec<_>>().join("; ");
    let first = match difference {
        Difference::Line => "first difference",
        _ => "first mismatch",
    };
    format!("{first}: {difference} of {group} {sequence}: {sides}")
}
