//! Sizes of an attention operation.

/// Sizes of an attention operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Queries of each sequence.
    pub seq_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head of queries or keys.
    pub head_dim: usize,
    /// Elements of a head of values or of the output.
    pub value_dim: usize,
    /// Keys of each sequence: as many as queries, unless queries lie apart.
    pub num_keys: usize,
}

impl AttentionShape {
    // Sizes that overflow saturate: no device has a tensor of such a shape.

    /// Elements of a row of `qkv`.
    pub fn qkv_cols(&self) -> usize {
        self.query_cols().saturating_add(self.kv_cols())
    }

    /// Elements of the queries of one position.
    pub fn query_cols(&self) -> usize {
        self.num_heads.saturating_mul(self.head_dim)
    }

    /// Elements of a row of the output.
    pub fn output_cols(&self) -> usize {
        self.num_heads.saturating_mul(self.value_dim)
    }

    /// Elements of the keys of one position.
    pub fn key_cols(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.head_dim)
    }

    /// Elements of the values of one position.
    pub fn value_cols(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.value_dim)
    }

    /// Elements of the keys and values of one position.
    pub fn kv_cols(&self) -> usize {
        self.key_cols().saturating_add(self.value_cols())
    }

    /// Rows of queries and of the output.
    pub fn rows(&self) -> usize {
        self.batch.saturating_mul(self.seq_len)
    }

    /// First column of a key head in rows of `qkv`.
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
