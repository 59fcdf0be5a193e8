//! What brings tokens to experts and back: the largest elements of rows, and sums of chosen rows.

use super::element::Element;
use super::simd::{LANES, for_each_simd_level, sum_lanes};
use super::{Cpu, SharedSlice};

/// Columns that are summed at a time, in the first-level cache.
const COLS: usize = 512;

for_each_simd_level! {
    fn scale_row<X: Element, Y: Element>(x: &[X], weight: f32, y: &mut [Y]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = Y::from_f32(weight * x.to_f32()));
    }

    fn add_scaled_row<X: Element>(x: &[X], weight: f32, sums: &mut [f32]) {
        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += weight * x.to_f32());
    }

    fn row_product<X: Element, Y: Element>(x: &[X], y: &[Y]) -> f32 {
        let mut lanes = [0.0_f32; LANES];
        for (index, (x, y)) in x.iter().zip(y).enumerate() {
            lanes[index % LANES] += x.to_f32() * y.to_f32();
        }
        sum_lanes(lanes)
    }
}

/// How rows that were chosen for tokens lie, `num_choices` a token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chosen<'a> {
    /// The row of each choice of each token.
    pub(crate) places: &'a [u32],
    /// Choices of a token.
    pub(crate) num_choices: usize,
    /// What each chosen row is multiplied by, if by anything.
    pub(crate) weights: Option<&'a [f32]>,
}

impl Chosen<'_> {
    /// Row and weight of the choices of a token.
    fn of_token(&self, token: usize) -> impl Iterator<Item = (usize, f32)> {
        let choices = token * self.num_choices..(token + 1) * self.num_choices;
        choices
            .map(|choice| (self.places[choice] as usize, self.weights.map_or(1.0, |weights| weights[choice])))
    }
}

impl Cpu {
    /// The `k` largest elements of each row of `cols`, from the largest on; of equal ones the first. `values` are divided by their sum if
    /// `normalizes`, and `ids` tell where they were.
    ///
    /// # Panics
    /// If rows have fewer elements.
    pub(crate) fn top_k(
        &self,
        (x, cols): (&[f32], usize),
        (k, normalizes): (usize, bool),
        (values, ids): (&mut [f32], &mut [u32]),
    ) {
        assert!(k <= cols, "the {k} largest of {cols}");
        let (values, ids) = (SharedSlice::new(values), SharedSlice::new(ids));
        self.for_row_blocks(x.len() / cols, cols * k, |first, num| {
            for row in first..first + num {
                // SAFETY: rows do not overlap.
                let (values, ids) = unsafe { (values.range(row * k, k), ids.range(row * k, k)) };
                let row = &x[row * cols..(row + 1) * cols];
                for (place, value) in values.iter_mut().enumerate() {
                    let (before, rest) = ids.split_at_mut(place);
                    let is_left = |id: &u32| !before.contains(id);
                    let larger =
                        |best: u32, id: u32| if row[id as usize] > row[best as usize] { id } else { best };
                    let id = (0..cols as u32).filter(is_left).reduce(larger).expect("there are so many");
                    rest[0] = id;
                    *value = row[id as usize];
                }
                if normalizes {
                    let sum: f32 = values.iter().sum();
                    values.iter_mut().for_each(|value| *value /= sum);
                }
            }
        });
    }

    /// The gradient of rows of `cols` elements from that of their largest ones, `dy`; `x` and `ids` are those of [`top_k`](Cpu::top_k).
    pub(crate) fn top_k_backward(
        &self,
        (x, cols): (&[f32], usize),
        (k, normalizes): (usize, bool),
        (ids, dy): (&[u32], &[f32]),
        dx: &mut [f32],
    ) {
        let dx = SharedSlice::new(dx);
        self.for_row_blocks(x.len() / cols, cols, |first, num| {
            for row in first..first + num {
                // SAFETY: rows do not overlap.
                let dx = unsafe { dx.range(row * cols, cols) };
                let (x, ids, dy) =
                    (&x[row * cols..], &ids[row * k..(row + 1) * k], &dy[row * k..(row + 1) * k]);
                let value = |id: u32| x[id as usize];
                let (sum, mean) = match normalizes {
                    true => {
                        let sum: f32 = ids.iter().map(|&id| value(id)).sum();
                        let products = ids.iter().zip(dy).map(|(&id, dy)| dy * value(id));
                        (sum, products.sum::<f32>() / sum)
                    }
                    false => (1.0, 0.0),
                };
                dx.fill(0.0);
                ids.iter().zip(dy).for_each(|(&id, dy)| dx[id as usize] = (dy - mean) / sum);
            }
        });
    }

    /// `y[i] = weights[c] x[c / num_choices]`, where `c` is `order[i]`, of rows of `cols` elements: those of tokens, for each of their choices.
    ///
    /// # Panics
    /// If a choice is of no token.
    pub(crate) fn spread_rows<X: Element, Y: Element>(
        &self,
        (x, cols): (&[X], usize),
        (order, num_choices, weights): (&[u32], usize, Option<&[f32]>),
        y: &mut [Y],
    ) {
        assert_eq!(y.len(), order.len() * cols);
        let y = SharedSlice::new(y);
        self.for_row_blocks(order.len(), cols, |first, num| {
            for (place, &choice) in (first..).zip(&order[first..first + num]) {
                // SAFETY: rows do not overlap.
                let y = unsafe { y.range(place * cols, cols) };
                let choice = choice as usize;
                let weight = weights.map_or(1.0, |weights| weights[choice]);
                let x = &x[choice / num_choices * cols..][..cols];
                scale_row(self.features, x, weight, y);
            }
        });
    }

    /// `y[t] = residual[t] + sum over the choices c of token t of weights[t, c] x[places[t, c]]`, of rows of `cols` elements, in the order of
    /// the choices; in f32, rounded once.
    pub(crate) fn combine_rows<X: Element, Y: Element>(
        &self,
        (x, cols): (&[X], usize),
        chosen: Chosen<'_>,
        residual: Option<&[f32]>,
        y: &mut [Y],
    ) {
        let num_tokens = y.len() / cols.max(1);
        let y = SharedSlice::new(y);
        self.for_row_blocks(num_tokens, cols * (chosen.num_choices + 1), |first, num| {
            let mut sums = [0.0_f32; COLS];
            for token in first..first + num {
                // SAFETY: rows do not overlap.
                let y = unsafe { y.range(token * cols, cols) };
                for (block, y) in y.chunks_mut(COLS).enumerate() {
                    let sums = &mut sums[..y.len()];
                    let at = |row: usize| row * cols + block * COLS;
                    match residual {
                        Some(residual) => sums.copy_from_slice(&residual[at(token)..][..y.len()]),
                        None => sums.fill(0.0),
                    }
                    for (row, weight) in chosen.of_token(token) {
                        add_scaled_row(self.features, &x[at(row)..][..y.len()], weight, sums);
                    }
                    scale_row(self.features, sums, 1.0, y);
                }
            }
        });
    }

    /// `products[c] = sum of x[places[c]] y[c / num_choices]`, of rows of `cols` elements: for each choice of a token that of its rows.
    ///
    /// # Panics
    /// If a place is that of no row.
    pub(crate) fn row_products<X: Element, Y: Element>(
        &self,
        (x, cols): (&[X], usize),
        (places, num_choices): (&[u32], usize),
        y: &[Y],
        products: &mut [f32],
    ) {
        let out = SharedSlice::new(products);
        self.for_row_blocks(places.len(), cols, |first, num| {
            // SAFETY: blocks do not overlap.
            let out = unsafe { out.range(first, num) };
            for (choice, product) in (first..).zip(out) {
                let x = &x[places[choice] as usize * cols..][..cols];
                let y = &y[choice / num_choices * cols..][..cols];
                *product = row_product(self.features, x, y);
            }
        });
    }
}
