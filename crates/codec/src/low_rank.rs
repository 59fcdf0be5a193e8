//! The codec `powersgd` (Vogels, Karimireddy, Jaggi: "PowerSGD: practical low-rank gradient compression for distributed
//! optimization", 2019): one step of subspace iteration for each training step, warm-started with the factors of the
//! previous one.
//!
//! For each matrix `M` of the bucket, the ranks compute `P = M Q`, sum it, orthonormalize the columns of the sum, and
//! sum `Q = M^T P`. The result is `P Q^T`. A rank's compression error is `M - P P^T M`, the part of its matrix that it
//! did not contribute. The first round sends the factors `P`. The second round sends the factors `Q`, and the elements
//! that are not factored, unchanged: elements outside of all matrices, and small matrices whose factors would not be
//! shorter.
//!
//! Factors are stored column-major, so that all inner loops access contiguous memory.

use super::error::Result;
use super::vector_ops::{INFINITY_BITS, add_scaled, dot, largest_magnitude_bits};
use super::{Bucket, Codec, Matrix, Round, RoundContext};
use std::ops::Range;
use trireme_base::{RandomKey, floor_log2, power_of_two};

/// If subtracting the projections on earlier columns shortens a column to this fraction of its length or less, the rest is treated as
/// rounding error.
const INDEPENDENT_PART_MIN: f32 = 1e-5;

/// Positions of the factors, and of the elements that are not factored, within the messages.
#[derive(Debug)]
pub(super) struct Layout {
    factored: Vec<Factored>,
    /// Ranges of elements that are sent unchanged.
    unfactored: Vec<Range<usize>>,
    p_len: usize,
    q_len: usize,
    unfactored_len: usize,
}

#[derive(Debug)]
struct Factored {
    matrix: Matrix,
    p: Range<usize>,
    q: Range<usize>,
}

impl Layout {
    pub(super) fn new(bucket: &Bucket, rank: usize) -> Self {
        let mut layout =
            Layout { factored: Vec::new(), unfactored: Vec::new(), p_len: 0, q_len: 0, unfactored_len: 0 };
        let mut end = 0;
        for &matrix in bucket.matrices() {
            let Matrix { rows, cols, .. } = matrix;
            if rank.saturating_mul(rows + cols) < rows * cols {
                layout.add_unfactored(end..matrix.offset);
                end = matrix.range().end;
                let p = layout.p_len..layout.p_len + rank * rows;
                let q = layout.q_len..layout.q_len + rank * cols;
                (layout.p_len, layout.q_len) = (p.end, q.end);
                layout.factored.push(Factored { matrix, p, q });
            }
        }
        layout.add_unfactored(end..bucket.len());
        layout
    }

    fn add_unfactored(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            self.unfactored_len += range.len();
            self.unfactored.push(range);
        }
    }

    /// Returns the number of elements of the factors `Q`, which are kept between steps, and the bytes of the factors
    /// `P`, which are not.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.q_len, self.p_len * size_of::<f32>())
    }

    pub(super) fn rounds(&self) -> [Round; 2] {
        [self.p_len, self.q_len + self.unfactored_len].map(Round::uncompressed)
    }
}

#[derive(Debug)]
pub(super) struct LowRank {
    layout: Layout,
    /// The orthonormal factors `P`, kept from the first round of a step to the second.
    p: Vec<f32>,
    /// The factors `Q` that the next step starts with. A column of zeros is replaced by random numbers.
    q: Vec<f32>,
}

impl LowRank {
    pub(super) fn new(bucket: &Bucket, rank: usize) -> Self {
        let layout = Layout::new(bucket, rank);
        LowRank { p: vec![0.0; layout.p_len], q: vec![0.0; layout.q_len], layout }
    }

    /// Writes `P = M Q`.
    fn encode_p(&mut self, context: &RoundContext, values: &[f32], message: &mut [f32]) {
        for Factored { matrix, p, q } in &self.layout.factored {
            let q_first = (context.step << 32).wrapping_add(q.start as u64);
            for (column, q) in self.q[q.clone()].chunks_exact_mut(matrix.cols).enumerate() {
                if largest_magnitude_bits(q) == 0 {
                    fill_uniform(context.key, q_first.wrapping_add((column * matrix.cols) as u64), q);
                }
            }
            let (q, p) = (&self.q[q.clone()], &mut message[p.clone()]);
            for (row, values) in values[matrix.range()].chunks_exact(matrix.cols).enumerate() {
                let columns = p.chunks_exact_mut(matrix.rows).zip(q.chunks_exact(matrix.cols));
                columns.for_each(|(p, q)| p[row] = dot(values, q));
            }
        }
    }

    fn decode_p(&mut self, sums: &[f32]) {
        self.p.copy_from_slice(sums);
        for Factored { matrix, p, .. } in &self.layout.factored {
            make_orthonormal(&mut self.p[p.clone()], matrix.rows);
        }
    }

    /// Writes `Q = M^T P`, and the elements that are not factored.
    fn encode_q(&mut self, values: &mut [f32], message: &mut [f32]) {
        let (factors, mut unfactored) = message.split_at_mut(self.layout.q_len);
        factors.fill(0.0);
        for Factored { matrix, p, q } in &self.layout.factored {
            let (p, q) = (&self.p[p.clone()], &mut factors[q.clone()]);
            for (row, values) in values[matrix.range()].chunks_exact(matrix.cols).enumerate() {
                let columns = p.chunks_exact(matrix.rows).zip(q.chunks_exact_mut(matrix.cols));
                columns.for_each(|(p, q)| add_scaled(q, p[row], values));
            }
            add_product(&mut values[matrix.range()], -1.0, p, q, matrix);
        }
        for range in &self.layout.unfactored {
            let slots = unfactored.split_off_mut(..range.len()).expect("the message has all plain elements");
            slots.copy_from_slice(&values[range.clone()]);
            values[range.clone()].fill(0.0);
        }
    }

    fn decode_q(&mut self, sums: &[f32], gradient: &mut [f32]) {
        let (factors, mut unfactored) = sums.split_at(self.layout.q_len);
        for Factored { matrix, p, q } in &self.layout.factored {
            let gradient = &mut gradient[matrix.range()];
            gradient.fill(0.0);
            add_product(gradient, 1.0, &self.p[p.clone()], &factors[q.clone()], matrix);
        }
        for range in &self.layout.unfactored {
            let sums = unfactored.split_off(..range.len()).expect("the message has all plain elements");
            gradient[range.clone()].copy_from_slice(sums);
        }
        self.q.copy_from_slice(factors);
        for Factored { matrix, q, .. } in &self.layout.factored {
            self.q[q.clone()].chunks_exact_mut(matrix.cols).for_each(rescale_or_zero);
        }
    }
}

impl Codec for LowRank {
    fn encode(&mut self, context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        match context.round {
            0 => self.encode_p(context, values, bytemuck::cast_slice_mut(message)),
            _ => self.encode_q(values, bytemuck::cast_slice_mut(message)),
        }
    }

    fn decode(&mut self, context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        match context.round {
            0 => self.decode_p(bytemuck::cast_slice(result)),
            _ => self.decode_q(bytemuck::cast_slice(result), gradient),
        }
        Ok(())
    }

    fn own_state(&self) -> Option<(&'static str, &[f32])> {
        Some(("q", &self.q))
    }

    fn own_state_mut(&mut self) -> Option<(&'static str, &mut [f32])> {
        Some(("q", &mut self.q))
    }
}

/// Computes `M += factor * P Q^T`.
fn add_product(values: &mut [f32], factor: f32, p: &[f32], q: &[f32], matrix: &Matrix) {
    for (row, values) in values.chunks_exact_mut(matrix.cols).enumerate() {
        for (p, q) in p.chunks_exact(matrix.rows).zip(q.chunks_exact(matrix.cols)) {
            add_scaled(values, factor * p[row], q);
        }
    }
}

/// Fills `values` with uniform random numbers from -1 to 1, starting at position `first` of the random stream.
fn fill_uniform(key: RandomKey, first: u64, values: &mut [f32]) {
    for (position, value) in values.iter_mut().enumerate() {
        let [word, ..] = key.words(first.wrapping_add(position as u64));
        *value = (word >> 8) as f32 / 8_388_608.0 - 1.0;
    }
}

/// Scales a column by a power of two so that its largest magnitude is at least 1 and below 2: then products neither
/// overflow nor underflow. A column that is not finite becomes zeros.
fn rescale_or_zero(column: &mut [f32]) {
    match largest_magnitude_bits(column) {
        0 => {}
        INFINITY_BITS.. => column.fill(0.0),
        bits => scale_to_one(column, f32::from_bits(bits)),
    }
}

fn scale_to_one(column: &mut [f32], largest: f32) {
    let scale_exponent = -floor_log2(f64::from(largest));
    // The scale is applied as two factors, because the scale of a column of subnormal values may exceed the range of f32.
    let half = scale_exponent / 2;
    let factors = (power_of_two(half), power_of_two(scale_exponent - half));
    column.iter_mut().for_each(|value| *value = *value * factors.0 * factors.1);
}

/// Orthonormalizes columns of `rows` elements by the modified Gram-Schmidt process. Each column is processed twice,
/// because rounding may leave it not orthogonal after the first pass. Columns that depend linearly on earlier ones
/// become zeros. A column with NaN or infinity becomes NaN, and so do the nonzero columns after it.
fn make_orthonormal(columns: &mut [f32], rows: usize) {
    for column in 0..columns.len() / rows {
        let (earlier, rest) = columns.split_at_mut(column * rows);
        let current = &mut rest[..rows];
        let largest = largest_magnitude_bits(current);
        if largest >= INFINITY_BITS {
            current.fill(f32::NAN);
            continue;
        }
        if largest == 0 {
            continue;
        }
        scale_to_one(current, f32::from_bits(largest));
        let len_before = dot(current, current).sqrt();
        for _ in 0..2 {
            for earlier in earlier.chunks_exact(rows) {
                let part = dot(earlier, current);
                add_scaled(current, -part, earlier);
            }
        }
        let len = dot(current, current).sqrt();
        let factor = if len <= INDEPENDENT_PART_MIN * len_before { 0.0 } else { 1.0 / len };
        current.iter_mut().for_each(|value| *value *= factor);
    }
}
