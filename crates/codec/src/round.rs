use trireme_base::DType;

/// One exchange of a step between all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// Every rank gives a vector and gets the sum: an all-reduce with [`ReduceOp::Sum`](trireme_base::ReduceOp::Sum).
    AllReduce {
        /// Type of the elements: f32, f16 or bf16.
        dtype: DType,
        /// Number of elements.
        len: usize,
    },
    /// Every rank gives bytes, and all get the bytes of all ranks, in rank order.
    AllGather {
        /// Bytes of one rank.
        num_bytes: usize,
    },
}

impl Round {
    /// What a gradient of `len` elements takes uncompressed.
    pub(super) const fn uncompressed(len: usize) -> Self {
        Round::AllReduce { dtype: DType::F32, len }
    }

    /// The elements of a rank's message: type and number.
    pub const fn message(self) -> (DType, usize) {
        match self {
            Round::AllReduce { dtype, len } => (dtype, len),
            Round::AllGather { num_bytes } => (DType::U8, num_bytes),
        }
    }

    /// Bytes of the message that a rank gives.
    pub const fn num_bytes(self) -> usize {
        let (dtype, len) = self.message();
        dtype.size() * len
    }

    /// Messages that a rank has memory for: its own, which becomes the sum, or those of all ranks.
    pub const fn num_messages(self, world_size: usize) -> usize {
        match self {
            Round::AllReduce { .. } => 1,
            Round::AllGather { .. } => world_size,
        }
    }

    /// Bytes that a rank sends to others by the algorithms that move the fewest, with `D` bytes a message and `N` ranks:
    /// `2 D (N - 1) / N`, rounded up, for an all-reduce, `D (N - 1)` for an all-gather.
    pub const fn bytes_sent(self, world_size: usize) -> u64 {
        let others = world_size as u64 - 1;
        let num_bytes = self.num_bytes() as u64;
        match self {
            Round::AllReduce { .. } => (2 * num_bytes * others).div_ceil(world_size as u64),
            Round::AllGather { .. } => num_bytes * others,
        }
    }
}
