//! Programs of units, generated from the passes of stages.

use super::clock::simulate;
use super::costs::Costs;
use super::messages::{self, Event};
use super::pass::{Pass, PassKind};
use super::schedule::{Schedule, WeightVersions};
use crate::action::{Action, Keep, Message};
use crate::program::{Asynchronous, Program, ProgramHeader, Stage, UnitChain};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Returns the program of each rank. `units[s]` are the units of the `chain` in stage `s`. Messages are in the order of their simulated
/// times at `costs`, so all ranks must pass equal costs.
///
/// A tied unit may be on another rank than the owner of the parameters that it reads. The owner's gradient is then completed for a
/// microbatch when the tied unit's contribution has arrived. If contributions are sent [once](UnitChain::accumulates_tied_gradients) per
/// step, only the last microbatch of a step waits. Only the first tie is supported. A unit's gradient is reduced when the last microbatch
/// of a step has added to it. In a schedule that does not drain between updates, the current version of the weights is stashed before an
/// update if later passes read it. [`lowering`](crate::lowering) adds everything else that a layout requires.
///
/// # Panics
/// If the schedule is not [valid](super::validate), the stages are not consecutive or do not cover the chain, or there are ties where
/// weights are updated without a drain.
pub fn programs(
    schedule: &Schedule,
    costs: &Costs,
    units: &[Range<usize>],
    chain: &UnitChain,
) -> Vec<Program> {
    let is_drained = schedule.weights == WeightVersions::Drained;
    assert!(is_drained || chain.ties.is_empty(), "versions of tied weights would differ");
    assert_eq!(units.len(), schedule.num_stages(), "each stage has units");
    assert_eq!(units[units.len() - 1].end, chain.num_units, "each unit has a stage");
    let follows = |pair: &[Range<usize>]| pair[0].end == pair[1].start;
    assert!(units[0].start == 0 && units.windows(2).all(follows), "stages follow each other: {units:?}");
    let stage = |(units, &rank): (&Range<usize>, &usize)| Stage { units: units.clone(), rank };
    let stages: Vec<Stage> = units.iter().zip(&schedule.stage_ranks).map(stage).collect();
    let versions_read = schedule.versions_read();
    let program = |(rank, events): (usize, Vec<Event>)| {
        let header = ProgramHeader {
            chain: chain.clone(),
            num_microbatches: schedule.total_microbatches(),
            stages: stages.clone(),
            rank,
            asynchronous: (!is_drained)
                .then_some(Asynchronous { num_steps: schedule.num_steps, weights: schedule.weights }),
            ..ProgramHeader::default()
        };
        let mut actions = ActionTranslator {
            units,
            header: &header,
            actions: Vec::new(),
            num_tied_gradients: 0,
            held_back: VecDeque::new(),
            versions: Versions::new(schedule, rank, &versions_read[rank]),
        };
        events.into_iter().for_each(|event| actions.push_event(event));
        let actions = actions.finish();
        Program { header, actions }
    };
    let timeline = simulate(schedule, costs).expect("the schedule is valid");
    let stage_of =
        |unit: usize| units.iter().position(|units| units.contains(&unit)).expect("units have stages");
    let tie = chain.ties.first().map(|&(reader, owner)| (stage_of(reader), stage_of(owner)));
    let is_sent = |microbatch: usize| {
        !chain.accumulates_tied_gradients || microbatch + 1 == schedule.total_microbatches()
    };
    messages::place_messages(schedule, &timeline, tie, is_sent).into_iter().enumerate().map(program).collect()
}

/// Translates the events of a rank into the actions of its units.
struct ActionTranslator<'a> {
    units: &'a [Range<usize>],
    header: &'a ProgramHeader,
    actions: Vec<Action>,
    /// Number of contributions to the gradient of the tie's owner that are available.
    num_tied_gradients: usize,
    /// Microbatches for which the weight half of the tie's owner waits for a contribution.
    held_back: VecDeque<usize>,
    versions: Versions<'a>,
}

/// The versions of weights that a rank's passes read.
struct Versions<'a> {
    read: &'a [usize],
    /// The last pass that reads a version, updates excluded, by stage and version.
    last_reader: BTreeMap<(usize, usize), usize>,
    /// Number of passes that were processed.
    num_passes: usize,
    /// Number of updates that were processed, by stage.
    num_updates: BTreeMap<usize, usize>,
}

/// Whether the weights that a pass reads are still needed after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WeightUse {
    /// A later pass reads them.
    ReadLater,
    /// No later pass reads them, but they are the newest version.
    Newest,
    /// No later pass reads them, and an update has replaced them.
    Old,
}

impl<'a> Versions<'a> {
    fn new(schedule: &Schedule, rank: usize, read: &'a [usize]) -> Self {
        let passes = schedule.ranks[rank].iter().zip(read).enumerate();
        let readers = passes.filter(|(_, (pass, _))| pass.kind != PassKind::Update);
        let last_reader = readers.map(|(place, (pass, &version))| ((pass.stage, version), place)).collect();
        Versions { read, last_reader, num_passes: 0, num_updates: BTreeMap::new() }
    }

    fn record_pass(&mut self, kind: PassKind, stage: usize) -> WeightUse {
        let (place, version) = (self.num_passes, self.read[self.num_passes]);
        self.num_passes += 1;
        let num_updates = self.num_updates.entry(stage).or_insert(0);
        let is_newest = version == *num_updates;
        *num_updates += usize::from(kind == PassKind::Update);
        match self.last_reader.get(&(stage, version)) {
            Some(&last) if last > place => WeightUse::ReadLater,
            _ if is_newest => WeightUse::Newest,
            _ => WeightUse::Old,
        }
    }
}

impl ActionTranslator<'_> {
    fn push_event(&mut self, event: Event) {
        match event {
            Event::Pass(Pass { kind, stage, microbatch }) => self.pass(kind, stage, microbatch),
            Event::Send(result_of) => self.actions.push(self.message(result_of, true)),
            Event::Receive(result_of) => {
                self.actions.push(self.message(result_of, false));
                if result_of.kind == PassKind::BackwardWeight {
                    self.add_tied_gradient();
                }
            }
        }
    }

    fn pass(&mut self, kind: PassKind, stage: usize, microbatch: usize) {
        let units = self.units[stage].clone();
        let weights = self.versions.record_pass(kind, stage);
        match kind {
            PassKind::Forward => {
                let forward = |unit| Action::Forward { unit, microbatch, keep: Keep::All };
                self.actions.extend(units.map(forward));
            }
            PassKind::BackwardInput => {
                let half = |unit| Action::BackwardInput { unit, microbatch };
                self.actions.extend(units.rev().map(half));
            }
            PassKind::Backward | PassKind::BackwardWeight => {
                for unit in units.rev() {
                    self.complete(kind, unit, microbatch);
                    let is_read_here = |&(reader, owner)| reader == unit && self.header.holds(owner);
                    if self.header.chain.ties.iter().any(is_read_here) {
                        self.add_tied_gradient();
                    }
                }
            }
            PassKind::Update => {
                for unit in units {
                    self.actions.extend((weights == WeightUse::ReadLater).then_some(Action::Stash { unit }));
                    self.actions.push(Action::Step { unit });
                }
            }
        }
        if weights == WeightUse::Old {
            self.actions.extend(self.units[stage].clone().map(|unit| Action::Unstash { unit }));
        }
    }

    /// Completes the gradient of a unit for a microbatch. While a tied unit's contribution is missing, runs only the input half and holds
    /// the weight half back.
    fn complete(&mut self, kind: PassKind, unit: usize, microbatch: usize) {
        if self.header.reader_of(unit).is_some_and(|reader| !self.has_tied_gradients(reader, microbatch)) {
            if kind == PassKind::Backward {
                self.actions.push(Action::BackwardInput { unit, microbatch });
            }
            self.held_back.push_back(microbatch);
            return;
        }
        self.actions.push(match kind {
            PassKind::Backward => Action::Backward { unit, microbatch },
            _ => Action::BackwardWeight { unit, microbatch },
        });
        self.actions.extend(self.header.is_last_of_step(microbatch).then_some(Action::ReduceGrad { unit }));
    }

    /// Returns whether the contributions of the tied unit that a microbatch needs are available.
    fn has_tied_gradients(&self, reader: usize, microbatch: usize) -> bool {
        let is_summed = self.header.chain.accumulates_tied_gradients && !self.header.holds(reader);
        let is_needed = !is_summed || self.header.is_last_of_step(microbatch);
        !is_needed || self.num_tied_gradients > if is_summed { 0 } else { microbatch }
    }

    fn add_tied_gradient(&mut self) {
        self.num_tied_gradients += 1;
        let (reader, owner) = self.header.chain.ties[0];
        let next = self.held_back.front().copied();
        if let Some(microbatch) = next.filter(|&microbatch| self.has_tied_gradients(reader, microbatch)) {
            self.held_back.pop_front();
            self.complete(PassKind::BackwardWeight, owner, microbatch);
        }
    }

    /// Returns the action that sends or receives the result of a pass. The message belongs to the unit of the stage that runs last in the
    /// pass, or to the tie's owner if it is a tied gradient.
    fn message(&self, result_of: Pass, is_sent: bool) -> Action {
        let Pass { kind, stage, microbatch } = result_of;
        let Range { start, end } = self.units[stage];
        let message = match kind {
            PassKind::Forward => Message::activation(end - 1, microbatch),
            PassKind::BackwardWeight => Message::tied_gradient(self.header.chain.ties[0].1, microbatch),
            _ => Message::gradient(start, microbatch),
        };
        if is_sent { Action::Send(message) } else { Action::Receive(message) }
    }

    /// Ends the program: adds the updates of the units, unless the passes include updates, and the messages with updated tied parameters.
    fn finish(mut self) -> Vec<Action> {
        let header = self.header;
        if header.asynchronous.is_none() {
            self.actions.extend(header.held().map(|unit| Action::Step { unit }));
        }
        for &(reader, unit) in &header.chain.ties {
            match (header.holds(reader), header.holds(unit)) {
                (true, false) => self.actions.push(Action::Receive(Message::parameters(unit))),
                (false, true) => self.actions.push(Action::Send(Message::parameters(unit))),
                _ => (),
            }
        }
        self.actions
    }
}
