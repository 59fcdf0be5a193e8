use crate::action::{Action, MessageKind};
use crate::exchanges::UnitExchanges;
use crate::layout::StateLayout;
use crate::parse::{ParseError, lines};
use crate::pipeline::WeightVersions;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use trireme_base::AxisExchange;

/// A pipeline stage: consecutive units on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// The units.
    pub units: Range<usize>,
    /// The rank within the pipeline.
    pub rank: usize,
}

/// Settings of a pipeline that does not drain between updates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asynchronous {
    /// Number of steps of the program. In each step, every unit processes equally many microbatches and is updated once.
    pub num_steps: usize,
    /// The version of a unit's parameters that its passes read.
    pub weights: WeightVersions,
}

/// The properties of a model on which programs depend: the number of its consecutive units, and the units with special properties.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitChain {
    /// Number of units of the model.
    pub num_units: usize,
    /// Pairs of a reader and an owner: the reader reads the owner's parameters and adds to the owner's gradient.
    pub ties: Vec<(usize, usize)>,
    /// Whether a reader on another rank accumulates its contribution to the owner's gradient over a step and sends it once. Otherwise it
    /// sends a contribution for each microbatch, and gradients are summed in the same order as without a pipeline.
    pub accumulates_tied_gradients: bool,
    /// Units of which neither the full backward nor the input half reads parameters, such as an embedding. A separate weight half may still
    /// read them ([`weight_half_readers`](UnitChain::weight_half_readers)).
    pub without_backward_reads: Vec<usize>,
    /// Units whose weight half of backward reads parameters, such as an output layer that recomputes its logits.
    pub weight_half_readers: Vec<usize>,
    /// Units that keep no activations for a later backward, because they read only the batch, or because their backward follows
    /// immediately.
    pub without_activations: Vec<usize>,
    /// Exchanges within units that are split among several ranks. In the order of units; each unit at most once.
    pub exchanges: Vec<UnitExchanges>,
}

impl UnitChain {
    /// Creates a chain of units without special properties.
    pub fn of_units(num_units: usize) -> Self {
        UnitChain { num_units, ..UnitChain::default() }
    }

    /// Returns whether forward of a unit keeps activations that a later backward reads. Such activations may be recomputed or moved.
    pub fn keeps(&self, unit: usize) -> bool {
        !self.without_activations.contains(&unit)
    }

    /// Returns whether all units in the other fields are in the chain, and the exchanges are in the order of units.
    pub fn is_consistent(&self) -> bool {
        let tied = self.ties.iter().flat_map(|&(reader, owner)| [reader, owner]);
        let special = [&self.without_backward_reads, &self.weight_half_readers, &self.without_activations]
            .into_iter()
            .flatten()
            .copied();
        let ends = self.exchanges.iter().flat_map(|exchanges| [exchanges.units.start, exchanges.units.end]);
        let ends: Vec<usize> = ends.collect();
        let are_in_order = ends.is_sorted() && ends.last().is_none_or(|&end| end <= self.num_units);
        are_in_order && tied.chain(special).all(|unit| unit < self.num_units)
    }
}

#[cfg(test)]
impl UnitChain {
    /// Creates an embedding, blocks and an output layer, which may be tied.
    pub(crate) fn language_model(num_units: usize, is_tied: bool) -> Self {
        let last = num_units - 1;
        let ends = if last > 0 { vec![0, last] } else { vec![0] };
        let ties = if is_tied && last > 0 { vec![(last, 0)] } else { Vec::new() };
        let (unread, reread) = (vec![0], vec![last]);
        UnitChain {
            num_units,
            ties,
            without_backward_reads: unread,
            weight_half_readers: reread,
            without_activations: ends,
            ..UnitChain::default()
        }
    }
}

/// The header of a program: its model, sizes, layout and stages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProgramHeader {
    /// The model.
    pub chain: UnitChain,
    /// Number of microbatches of this rank, in all steps of the program together.
    pub num_microbatches: usize,
    /// The layout of state on the ranks.
    pub state: StateLayout,
    /// All stages of a pipeline, in model order. Empty if every rank runs all units.
    pub stages: Vec<Stage>,
    /// This rank within the pipeline.
    pub rank: usize,
    /// The settings of a pipeline that does not drain between updates. `None` if the pipeline drains, or there is no pipeline.
    pub asynchronous: Option<Asynchronous>,
}

impl ProgramHeader {
    /// Returns the number of steps of the program.
    pub fn num_steps(&self) -> usize {
        self.asynchronous.map_or(1, |asynchronous| asynchronous.num_steps)
    }

    /// Returns the number of microbatches of this rank per step.
    pub fn microbatches_per_step(&self) -> usize {
        self.num_microbatches / self.num_steps()
    }

    /// Returns the version of a unit's parameters that forward reads for a microbatch, if the unit has been updated `newest` times so far.
    pub fn version_read(&self, microbatch: usize, newest: usize) -> usize {
        let weights = self.asynchronous.map_or(WeightVersions::Drained, |asynchronous| asynchronous.weights);
        weights.read_by_forward(self.microbatches_per_step(), microbatch, newest)
    }

    /// Returns the pipeline rank of a unit.
    pub fn rank_of(&self, unit: usize) -> usize {
        self.stages.iter().find(|stage| stage.units.contains(&unit)).map_or(self.rank, |stage| stage.rank)
    }

    /// Returns whether a unit is on this rank.
    pub fn holds(&self, unit: usize) -> bool {
        self.rank_of(unit) == self.rank
    }

    /// Returns the units on this rank, in order.
    pub fn held(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.chain.num_units).filter(|&unit| self.holds(unit))
    }

    /// Returns the exchanges of an action within its unit, in order. A recomputation is assumed to repeat the exchanges of forward.
    pub fn exchanges(&self, action: Action) -> &[AxisExchange] {
        let unit = action.unit();
        let Some(found) = self.chain.exchanges.iter().find(|exchanges| exchanges.units.contains(&unit))
        else {
            return &[];
        };
        match action {
            Action::Forward { .. } | Action::Recompute { .. } => &found.passes.forward,
            Action::Backward { .. } => &found.passes.backward,
            Action::BackwardInput { .. } => &found.passes.input_half,
            Action::BackwardWeight { .. } => &found.passes.weight_half,
            _ => &[],
        }
    }

    /// Returns the units whose parameters an action reads.
    pub fn reads(&self, action: Action) -> impl Iterator<Item = usize> + '_ {
        let reader = match action {
            Action::Forward { unit, .. } | Action::Recompute { unit, .. } => Some(unit),
            Action::Backward { unit, .. } | Action::BackwardInput { unit, .. } => {
                Some(unit).filter(|unit| !self.chain.without_backward_reads.contains(unit))
            }
            Action::BackwardWeight { unit, .. } => {
                Some(unit).filter(|unit| self.chain.weight_half_readers.contains(unit))
            }
            _ => None,
        };
        let tied =
            self.chain.ties.iter().filter(move |(unit, _)| Some(*unit) == reader).map(|&(_, owner)| owner);
        reader.into_iter().chain(tied)
    }

    /// Returns the units whose gradients backward of `unit` adds to directly: `unit`, and without a pipeline also the owner of the
    /// parameters that it reads. In a pipeline, the contribution to the owner's gradient waits for the owner's backward of the same
    /// microbatch.
    pub fn writes(&self, unit: usize) -> impl Iterator<Item = usize> + '_ {
        let ties =
            self.chain.ties.iter().filter(move |(reader, _)| *reader == unit && self.stages.is_empty());
        std::iter::once(unit).chain(ties.map(|&(_, owner)| owner))
    }

    /// Returns whether a reader on another rank sends its contribution to the owner's gradient after this microbatch.
    pub fn sends_tied_gradient(&self, microbatch: usize) -> bool {
        !self.chain.accumulates_tied_gradients || self.is_last_of_step(microbatch)
    }

    /// Returns whether a unit's gradient of a step is complete after this microbatch.
    pub fn is_last_of_step(&self, microbatch: usize) -> bool {
        (microbatch + 1).is_multiple_of(self.microbatches_per_step())
    }

    /// Returns the unit that reads the parameters of `unit`, if there is one.
    pub fn reader_of(&self, unit: usize) -> Option<usize> {
        self.chain.ties.iter().find(|(_, owner)| *owner == unit).map(|&(reader, _)| reader)
    }

    /// Returns the pipeline rank that a message goes to or comes from. `None` if the action is no message.
    pub fn peer(&self, action: Action) -> Option<usize> {
        let (message, is_sent) = match action {
            Action::Send(message) => (message, true),
            Action::Receive(message) => (message, false),
            _ => return None,
        };
        let reader = || self.reader_of(message.unit);
        let unit = match (message.kind, is_sent) {
            (MessageKind::Activation, true) => Some(message.unit + 1),
            (MessageKind::Gradient, true) => message.unit.checked_sub(1),
            (MessageKind::TiedGradient, false) | (MessageKind::Parameters, true) => reader(),
            _ => Some(message.unit),
        };
        unit.map(|unit| self.rank_of(unit))
    }
}

/// The actions of one rank in one step, in order. Without drains between updates, a program has several steps.
///
/// The text form has a header line with the sizes, and then one action per line; `#` begins a comment:
/// ```text
/// units 3 microbatches 1
/// F 0 0
/// ```
/// The header continues with `optimizer shard`, `activations whole@disk` or `gradients none` for each class of state that is sharded, off
/// the device, or absent ([`StateLayout`]). `ties 2:0` says that unit 2 reads the parameters of unit 0, and `tied_gradient step` that such
/// a unit sends its contribution to the gradient once per step. `unread 0`, `reread 2` and `unkept 2` name units whose backward reads no
/// parameters, whose weight half reads parameters, and which keep no activations ([`UnitChain`]). `exchanges 1-4:F=tensor.all_reduce/4096`
/// lists the exchanges of passes within units ([`UnitExchanges`]). In a pipeline, the header has `rank 0`, and `stage 0-2@1` for each
/// stage: units 0 and 1 are on rank 1. `steps 3 weights stashed` says that the pipeline does not drain between three steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The header.
    pub header: ProgramHeader,
    /// The actions, in order of issue.
    pub actions: Vec<Action>,
}

impl fmt::Display for ProgramHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnitChain {
            num_units,
            ties,
            accumulates_tied_gradients: sums_ties,
            without_backward_reads: unread,
            weight_half_readers: reread,
            without_activations: unkept,
            exchanges,
        } = &self.chain;
        write!(f, "units {num_units} microbatches {}", self.num_microbatches)?;
        write!(f, "{}", self.state)?;
        ties.iter().try_for_each(|(reader, owner)| write!(f, " ties {reader}:{owner}"))?;
        if *sums_ties {
            write!(f, " tied_gradient step")?;
        }
        for (name, units) in [("unread", unread), ("reread", reread), ("unkept", unkept)] {
            units.iter().try_for_each(|unit| write!(f, " {name} {unit}"))?;
        }
        exchanges.iter().try_for_each(|exchanges| write!(f, " exchanges {exchanges}"))?;
        if !self.stages.is_empty() {
            write!(f, " rank {}", self.rank)?;
        }
        let stage = |Stage { units, rank }: &Stage| write!(f, " stage {}-{}@{rank}", units.start, units.end);
        self.stages.iter().try_for_each(stage)?;
        let Some(Asynchronous { num_steps, weights }) = self.asynchronous else { return Ok(()) };
        write!(f, " steps {num_steps} weights {}", weights.name())
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.header)?;
        self.actions.iter().try_for_each(|action| writeln!(f, "{action}"))
    }
}

impl FromStr for ProgramHeader {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_header(text).ok_or_else(|| {
            ParseError(format!(
                "'{text}' should read 'units N microbatches M', optionally followed by 'CLASS SHARE[@TIER]' (optimizer, \
                 parameters, gradients, activations; whole, shard, none; host, disk), 'gather_ahead N', 'gathered kept', \
                 'fetch_ahead N', 'moved_units N', 'updates early', 'ties U:V', 'tied_gradient step', 'unread U', 'reread U', 'unkept U', \
                 'exchanges U-V:PASS=AXIS.KIND/BYTES' (F, B, I, W; tensor, ring, heads, expert; all_reduce, all_gather, reduce_scatter, all_to_all, shift), 'rank R', 'stage U-V@R' and 'steps N weights W'"
            ))
        })
    }
}

fn parse_header(text: &str) -> Option<ProgramHeader> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let ["units", units, "microbatches", microbatches, rest @ ..] = &words[..] else { return None };
    let mut header = ProgramHeader {
        chain: UnitChain::of_units(units.parse().ok()?),
        num_microbatches: microbatches.parse().ok()?,
        ..ProgramHeader::default()
    };
    let (pairs, odd) = rest.as_chunks::<2>();
    for pair in pairs {
        match pair {
            ["ties", tie] => {
                let (reader, owner) = tie.split_once(':')?;
                header.chain.ties.push((reader.parse().ok()?, owner.parse().ok()?));
            }
            ["tied_gradient", "step"] => header.chain.accumulates_tied_gradients = true,
            ["unread", unit] => header.chain.without_backward_reads.push(unit.parse().ok()?),
            ["reread", unit] => header.chain.weight_half_readers.push(unit.parse().ok()?),
            ["unkept", unit] => header.chain.without_activations.push(unit.parse().ok()?),
            ["exchanges", text] => header.chain.exchanges.push(UnitExchanges::parse(text)?),
            ["rank", rank] => header.rank = rank.parse().ok()?,
            ["stage", stage] => {
                let (units, rank) = stage.split_once('@')?;
                let (start, end) = units.split_once('-')?;
                let units = start.parse().ok()?..end.parse().ok()?;
                header.stages.push(Stage { units, rank: rank.parse().ok()? });
            }
            ["steps", steps] => {
                let num_steps = steps.parse().ok().filter(|&steps| steps > 0)?;
                header.asynchronous = Some(Asynchronous { num_steps, weights: WeightVersions::Stashed });
            }
            ["weights", name] => {
                header.asynchronous.as_mut()?.weights = WeightVersions::named(name)?;
            }
            [key, value] => header.state.parse_pair(key, value)?,
        }
    }
    let is_whole = header.num_microbatches.is_multiple_of(header.num_steps());
    let is_possible = header.state.is_possible(header.num_microbatches);
    (odd.is_empty() && is_whole && is_possible).then_some(header)
}

impl FromStr for Program {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut lines = lines(text);
        let (line, header) = lines.next().unwrap_or((1, ""));
        let header = header.parse().map_err(|error: ParseError| error.at_line(line))?;
        let action =
            |(line, text): (usize, &str)| text.parse().map_err(|error: ParseError| error.at_line(line));
        Ok(Program { header, actions: lines.map(action).collect::<Result<_, _>>()? })
    }
}
