//! How the gradient of a unit is summed over the ranks in compressed messages.

use crate::error::ParallelError;
use crate::step::ExecutorOptions;
use crate::waiting::Waiting;
use trireme_base::{Bf16, DType, F16, RandomKey, ReduceOp};
use trireme_comm::{Bucket, Buffer, CompressionError, Compressor, Element, Group, Matrix, Round, Work};
use trireme_tensor::{Category, Device, ParameterTable};

/// The compressed reduction of one unit's gradient, step after step.
pub(crate) struct Compressed {
    compressor: Compressor,
    /// One for each round, made anew only when the rounds change.
    exchanges: Vec<Box<dyn Exchange>>,
    /// Bytes counted for the exchanges.
    exchange_bytes: usize,
    under_way: Option<UnderWay>,
}

struct UnderWay {
    gradient: Buffer<f32>,
    round: usize,
}

impl Compressed {
    /// The compressed reduction of `unit`'s gradient over `group`; `None` if each of its steps would send the gradient as
    /// it is, and keep nothing.
    pub(crate) fn new(
        table: &ParameterTable,
        unit: usize,
        options: &ExecutorOptions,
        device: &Device,
        group: &Group,
    ) -> Result<Option<Self>, ParallelError> {
        let ExecutorOptions { compression, seed, .. } = options;
        let (bucket, world_size) = (bucket(table, unit)?, group.world_size());
        let key = RandomKey::new(*seed, &format!("compression of {}", table.units()[unit].name));
        let compressor = Compressor::new(compression, &bucket, group.rank(), world_size, key)?;
        // What is compressed in one step stays so, so the last step tells of all.
        let is_never_compressed = compression.uncompressed_reason(&bucket, world_size, u64::MAX).is_some();
        if is_never_compressed && compressor.num_bytes() == 0 {
            return Ok(None);
        }
        device.memory().take(Category::Communication, compressor.num_bytes())?;
        let mut compressed =
            Compressed { compressor, exchanges: Vec::new(), exchange_bytes: 0, under_way: None };
        compressed.make_exchanges(device, group)?;
        Ok(Some(compressed))
    }

    pub(crate) fn compressor(&self) -> &Compressor {
        &self.compressor
    }

    pub(crate) fn compressor_mut(&mut self) -> &mut Compressor {
        &mut self.compressor
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Starts the first round of a step with this rank's `gradient`.
    pub(crate) fn start(
        &mut self,
        mut gradient: Buffer<f32>,
        device: &Device,
        group: &Group,
    ) -> Result<(), ParallelError> {
        let rounds = self.compressor.rounds().iter().copied();
        if !self.exchanges.iter().map(|exchange| exchange.round()).eq(rounds) {
            self.make_exchanges(device, group)?;
        }
        self.exchanges[0].start(&mut self.compressor, &mut gradient, group);
        self.under_way = Some(UnderWay { gradient, round: 0 });
        Ok(())
    }

    /// Waits for the round under way and starts the next one; after the last one, the sum over all ranks.
    pub(crate) fn advance(
        &mut self,
        group: &Group,
        waiting: &mut Waiting,
    ) -> Result<Option<Buffer<f32>>, ParallelError> {
        let Some(UnderWay { mut gradient, round }) = self.under_way.take() else { return Ok(None) };
        self.exchanges[round].finish(&mut self.compressor, &mut gradient, waiting)?;
        let Some(next) = self.exchanges.get_mut(round + 1) else { return Ok(Some(gradient)) };
        next.start(&mut self.compressor, &mut gradient, group);
        self.under_way = Some(UnderWay { gradient, round: round + 1 });
        Ok(None)
    }

    /// Takes memory for the messages of the rounds to come, and gives back that of earlier ones.
    fn make_exchanges(&mut self, device: &Device, group: &Group) -> Result<(), ParallelError> {
        self.exchanges.clear();
        device.memory().give(Category::Communication, self.exchange_bytes);
        self.exchange_bytes = 0;
        for &round in self.compressor.rounds() {
            let exchange = exchange(round, group)?;
            let num_bytes = exchange.num_bytes();
            let num_bytes = num_bytes + group.peer_bytes_mapped(num_bytes);
            device.memory().take(Category::Communication, num_bytes)?;
            self.exchange_bytes += num_bytes;
            self.exchanges.push(exchange);
        }
        Ok(())
    }
}

/// The flat gradient of a unit, with its parameters of two dims as matrices.
fn bucket(table: &ParameterTable, unit: usize) -> Result<Bucket, CompressionError> {
    let unit = &table.units()[unit];
    let matrices = table.parameters()[unit.parameters.clone()].iter().filter_map(|parameter| {
        let &[rows, cols] = parameter.shape.dims() else { return None };
        Some(Matrix { offset: parameter.offset, rows, cols })
    });
    Bucket::with_matrices(unit.num_elements, matrices.collect())
}

/// One round's exchange of messages, step after step.
trait Exchange: Send {
    fn round(&self) -> Round;

    /// Bytes of this rank's memory for messages.
    fn num_bytes(&self) -> usize;

    /// Has the message written, and sends it.
    fn start(&mut self, compressor: &mut Compressor, gradient: &mut [f32], group: &Group);

    /// Waits for what was started, and has the result read.
    fn finish(
        &mut self,
        compressor: &mut Compressor,
        gradient: &mut [f32],
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError>;
}

/// An exchange of messages whose elements are `T`s.
struct MessageExchange<T> {
    round: Round,
    num_bytes: usize,
    /// This rank's message, or of a round that gathers those of all ranks; present while nothing is under way.
    messages: Option<Buffer<T>>,
    work: Option<Work<Buffer<T>>>,
}

fn exchange(round: Round, group: &Group) -> Result<Box<dyn Exchange>, ParallelError> {
    Ok(match round.message().0 {
        DType::F32 => Box::new(MessageExchange::<f32>::new(round, group)?),
        DType::F16 => Box::new(MessageExchange::<F16>::new(round, group)?),
        DType::Bf16 => Box::new(MessageExchange::<Bf16>::new(round, group)?),
        DType::U8 => Box::new(MessageExchange::<u8>::new(round, group)?),
        dtype => unreachable!("no codec has messages of {dtype}"),
    })
}

impl<T: Element> MessageExchange<T> {
    fn new(round: Round, group: &Group) -> Result<Self, ParallelError> {
        let (_, len) = round.message();
        let num_messages = match round {
            Round::AllReduce { .. } => 1,
            Round::AllGather { .. } => group.world_size(),
        };
        let messages = group.buffer::<T>(len * num_messages)?;
        Ok(MessageExchange {
            round,
            num_bytes: size_of_val(&*messages),
            messages: Some(messages),
            work: None,
        })
    }
}

impl<T: Element> Exchange for MessageExchange<T> {
    fn round(&self) -> Round {
        self.round
    }

    fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn start(&mut self, compressor: &mut Compressor, gradient: &mut [f32], group: &Group) {
        let mut messages = self.messages.take().expect("a round is exchanged once a step");
        self.work = Some(match self.round {
            Round::AllReduce { .. } => {
                compressor.write(gradient, &mut messages);
                group.all_reduce(messages, ReduceOp::Sum)
            }
            Round::AllGather { num_bytes } => {
                compressor.write(gradient, &mut messages[group.rank().0 * num_bytes..][..num_bytes]);
                group.all_gather(messages)
            }
        });
    }

    fn finish(
        &mut self,
        compressor: &mut Compressor,
        gradient: &mut [f32],
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let work = self.work.take().expect("the round was started");
        let messages = waiting.wait(work)?;
        compressor.read(gradient, &messages)?;
        self.messages = Some(messages);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_the_matrices_of_its_unit() {
        let mut table = ParameterTable::default();
        table.begin_unit("embedding");
        table.add("wte", &[5, 4]);
        table.begin_unit("block");
        table.add("norm", &[4]);
        table.add("query", &[6, 4]);
        table.add("bias", &[6]);
        table.add("value", &[2, 4]);
        let bucket = bucket(&table, 1).unwrap();
        assert_eq!(bucket.len(), 42);
        let query = Matrix { offset: 4, rows: 6, cols: 4 };
        assert_eq!(bucket.matrices(), [query, Matrix { offset: 34, rows: 2, cols: 4 }]);
    }
}
