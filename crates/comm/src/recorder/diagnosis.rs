use super::program_line::{differ, step_and_pipeline_rank};
use super::report::{
    GroupReport, IssuedOperation, Occasion, OperationReport, OperationState, Place, RankReport,
};
use crate::Operation;
use serde::Serialize;
use std::collections::BTreeMap;

/// The combined findings of the reports of one world.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// One finding per rank of the world, in rank order.
    pub findings: Vec<Finding>,
    /// The first position in a group's sequence at which ranks issued different operations, if there is one.
    pub disagreement: Option<Disagreement>,
}

/// The known state of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The rank.
    pub rank: usize,
    /// How the rank's place is known.
    pub source: Source,
    /// The rank's place, if it is known.
    pub place: Option<Place>,
    /// Ranks that have not begun the rank's current operation, and ranks that it has lost.
    pub waits_for: Vec<usize>,
    /// The text of the error that ended the rank's group.
    pub failure: Option<String>,
    /// The rank's host, if the rank's own or another report names it.
    pub host: Option<String>,
    /// The rank's process on that host.
    pub process_id: Option<u32>,
}

/// How a rank's place is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The rank's own report.
    Own,
    /// The rank's own report from before the failure. The rank has not reported since.
    Earlier,
    /// A notice that the rank sent to another rank.
    Told,
    /// No source: the place is unknown.
    Nothing,
}

/// A position in a group's sequence at which ranks issued different operations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Disagreement {
    /// Name of the group.
    pub group: String,
    /// The position in the group's sequence, from 0.
    pub sequence: u64,
    /// The property that differs.
    pub difference: Difference,
    /// The different operations with their ranks. The operation of most ranks comes first.
    pub sides: Vec<OperationVariant>,
}

trireme_base::named! {
    /// The property in which operations that should be equal differ.
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Difference {
        /// The order: the ranks issue the same operations in different orders.
        Order = "order",
        /// The operation, its reduction or root, or the program line that issued it.
        Operation = "operation",
        /// The element type.
        Dtype = "dtype",
        /// The number of elements.
        Size = "size",
        /// Only the program line. Ranks at different places of a pipeline have different programs; for them, steps are compared.
        Line = "program line",
    }
}

/// An operation that some ranks issued.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperationVariant {
    /// The operation.
    pub operation: Operation,
    /// The program line that issued the operation. Empty if unknown.
    pub line: String,
    /// The ranks that issued the operation.
    pub ranks: Vec<usize>,
}

/// The name and the members of a group.
type GroupKey<'a> = (&'a str, &'a [usize]);

/// The operations issued in one group, by sequence and rank.
type Sequences<'a> = BTreeMap<u64, BTreeMap<usize, IssuedAt<'a>>>;

/// An operation and the program line that issued it, which is empty if unknown.
type IssuedAt<'a> = (Operation, &'a str);

impl Diagnosis {
    /// Combines reports of one or several ranks of a world. A report also holds the places that other ranks reported to its rank.
    pub fn of(reports: &[RankReport]) -> Self {
        // Reports of another world size are left from an earlier world.
        let newest = reports.iter().max_by(|one, other| one.written.total_cmp(&other.written));
        let world_size = newest.map_or(0, |report| report.world_size);
        let reports: Vec<&RankReport> =
            reports.iter().filter(|report| report.world_size == world_size).collect();
        let reports = &reports[..];
        let groups = group_sequences(reports);
        let has_failed = reports.iter().any(|report| report.occasion == Occasion::Failed);
        let findings = (0..world_size).map(|rank| finding_of_rank(rank, reports, has_failed)).collect();
        let disagreement = first_disagreement(&groups, true).or_else(|| first_disagreement(&groups, false));
        Diagnosis { findings, disagreement }
    }
}

fn finding_of_rank(rank: usize, reports: &[&RankReport], has_failed: bool) -> Finding {
    let own = reports.iter().copied().find(|report| report.rank == rank);
    let is_outdated = |report: &RankReport| has_failed && report.occasion != Occasion::Failed;
    let told = reports.iter().flat_map(|report| &report.groups).flat_map(|group| &group.heard);
    let told = told.rev().find(|place| place.rank == rank);
    let (source, place) = match (own, told) {
        (Some(report), _) if !is_outdated(report) => (Source::Own, Some(report.place())),
        (_, Some(place)) => (Source::Told, Some(place.clone())),
        (Some(report), None) if report.occasion == Occasion::Stalled => {
            (Source::Earlier, Some(report.place()))
        }
        _ => (Source::Nothing, None),
    };
    let failure = own.and_then(first_failure).map(|failure| failure.text.clone());
    let waits_for = place.as_ref().map_or_else(Vec::new, |place| waits_for(place, own, reports));
    Finding {
        rank,
        source,
        place,
        waits_for,
        failure,
        host: own.map(|report| report.host.clone()).or_else(|| {
            let mut named = reports.iter().filter_map(|report| report.hosts.get(rank));
            named.next().cloned()
        }),
        process_id: own.map(|report| report.process_id),
    }
}

fn first_failure(report: &RankReport) -> Option<&super::FailureReport> {
    let failures = report.groups.iter().filter_map(|group| group.failure.as_ref());
    failures.min_by(|one, other| one.at.total_cmp(&other.at))
}

/// Returns the ranks that the rank at `place` waits for. If its operation has failed, these are the ranks that the failure names, or none,
/// for example if the rank's own device failed. Otherwise they are the peer of its message, or the ranks whose reports show that they have
/// not issued its operation.
fn waits_for(place: &Place, own: Option<&RankReport>, reports: &[&RankReport]) -> Vec<usize> {
    let Some(operation) = place.operation.as_ref().filter(|operation| is_waiting(operation)) else {
        return Vec::new();
    };
    let is_of_place = |group: &&GroupReport| place.is_in(&group.name) && group.members.contains(&place.rank);
    let group = |report: &RankReport| report.groups.iter().find(is_of_place).cloned();
    let failure = own.and_then(group).and_then(|group| group.failure);
    if let Some(failure) = failure
        && (operation.state == OperationState::Failed || !failure.missing.is_empty())
    {
        return failure.missing;
    }
    if let Some(peer) = operation.peer {
        return Vec::from([peer.rank]);
    }
    let is_behind = |group: &GroupReport| {
        group.members.contains(&place.rank)
            && place.is_in(&group.name)
            && group.num_issued <= operation.sequence
    };
    let behind = reports.iter().filter(|report| report.groups.iter().any(is_behind));
    behind.map(|report| report.rank).collect()
}

fn is_waiting(operation: &OperationReport) -> bool {
    matches!(operation.state, OperationState::Running | OperationState::Failed)
}

fn group_sequences<'a>(reports: &[&'a RankReport]) -> BTreeMap<GroupKey<'a>, Sequences<'a>> {
    let mut groups: BTreeMap<GroupKey<'a>, Sequences<'a>> = BTreeMap::new();
    for report in reports {
        for group in &report.groups {
            let sequences = groups.entry((&group.name, &group.members)).or_default();
            let mut note = |rank, sequence: u64, issued: (Operation, _)| {
                let ranks = sequences.entry(sequence).or_default();
                match ranks.get(&rank) {
                    Some((_, "")) | None => drop(ranks.insert(rank, issued)),
                    Some(_) => {}
                }
            };
            for operation in &group.operations {
                note(report.rank, operation.sequence, (operation.operation, &*operation.line));
            }
            for place in group.heard.iter().filter(|place| place.is_in(&group.name)) {
                if let Some(operation) = place.operation.as_ref().filter(|operation| operation.peer.is_none())
                {
                    note(place.rank, operation.sequence, (operation.operation, &*operation.line));
                }
            }
            let mismatch = group.failure.iter().flat_map(|failure| &failure.mismatch);
            for IssuedOperation { rank, sequence, operation } in mismatch {
                note(*rank, *sequence, (*operation, ""));
            }
        }
    }
    groups
}

/// Returns the first position at which operations differ, or, if `compares_operations` is false, at which the program lines of equal
/// operations differ.
fn first_disagreement(
    groups: &BTreeMap<GroupKey<'_>, Sequences<'_>>,
    compares_operations: bool,
) -> Option<Disagreement> {
    groups.iter().find_map(|((name, _), sequences)| {
        let (sequence, ranks) = sequences.iter().find_map(|(sequence, ranks)| {
            let ranks = if compares_operations {
                ranks_with_unlike_operations(ranks)
            } else {
                ranks_with_unlike_lines(ranks)
            };
            Some((sequence, ranks?))
        })?;
        let sides = sides(&ranks, compares_operations);
        let difference = difference(&sides, *sequence, sequences);
        Some(Disagreement { group: (*name).to_owned(), sequence: *sequence, difference, sides })
    })
}

/// Returns all ranks if they issued different operations.
fn ranks_with_unlike_operations<'a>(
    ranks: &BTreeMap<usize, IssuedAt<'a>>,
) -> Option<BTreeMap<usize, IssuedAt<'a>>> {
    let (first, _) = ranks.values().next()?;
    ranks.values().any(|(operation, _)| operation != first).then(|| ranks.clone())
}

/// Returns the ranks to compare if program lines that should be equal differ: all ranks if the lines belong to different programs, or else
/// the ranks of the program whose lines differ.
fn ranks_with_unlike_lines<'a>(
    ranks: &BTreeMap<usize, IssuedAt<'a>>,
) -> Option<BTreeMap<usize, IssuedAt<'a>>> {
    // One line of each program so far.
    let mut lines: Vec<&str> = Vec::new();
    let pipeline_rank = |line| step_and_pipeline_rank(line).map(|(_, rank)| rank);
    for (_, line) in ranks.values().filter(|(_, line)| !line.is_empty()) {
        let program = pipeline_rank(line);
        if let Some(other) = lines.iter().find(|other| differ(line, other)) {
            let is_same_program = program == pipeline_rank(other);
            let mut compared = ranks.clone();
            compared.retain(|_, (_, line)| !is_same_program || pipeline_rank(line) == program);
            return Some(compared);
        }
        if !lines.iter().any(|other| pipeline_rank(other) == program) {
            lines.push(line);
        }
    }
    None
}

fn sides(ranks: &BTreeMap<usize, IssuedAt<'_>>, compares_operations: bool) -> Vec<OperationVariant> {
    let mut sides: Vec<OperationVariant> = Vec::new();
    for (rank, (operation, line)) in ranks {
        let same = |side: &&mut OperationVariant| {
            if compares_operations { side.operation == *operation } else { side.line == *line }
        };
        match sides.iter_mut().find(same) {
            None => sides.push(OperationVariant {
                operation: *operation,
                line: (*line).to_owned(),
                ranks: Vec::from([*rank]),
            }),
            Some(side) => {
                side.ranks.push(*rank);
                if side.line.is_empty() {
                    side.line = (*line).to_owned();
                }
            }
        }
    }
    sides.sort_by_key(|side| std::cmp::Reverse(side.ranks.len()));
    sides
}

fn difference(sides: &[OperationVariant], sequence: u64, sequences: &Sequences<'_>) -> Difference {
    let [one, other] = [&sides[0], &sides[1]];
    // Whether a rank of `side` issues `operation` later in the sequence.
    let comes_later = |side: &OperationVariant, operation: Operation| {
        let later = sequences
            .range(sequence + 1..)
            .flat_map(|(_, ranks)| side.ranks.iter().filter_map(|rank| ranks.get(rank)));
        later.into_iter().any(|(issued, _)| *issued == operation)
    };
    let (first, second) = (one.operation, other.operation);
    if first == second {
        return Difference::Line;
    }
    let lines_differ = differ(&one.line, &other.line);
    if comes_later(one, second) && comes_later(other, first) {
        return Difference::Order;
    }
    let are_alike = !lines_differ
        && first.name() == second.name()
        && first.reduction() == second.reduction()
        && first.root() == second.root();
    match (are_alike, first.elements(), second.elements()) {
        (false, ..) => Difference::Operation,
        (true, (dtype, _), (other_dtype, _)) if dtype != other_dtype => Difference::Dtype,
        _ => Difference::Size,
    }
}
