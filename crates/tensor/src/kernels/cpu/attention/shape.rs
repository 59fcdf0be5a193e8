//! Sizes of an attention operation.

/// Sizes of an attention operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Number of sequences.
    pub batch: usize,
    /// Queries per sequence.
    pub seq_len: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Dim of query heads and key heads.
    pub head_dim: usize,
    /// Dim of value heads and output heads.
    pub value_dim: usize,
    /// Keys per sequence: equal to `seq_len`, unless queries are a separate array.
    pub num_keys: usize,
}

impl AttentionShape {
    // Sizes that overflow saturate. No device has a tensor of such a shape.

    /// Returns the length of a row of `qkv`.
    pub fn qkv_cols(&self) -> usize {
        self.query_cols().saturating_add(self.kv_cols())
    }

    /// Returns the length of the queries of one position.
    pub fn query_cols(&self) -> usize {
        self.num_heads.saturating_mul(self.head_dim)
    }

    /// Returns the length of a row of the output.
    pub fn output_cols(&self) -> usize {
        self.num_heads.saturating_mul(self.value_dim)
    }

    /// Returns the length of the keys of one position.
    pub fn key_cols(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.head_dim)
    }

    /// Returns the length of the values of one position.
    pub fn value_cols(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.value_dim)
    }

    /// Returns the length of the keys and values of one position.
    pub fn kv_cols(&self) -> usize {
        self.key_cols().saturating_add(self.value_cols())
    }

    /// Returns the number of rows of queries and of the output.
    pub fn rows(&self) -> usize {
        self.batch.saturating_mul(self.seq_len)
    }

    /// Returns the first column of a key head in rows of `qkv`.
    pub(super) fn key_col(&self, kv_head: usize) -> usize {
        (self.num_heads + kv_head) * self.head_dim
    }

    pub(super) fn value_col(&self, kv_head: usize) -> usize {
        self.key_col(self.num_kv_heads) + kv_head * self.value_dim
    }

    pub(super) fn heads_per_kv_head(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}
