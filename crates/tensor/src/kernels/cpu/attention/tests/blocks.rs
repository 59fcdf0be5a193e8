//! Attention over the keys of one rank at a time, as in ring attention.

use super::*;

impl<T: Element> Inputs<T> {
    /// Runs attention as `degree` ranks with zig-zag positions would. Each rank adds the keys of one rank after another to its results.
    fn run_in_blocks_on(&self, cpu: &Cpu, degree: usize) -> [Vec<f32>; 3] {
        let Inputs { shape, rule, qkv, dy, .. } = self;
        let [q_cols, kv_cols, out_cols] = [shape.query_cols(), shape.kv_cols(), shape.output_cols()];
        let ranks = || AxisRank::all(degree).map(|place| Positions::zig_zag(shape.seq_len, place));
        let part =
            AttentionShape { seq_len: shape.seq_len / degree, num_keys: shape.seq_len / degree, ..*shape };
        let rows_of = |at: Positions| {
            let of_sequence =
                move |sequence| (0..at.len()).map(move |index| sequence * shape.seq_len + at.at(index));
            (0..shape.batch).flat_map(of_sequence)
        };
        fn take<U: Copy>(
            all: &[U],
            cols: usize,
            rows: impl Iterator<Item = usize>,
            of: std::ops::Range<usize>,
        ) -> Vec<U> {
            rows.flat_map(|row| all[row * cols..][of.clone()].to_vec()).collect()
        }
        let queries = |at| take(qkv, shape.qkv_cols(), rows_of(at), 0..q_cols);
        let keys_values = |at| take(qkv, shape.qkv_cols(), rows_of(at), q_cols..shape.qkv_cols());
        let starts = |at| self.document_starts.as_ref().map(|starts| take(starts, 1, rows_of(at), 0..1));
        let mut scratch = vec![f32::NAN; cpu.attention_scratch::<T>(part, 0, true)];
        let mut found =
            [vec![f32::NAN; dy.len()], vec![f32::NAN; shape.rows() * shape.num_heads], vec![0.0; qkv.len()]];
        for (rank, at) in ranks().enumerate() {
            let (queries, dy, document_starts) =
                (queries(at), take(dy, out_cols, rows_of(at), 0..out_cols), starts(at));
            // The rank's own keys come first.
            let blocks: Vec<Positions> = ranks().skip(rank).chain(ranks().take(rank)).collect();
            let scope = |keys| AttentionScope { rule: *rule, queries: at, keys };
            let mut sums = vec![0.0; dy.len()];
            let mut log_sums = vec![f32::NEG_INFINITY; part.rows() * part.num_heads];
            let (padding_starts, document_starts) =
                (self.padding_starts.as_deref(), document_starts.as_deref());
            let rows: Vec<Vec<T>> = blocks.iter().map(|&keys| keys_values(keys)).collect();
            let inputs = rows.iter().map(|rows| AttentionInputs {
                queries: &queries[..],
                keys_values: Some(&rows[..]),
                padding_starts,
                document_starts,
            });
            for (&keys, inputs) in blocks.iter().zip(inputs.clone()) {
                let results = ForwardResults {
                    y: RowDestination::Sums(SharedSlice::new(&mut sums)),
                    log_sums: &mut log_sums,
                };
                cpu.attention(inputs, part, scope(keys), results, &mut scratch);
            }
            let y = narrow::<T>(&sums);
            let mut d_queries = vec![0.0; queries.len()];
            for (&keys, inputs) in blocks.iter().zip(inputs) {
                let mut d_keys_values =
                    take(&found[2], shape.qkv_cols(), rows_of(keys), q_cols..shape.qkv_cols());
                let grads = AttentionGrads {
                    queries: RowDestination::Sums(SharedSlice::new(&mut d_queries)),
                    keys_values: Some(RowDestination::Sums(SharedSlice::new(&mut d_keys_values))),
                };
                let output = AttentionOutput { y: &y[..], log_sums: &log_sums[..], dy: &dy[..] };
                cpu.attention_backward(inputs, part, scope(keys), output, grads, &mut scratch);
                for (row, grads) in rows_of(keys).zip(d_keys_values.chunks_exact(kv_cols)) {
                    found[2][row * shape.qkv_cols() + q_cols..][..kv_cols].copy_from_slice(grads);
                }
            }
            for (index, row) in rows_of(at).enumerate() {
                let y = &widen(&y)[index * out_cols..][..out_cols];
                found[0][row * out_cols..][..out_cols].copy_from_slice(y);
                let d_queries = &d_queries[index * q_cols..][..q_cols];
                found[2][row * shape.qkv_cols()..][..q_cols].copy_from_slice(d_queries);
                for head in 0..shape.num_heads {
                    let (sequence, position) = (row / shape.seq_len, row % shape.seq_len);
                    let of = |seq_len: usize, position: usize| {
                        (sequence * shape.num_heads + head) * seq_len + position
                    };
                    found[1][of(shape.seq_len, position)] = log_sums[of(part.seq_len, index % part.seq_len)];
                }
            }
        }
        found
    }
}

#[test]
fn keys_block_by_block_match_f64() {
    let all = [
        (AttentionShape { value_dim: 5, ..shape(1, 12, 2, 1, 3) }, 3),
        (shape(2, 72, 4, 2, 5), 2),
        (shape(1, 640, 2, 1, 6), 2),
    ];
    for &(shape, degree) in cases_for_miri(&all, 1) {
        for rule in [AttentionRule::causal(shape.head_dim)].into_iter().chain(rules(shape.head_dim)) {
            for &dtype in dtypes(shape) {
                with_element!(dtype => |T| {
                    let mut inputs = Inputs { rule, ..Inputs::<T>::new(shape) };
                    check_results(&inputs, run_at_levels(|cpu| inputs.run_in_blocks_on(cpu, degree)));
                    if rule.is_causal {
                        let start = |row: usize| if row % shape.seq_len < 7 { 0 } else { 7 };
                        inputs.document_starts = Some((0..shape.rows()).map(start).collect());
                    } else {
                        inputs.padding_starts = Some(vec![9; shape.batch]);
                    }
                    check_results(&inputs, run_at_levels(|cpu| inputs.run_in_blocks_on(cpu, degree)));
                });
            }
        }
    }
}
