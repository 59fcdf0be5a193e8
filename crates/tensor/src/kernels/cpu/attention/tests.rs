use super::*;
use crate::kernels::cpu::simd::CpuFeatures;
use crate::kernels::cpu::threads::ThreadPool;
use trireme_base::RandomKey;

fn cpu(threads: usize) -> Cpu {
    Cpu { threads: ThreadPool::new(threads).unwrap(), features: CpuFeatures::detect() }
}

fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(9, name).fill_normal(&mut values, 1.0);
    values
}

/// Output of every head in f64, without blocks.
fn naive(qkv: &[f64], shape: AttentionShape) -> Vec<f64> {
    let (cols, dim) = (shape.qkv_cols(), shape.head_dim);
    let mut y = vec![0.0; shape.rows() * shape.output_cols()];
    for row in 0..shape.rows() {
        let first = row / shape.seq_len * shape.seq_len;
        for head in 0..shape.num_heads {
            let kv_head = head / (shape.num_heads / shape.num_kv_heads);
            let at = |row: usize, col: usize| &qkv[row * cols + col..row * cols + col + dim];
            let query = at(row, head * dim);
            let dot =
                |key: &[f64]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt();
            let weights: Vec<f64> =
                (first..=row).map(|key| dot(at(key, shape.key_col(kv_head))).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (key, weight) in (first..=row).zip(&weights) {
                let value = at(key, shape.value_col(kv_head));
                for (i, value) in value.iter().enumerate() {
                    y[row * shape.output_cols() + head * dim + i] += weight / sum * value;
                }
            }
        }
    }
    y
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Longer than two blocks of keys and one of queries, none of them full; and the smallest.
const SHAPES: [AttentionShape; 3] = [
    AttentionShape { batch: 2, seq_len: 300, num_heads: 4, num_kv_heads: 2, head_dim: 6 },
    AttentionShape { batch: 1, seq_len: 65, num_heads: 3, num_kv_heads: 3, head_dim: 16 },
    AttentionShape { batch: 2, seq_len: 1, num_heads: 1, num_kv_heads: 1, head_dim: 2 },
];

#[test]
fn outputs_and_gradients_match_f64_for_any_number_of_threads() {
    for shape in SHAPES {
        let qkv = random(shape.rows() * shape.qkv_cols(), "qkv");
        let dy = random(shape.rows() * shape.output_cols(), "dy");
        let run = |threads: usize| {
            let cpu = cpu(threads);
            let mut y = vec![f32::NAN; dy.len()];
            let mut log_sums = vec![f32::NAN; shape.rows() * shape.num_heads];
            let mut scratch = vec![f32::NAN; cpu.attention_scratch(shape, false)];
            cpu.attention(&qkv, shape, &mut y, &mut log_sums, &mut scratch);
            let mut d_qkv = vec![f32::NAN; qkv.len()];
            let mut scratch = vec![f32::NAN; cpu.attention_scratch(shape, true)];
            cpu.attention_backward(&qkv, shape, (&y, &log_sums, &dy), &mut d_qkv, &mut scratch);
            (y, d_qkv)
        };
        let (y, d_qkv) = run(1);
        assert_eq!((&y, &d_qkv), (&run(3).0, &run(3).1), "bits depend on the number of threads");
        let exact = naive(&wide(&qkv), shape);
        for (found, expected) in y.iter().zip(&exact) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} instead of {expected}");
        }
        // Directional derivatives, each along a random direction within one kind of columns.
        let loss =
            |qkv: &[f64]| naive(qkv, shape).iter().zip(&dy).map(|(y, dy)| y * f64::from(*dy)).sum::<f64>();
        let direction = random(qkv.len(), "direction");
        for (from, to) in [
            (0, shape.key_col(0)),
            (shape.key_col(0), shape.value_col(0)),
            (shape.value_col(0), shape.qkv_cols()),
        ] {
            let masked = |index: usize| {
                let inside = (from..to).contains(&(index % shape.qkv_cols()));
                if inside { f64::from(direction[index]) } else { 0.0 }
            };
            let shifted = |by: f64| -> Vec<f64> {
                qkv.iter().enumerate().map(|(index, &x)| f64::from(x) + by * masked(index)).collect()
            };
            let expected = (loss(&shifted(1e-4)) - loss(&shifted(-1e-4))) / 2e-4;
            let found: f64 = d_qkv.iter().enumerate().map(|(index, &g)| f64::from(g) * masked(index)).sum();
            let error = (found - expected).abs() / expected.abs().max(1.0);
            assert!(error < 1e-4, "{shape:?} columns {from}..{to}: {found} instead of {expected}");
        }
    }
}

#[test]
fn a_cache_continues_where_it_stopped() {
    let shape = SHAPES[0];
    let cpu = cpu(2);
    let qkv = random(shape.rows() * shape.qkv_cols(), "qkv");
    let exact = naive(&wide(&qkv), shape);
    let capacity = shape.seq_len + 3;
    let mut keys = vec![f32::NAN; shape.batch * capacity * shape.kv_cols()];
    let mut values = keys.clone();
    let mut len = 0;
    for part in [290, 1, 9] {
        let part_shape = AttentionShape { seq_len: part, ..shape };
        let rows: Vec<f32> = (0..shape.batch)
            .flat_map(|sequence| {
                let start = (sequence * shape.seq_len + len) * shape.qkv_cols();
                qkv[start..start + part * shape.qkv_cols()].to_vec()
            })
            .collect();
        let mut y = vec![f32::NAN; part_shape.rows() * shape.output_cols()];
        let mut log_sums = vec![f32::NAN; part_shape.rows() * shape.num_heads];
        let mut cache = CacheSpan { keys: &mut keys, values: &mut values, capacity, len };
        let mut scratch = vec![f32::NAN; cpu.attention_scratch(part_shape, false)];
        cpu.attention_cached(&rows, part_shape, &mut cache, &mut y, &mut log_sums, &mut scratch);
        for (row, y) in y.chunks_exact(shape.output_cols()).enumerate() {
            let at = (row / part * shape.seq_len + len + row % part) * shape.output_cols();
            for (found, expected) in y.iter().zip(&exact[at..]) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} instead of {expected}");
            }
        }
        len += part;
    }
}

#[test]
fn rotating_back_undoes_rotation() {
    let shape = SHAPES[1];
    let original = random(shape.rows() * shape.qkv_cols(), "qkv");
    let angles = random((shape.seq_len + 7) * shape.head_dim / 2, "angles");
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|angle| (angle.cos(), angle.sin())).unzip();
    let rotary = Rotary { cos: &cos, sin: &sin, first_position: 7 };
    let mut qkv = original.clone();
    cpu(2).rotary(&mut qkv, shape, rotary, false);
    let moved = |from: usize, to: usize| {
        let rows = qkv.chunks_exact(shape.qkv_cols()).zip(original.chunks_exact(shape.qkv_cols()));
        rows.flat_map(|(a, b)| a[from..to].iter().zip(&b[from..to])).filter(|(a, b)| a != b).count()
    };
    assert!(moved(0, shape.value_col(0)) > shape.rows());
    assert_eq!(moved(shape.value_col(0), shape.qkv_cols()), 0, "values are not rotated");
    cpu(2).rotary(&mut qkv, shape, rotary, true);
    assert!(qkv.iter().zip(&original).all(|(a, b)| (a - b).abs() < 1e-5));
}
