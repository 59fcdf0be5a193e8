//! Sums a unit's gradient, or the momentum computed from it, over the ranks in compressed messages.

use crate::error::Result;
use crate::memory::{CountedMemory, ExchangeVector, PendingVector, WaitTracker};
use crate::step::ExecutorOptions;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{HostMemory, RandomKey, ReduceOp};
use trireme_codec::{Bucket, CompressionError, CompressionStatistics, Compressor, Matrix, Round, StateCopy};
use trireme_comm::{Buffer, Group, PageSize, Untyped, Work};
use trireme_tensor::{Category, Device, ParameterInfo, ParameterTable};

/// The compressed reduction of one unit's gradient. It is reused in every step.
pub(crate) struct CompressedReduction {
    group: Arc<Group>,
    device: Device,
    /// `None` in a dry group, where nothing is compressed.
    pub(super) compressor: Option<Box<Compressor>>,
    /// The sequences of rounds that the steps of a run use, in order, with one entry for each change. Used only in a dry group, where each
    /// step removes the first entry.
    pub(super) remaining_round_sequences: VecDeque<Vec<Round>>,
    /// One exchange for each round, recreated when the rounds change.
    exchanges: Vec<RoundExchange>,
    /// Bytes of the state that the compressor keeps from step to step.
    state_bytes: usize,
    counted: CountedMemory,
    pending: Option<PendingReduction>,
    uncompressed: Option<Box<UncompressedElements>>,
    /// Whether the gradient of the current or last step is sent compressed.
    pub(super) is_compressed_step: bool,
    pub(super) statistics: CompressionStatistics,
    /// The compressor's state before its last step, if steps can be rolled back.
    before: Option<Vec<(&'static str, StateCopy)>>,
}

enum PendingReduction {
    Round { gradient: ExchangeVector, round: usize },
    Uncompressed(PendingVector),
}

impl CompressedReduction {
    /// Creates the compressed reduction of `unit`'s gradient over `group`. Returns `None` if every step would send the gradient
    /// uncompressed.
    pub(crate) fn new(
        table: &ParameterTable,
        unit: usize,
        options: &ExecutorOptions,
        device: &Device,
        group: &Arc<Group>,
    ) -> Result<Option<Self>> {
        let ExecutorOptions { compression, seed, .. } = options;
        let (bucket, world_size) = (bucket(table, unit)?, group.world_size());
        let Some(sizes) = compression.sizes(&bucket, world_size) else { return Ok(None) };
        let num_bytes = sizes.state_bytes + sizes.scratch_bytes;
        device.staging().charge_outside_arena(Category::Communication, num_bytes)?;
        let key = RandomKey::new(*seed, &format!("compression of {}", table.units()[unit].name));
        let compressor = || Compressor::new(compression, &bucket, group.rank(), world_size, key);
        let compressor = (!group.is_dry()).then(compressor).transpose()?;
        let mut compressed = CompressedReduction {
            group: Arc::clone(group),
            device: device.clone(),
            compressor: compressor.map(Box::new),
            state_bytes: sizes.state_bytes,
            remaining_round_sequences: sizes.rounds.into(),
            exchanges: Vec::new(),
            counted: CountedMemory::new(device),
            pending: None,
            uncompressed: UncompressedElements::new(table, unit).map(Box::new),
            is_compressed_step: false,
            statistics: CompressionStatistics::default(),
            before: None,
        };
        let first = match &compressed.compressor {
            Some(compressor) => compressor.rounds().to_vec(),
            None => compressed.remaining_round_sequences.front().cloned().unwrap_or_default(),
        };
        compressed.make_exchanges(&first)?;
        Ok(Some(compressed))
    }

    /// Allocates memory to save the compressor's state before each step, so that a step can be rolled back.
    pub(crate) fn enable_rollback(&mut self) -> Result<()> {
        self.device.staging().charge_outside_arena(Category::Communication, self.state_bytes)?;
        let states = self.compressor.iter().flat_map(|compressor| compressor.state());
        self.before = Some(states.map(|(name, values)| (name, values.into())).collect());
        Ok(())
    }

    /// Rolls the compressor back to its state before the last step. Does nothing after an uncompressed step, which does not change the
    /// state.
    pub(crate) fn roll_back(&mut self) -> Result<()> {
        if !self.is_compressed_step {
            return Ok(());
        }
        let before = self.before.as_ref().expect("what may be taken back is remembered");
        let before: Vec<_> = before.iter().map(|(name, kept)| (*name, kept.values())).collect();
        let compressor = self.compressor.as_mut().expect("no step of a dry group is taken back");
        Ok(compressor.load_state(&before)?)
    }

    /// Starts the first round of a compressed step with this rank's `gradient`.
    pub(crate) fn start(&mut self, mut gradient: ExchangeVector) -> Result<()> {
        self.is_compressed_step = true;
        let Some(compressor) = &self.compressor else {
            if let Some(rounds) = self.remaining_round_sequences.pop_front() {
                self.make_exchanges(&rounds)?;
            }
            self.pending = Some(PendingReduction::Uncompressed(self.reduce_uncompressed(gradient)));
            return Ok(());
        };
        let rounds = compressor.rounds();
        if !self.exchanges.iter().map(|exchange| exchange.round).eq(rounds.iter().copied()) {
            let rounds = rounds.to_vec();
            self.make_exchanges(&rounds)?;
        }
        let compressor = self.compressor.as_mut().expect("it was there");
        for ((_, kept), (_, values)) in self.before.iter_mut().flatten().zip(compressor.state()) {
            kept.bytes_mut().copy_from_slice(values.bytes());
        }
        // Codecs run on the host.
        let elements = gradient.download(&self.device)?;
        self.uncompressed.iter_mut().try_for_each(|exact| exact.start(elements, &self.group))?;
        self.exchanges[0].start(compressor, elements, &self.group);
        self.pending = Some(PendingReduction::Round { gradient, round: 0 });
        Ok(())
    }

    /// Starts a step that sums `gradient` uncompressed and does not change the compressor.
    pub(crate) fn start_uncompressed(&mut self, gradient: ExchangeVector) {
        self.is_compressed_step = false;
        self.statistics = CompressionStatistics::uncompressed(gradient.len(), self.group.world_size());
        self.pending = Some(PendingReduction::Uncompressed(self.reduce_uncompressed(gradient)));
    }

    fn reduce_uncompressed(&self, gradient: ExchangeVector) -> PendingVector {
        let len = gradient.len();
        let reduce = |gradient| self.group.all_reduce(gradient, ReduceOp::Sum);
        gradient.exchange(&self.device, 0..len, 0..len, reduce)
    }

    /// Waits for the message in flight, and starts the next round. After the last round, returns the sum over all ranks.
    pub(crate) fn advance(&mut self, waiting: &mut WaitTracker) -> Result<Option<ExchangeVector>> {
        let (mut gradient, round) = match self.pending.take() {
            None => return Ok(None),
            Some(PendingReduction::Uncompressed(whole)) => {
                return Ok(Some(whole.wait(&self.device, waiting)?));
            }
            Some(PendingReduction::Round { gradient, round }) => (gradient, round),
        };
        let compressor = self.compressor.as_mut().expect("a round was started");
        // The gradient stays on the host from the first round to the last.
        self.exchanges[round].finish(compressor, gradient.host_elements(), waiting)?;
        let Some(next) = self.exchanges.get_mut(round + 1) else {
            self.statistics = compressor.statistics();
            if let Some(exact) = &mut self.uncompressed {
                exact.finish(gradient.host_elements(), waiting)?;
                let uncompressed = CompressionStatistics::uncompressed(exact.len(), self.group.world_size());
                self.statistics.bytes_sent += uncompressed.bytes_sent;
            }
            gradient.upload::<f32>(&self.device);
            return Ok(Some(gradient));
        };
        next.start(compressor, gradient.host_elements(), &self.group);
        self.pending = Some(PendingReduction::Round { gradient, round: round + 1 });
        Ok(None)
    }

    /// Allocates memory for the messages of `rounds`, and frees the memory of earlier rounds.
    fn make_exchanges(&mut self, rounds: &[Round]) -> Result<()> {
        let group = &self.group;
        self.exchanges.clear();
        self.counted = CountedMemory::new(&self.device);
        let exact_bytes = self.uncompressed.as_ref().map_or(0, |exact| exact.len() * size_of::<f32>());
        self.counted.charge_buffer(group, exact_bytes)?;
        for &round in rounds {
            self.counted.charge_buffer(group, round.num_bytes() * round.num_messages(group.world_size()))?;
            self.exchanges.push(RoundExchange::new(round, group)?);
        }
        Ok(())
    }
}

/// Describes the flat gradient of a unit for a codec: its length, and its two-dimensional parameters as matrices.
fn bucket(table: &ParameterTable, unit: usize) -> Result<Bucket, CompressionError> {
    let unit = &table.units()[unit];
    let matrices = table.parameters()[unit.parameters.clone()].iter().filter_map(|parameter| {
        let &[rows, cols] = parameter.shape.dims() else { return None };
        Some(Matrix { offset: parameter.offset, rows, cols })
    });
    Bucket::with_matrices(unit.num_elements, matrices.collect())
}

/// Elements of a unit that no codec may round or mix with others: counts of expert loads, which are stored next to gradients.
struct UncompressedElements {
    elements: Vec<Range<usize>>,
    sum: Option<Work<Buffer<f32>>>,
}

impl UncompressedElements {
    fn new(table: &ParameterTable, unit: usize) -> Option<Self> {
        let parameters = &table.parameters()[table.units()[unit].parameters.clone()];
        let exact = parameters.iter().filter(|parameter| !parameter.class.has_gradient());
        let elements: Vec<_> = exact.map(ParameterInfo::range).collect();
        (!elements.is_empty()).then_some(UncompressedElements { elements, sum: None })
    }

    fn len(&self) -> usize {
        self.elements.iter().map(Range::len).sum()
    }

    /// Takes the elements out of a gradient, leaves zeros, and starts to sum them over the ranks.
    fn start(&mut self, gradient: &mut [f32], group: &Group) -> Result<()> {
        let mut own = group.buffer(self.len())?;
        let elements = self.elements.iter().cloned().flatten();
        own.iter_mut().zip(elements).for_each(|(own, element)| *own = std::mem::take(&mut gradient[element]));
        self.sum = Some(group.all_reduce(own, ReduceOp::Sum));
        Ok(())
    }

    fn finish(&mut self, gradient: &mut [f32], waiting: &mut WaitTracker) -> Result<()> {
        let sum = waiting.wait(self.sum.take().expect("a sum was started"))?;
        let elements = self.elements.iter().cloned().flatten();
        sum.iter().zip(elements).for_each(|(&sum, element)| gradient[element] = sum);
        Ok(())
    }
}

struct RoundExchange {
    round: Round,
    /// This rank's message; in an all-gather, the messages of all ranks. `None` while the round is in flight.
    messages: Option<Buffer<Untyped>>,
    work: Option<Work<Buffer<Untyped>>>,
}

impl RoundExchange {
    fn new(round: Round, group: &Group) -> Result<Self> {
        let (dtype, len) = round.message();
        let len = len * round.num_messages(group.world_size());
        let messages = group.buffer_of(dtype, len, PageSize::Base)?;
        Ok(RoundExchange { round, messages: Some(messages), work: None })
    }

    fn start(&mut self, compressor: &mut Compressor, gradient: &mut [f32], group: &Group) {
        let mut messages = self.messages.take().expect("a round is exchanged once a step");
        self.work = Some(match self.round {
            Round::AllReduce { .. } => {
                compressor.encode(gradient, messages.bytes_mut());
                group.all_reduce(messages, ReduceOp::Sum)
            }
            Round::AllGather { num_bytes } => {
                let own = group.rank().0 * num_bytes;
                compressor.encode(gradient, &mut messages.bytes_mut()[own..own + num_bytes]);
                group.all_gather(messages)
            }
        });
    }

    fn finish(
        &mut self,
        compressor: &mut Compressor,
        gradient: &mut [f32],
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        let work = self.work.take().expect("the round was started");
        let messages = waiting.wait(work)?;
        compressor.decode(gradient, messages.bytes())?;
        self.messages = Some(messages);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::{Initial, Parameter};

    #[test]
    fn a_bucket_has_the_matrices_of_its_unit() {
        let mut table = ParameterTable::default();
        table.begin_unit("embedding");
        table.add(Parameter::embedding("wte", &[5, 4], Initial::ZEROS));
        table.begin_unit("block");
        table.add(Parameter::vector("norm", 4, Initial::ZEROS));
        table.add(Parameter::matrix("query", &[6, 4], Initial::ZEROS));
        table.add(Parameter::vector("bias", 6, Initial::ZEROS));
        table.add(Parameter::matrix("value", &[2, 4], Initial::ZEROS));
        let bucket = bucket(&table, 1).unwrap();
        assert_eq!(bucket.len(), 42);
        let query = Matrix { offset: 4, rows: 6, cols: 4 };
        assert_eq!(bucket.matrices(), [query, Matrix { offset: 34, rows: 2, cols: 4 }]);
    }
}
