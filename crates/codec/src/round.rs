use trireme_base::DType;

/// One collective operation of a step, in which all ranks take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// An all-reduce with [`ReduceOp::Sum`](trireme_base::ReduceOp::Sum): every rank contributes a vector and receives
    /// the sum.
    AllReduce {
        /// Type of the elements: f32, f16 or bf16.
        dtype: DType,
        /// Number of elements.
        len: usize,
    },
    /// An all-gather: every rank contributes bytes and receives the bytes of all ranks, in rank order.
    AllGather {
        /// Bytes that one rank contributes.
        num_bytes: usize,
    },
}

impl Round {
    /// Returns the round that sends a gradient of `len` elements uncompressed.
    pub(super) const fn uncompressed(len: usize) -> Self {
        Round::AllReduce { dtype: DType::F32, len }
    }

    /// Returns the dtype and number of elements of one rank's message.
    pub const fn message(self) -> (DType, usize) {
        match self {
            Round::AllReduce { dtype, len } => (dtype, len),
            Round::AllGather { num_bytes } => (DType::U8, num_bytes),
        }
    }

    /// Returns the size of one rank's message in bytes.
    pub const fn num_bytes(self) -> usize {
        let (dtype, len) = self.message();
        dtype.size() * len
    }

    /// Returns the number of messages for which a rank needs memory: one for an all-reduce, whose result replaces the
    /// rank's message, and `world_size` for an all-gather.
    pub const fn num_messages(self, world_size: usize) -> usize {
        match self {
            Round::AllReduce { .. } => 1,
            Round::AllGather { .. } => world_size,
        }
    }

    /// Returns the bytes that a rank sends when the collective uses a bandwidth-optimal algorithm. With `D` bytes in a
    /// message and `N` ranks, these are `2 D (N - 1) / N`, rounded up, for an all-reduce, and `D (N - 1)` for an
    /// all-gather.
    pub const fn bytes_sent(self, world_size: usize) -> u64 {
        let others = world_size as u64 - 1;
        let num_bytes = self.num_bytes() as u64;
        match self {
            Round::AllReduce { .. } => (2 * num_bytes * others).div_ceil(world_size as u64),
            Round::AllGather { .. } => num_bytes * others,
        }
    }
}
