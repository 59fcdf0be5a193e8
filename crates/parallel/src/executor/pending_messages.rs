//! Messages between pipeline ranks: activations of forward, and gradients of backward.
//!
//! All outputs of a unit, or all their gradients, are one message.

use crate::error::Result;
use crate::layout::RankGrid;
use crate::memory::{ExchangeVector, Pool, WaitTracker};
use std::collections::VecDeque;
use trireme_base::{DType, Pending, Rank};
use trireme_comm::{Buffer, Untyped, Work};
use trireme_model::{Bundle, TensorSpec};
use trireme_tensor::{Category, Device, Tensor};

/// Maximum number of sent messages whose memory is in use. A further message waits for the first of them.
const SENDS_MAX: usize = 2;

pub(super) struct PendingMessages {
    pub(super) pool: Pool,
    pub(super) sent: VecDeque<Work<Buffer<Untyped>>>,
    /// Receives in flight, by kind and then microbatch, until a pass takes them: activations, gradients, and contributions to a tied
    /// gradient.
    pub(super) incoming: [Vec<Option<Incoming>>; 3],
}

pub(super) struct Incoming {
    pub(super) work: Work<Buffer<Untyped>>,
    pub(super) len: usize,
}

impl PendingMessages {
    pub(super) fn new(ranks: &RankGrid, num_microbatches: usize, device: &Device) -> Self {
        let none = || (0..num_microbatches).map(|_| None).collect();
        PendingMessages {
            pool: Pool::new(ranks.pipeline(), device, DType::F32, Category::Communication, false),
            sent: VecDeque::with_capacity(SENDS_MAX + 1),
            incoming: [none(), none(), none()],
        }
    }

    /// Copies tensors to a message, frees their memory, and starts to send the message.
    pub(super) fn send(
        &mut self,
        tensors: Bundle<Tensor>,
        to: usize,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        self.finish_until(SENDS_MAX - 1, waiting)?;
        let num_words = tensors.specs().map(|spec| spec.num_words()).sum();
        let (mut buffer, mut first) = (self.pool.take_buffer(num_words)?, 0);
        for ((_, tensor), spec) in tensors.iter().zip(tensors.specs()) {
            self.pool.copy_in(self.pool.device(), tensor.view(), &mut buffer, first * size_of::<f32>());
            first += spec.num_words();
        }
        let buffer = self.pool.pass_on(self.pool.device(), buffer, num_words);
        self.sent.push_back(self.pool.group().send(buffer, Rank(to)));
        Ok(())
    }

    pub(super) fn send_vector(
        &mut self,
        vector: ExchangeVector,
        to: usize,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        self.finish_until(SENDS_MAX - 1, waiting)?;
        let len = vector.len();
        let (buffer, _) = vector.begin_exchange(self.pool.device(), 0..len, 0..0);
        self.sent.push_back(self.pool.group().send(buffer, Rank(to)));
        Ok(())
    }

    /// Waits for the first sent messages until at most `num_left` are in flight. Messages are not freed earlier, so that memory use does
    /// not depend on timing.
    pub(super) fn finish_until(&mut self, num_left: usize, waiting: &mut WaitTracker) -> Result<()> {
        while self.sent.len() > num_left {
            let first = self.sent.pop_front().expect("messages are in flight");
            let buffer = waiting.wait(first)?;
            self.pool.release_buffer(buffer.len(), Pending::new(buffer));
        }
        Ok(())
    }

    pub(super) fn receive(&self, len: usize, from: usize) -> Result<Incoming> {
        let buffer = self.pool.pass_on(self.pool.device(), self.pool.take_buffer(len)?, len);
        Ok(Incoming { work: self.pool.group().receive(buffer, Rank(from)), len })
    }

    /// Waits for a message, and copies its tensors to the device.
    pub(super) fn receive_tensors(
        &self,
        Incoming { work, len }: Incoming,
        specs: impl Iterator<Item = TensorSpec>,
        waiting: &mut WaitTracker,
    ) -> Result<Bundle<Tensor>> {
        let device = self.pool.device();
        let mut buffer = waiting.wait_on_device(work, DType::F32, len, device)?;
        let (mut tensors, mut first) = (Bundle::new(), 0);
        for spec in specs {
            let mut tensor = device.empty(spec.shape, spec.dtype, Category::Activations)?;
            self.pool.copy_out(device, &mut buffer, first * size_of::<f32>(), tensor.view_mut());
            tensors.push(spec.name, tensor);
            first += spec.num_words();
        }
        device.wait_for(&buffer.event());
        self.pool.release_buffer(len, buffer);
        Ok(tensors)
    }
}
