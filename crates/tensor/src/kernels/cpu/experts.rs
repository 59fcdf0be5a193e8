//! Routing kernels: top-k choice of experts, dispatch of rows, and weighted sums of chosen rows.

use super::element::Element;
use super::simd::{LANES, for_each_simd_level, sum_lanes};
use super::{Cpu, SharedSlice};

/// Number of columns that are summed at a time. Their sums fit into the L1 cache.
const COLUMNS_PER_BLOCK: usize = 512;

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

/// The rows chosen for tokens, `num_choices` per token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChosenRows<'a> {
    /// The row of each choice of each token.
    pub(crate) positions: &'a [u32],
    pub(crate) num_choices: usize,
    /// The weight of each chosen row; `None` for weights of 1.
    pub(crate) weights: Option<&'a [f32]>,
}

impl ChosenRows<'_> {
    /// Returns the row and the weight of each choice of a token.
    fn of_token(&self, token: usize) -> impl Iterator<Item = (usize, f32)> {
        let choices = token * self.num_choices..(token + 1) * self.num_choices;
        choices.map(|choice| {
            (self.positions[choice] as usize, self.weights.map_or(1.0, |weights| weights[choice]))
        })
    }
}

/// The rule by which a token chooses experts, given their scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingRule {
    /// Number of experts per token.
    pub num_choices: usize,
    /// Whether the scores of the chosen experts are divided by their sum.
    pub normalizes: bool,
    /// Factor of the scores of the chosen experts.
    pub scale: f32,
    /// Limits the choice to the best groups of experts; `None` for no limit.
    pub groups: Option<ExpertGroups>,
}

/// A limit on the number of expert groups per token (node-limited routing). Groups consist of an equal number of consecutive experts. The
/// score of a group is the sum of its two best experts' scores (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups; at most [`ExpertGroups::NUM_MAX`].
    pub num_groups: usize,
    /// Number of groups that a token's experts may belong to.
    pub num_chosen: usize,
}

impl ExpertGroups {
    /// Maximum number of groups.
    pub const NUM_MAX: usize = 64;
}

impl RoutingRule {
    /// Chooses the `num_choices` largest elements, with the elements as weights.
    pub fn largest(num_choices: usize) -> Self {
        RoutingRule { num_choices, normalizes: false, scale: 1.0, groups: None }
    }

    /// Returns the chosen groups as bits, and the number of experts per group.
    fn chosen_groups(self, num_experts: usize, score: &dyn Fn(usize) -> f32) -> (u64, usize) {
        let Some(ExpertGroups { num_groups, num_chosen }) = self.groups else { return (1, num_experts) };
        let len = num_experts / num_groups;
        let mut scores = [0.0_f32; ExpertGroups::NUM_MAX];
        for (group, sum) in scores[..num_groups].iter_mut().enumerate() {
            let members = || group * len..(group + 1) * len;
            let best = first_largest(members(), score);
            let others = members().filter(|&member| Some(member) != best);
            *sum = best.map_or(0.0, score) + first_largest(others, score).map_or(0.0, score);
        }
        let mut chosen = 0_u64;
        for _ in 0..num_chosen {
            let left = (0..num_groups).filter(|group| chosen >> group & 1 == 0);
            chosen |= 1 << first_largest(left, &|group| scores[group]).expect("there are so many");
        }
        (chosen, len)
    }

    /// Returns the factor that turns scores of a token's experts into weights, and the sum of the scores; 1 instead of the sum if scores
    /// are not normalized.
    fn factor(self, scores: impl Iterator<Item = f32>) -> (f32, f32) {
        // Avoids a division by 0 if the logits are very negative and all sigmoids are 0.
        let sum: f32 = if self.normalizes { scores.sum::<f32>() + 1e-20 } else { 1.0 };
        (self.scale / sum, sum)
    }
}

/// The rule and the optional inputs by which [`Cpu::top_k`] chooses experts.
#[derive(Clone, Copy)]
pub(crate) struct Routing<'a> {
    pub(crate) rule: RoutingRule,
    /// A number per expert that is added to scores only for their comparison.
    pub(crate) bias: Option<&'a [f32]>,
    /// A weight per row. A row of weight 0 chooses no expert.
    pub(crate) row_weights: Option<&'a [f32]>,
}

/// Returns the chosen experts. Skips the id `num_experts`, which means no expert. Panics if an id is larger.
fn chosen_experts(ids: &[u32], num_experts: usize) -> impl Iterator<Item = usize> {
    let check = move |&id: &u32| {
        assert!(id as usize <= num_experts, "expert {id} of {num_experts}");
        id as usize
    };
    ids.iter().map(check).filter(move |&id| id < num_experts)
}

/// Returns the id with the largest score; the first one of equals.
fn first_largest(ids: impl Iterator<Item = usize>, score: &dyn Fn(usize) -> f32) -> Option<usize> {
    ids.reduce(|best, id| if score(id) > score(best) { id } else { best })
}

impl Cpu {
    pub(crate) fn top_k(
        &self,
        x: &[f32],
        cols: usize,
        routing: Routing<'_>,
        values: &mut [f32],
        ids: &mut [u32],
    ) {
        let Routing { rule, bias, row_weights } = routing;
        let k = rule.num_choices;
        let (values, ids) = (SharedSlice::new(values), SharedSlice::new(ids));
        self.for_row_blocks(x.len() / cols, cols * k, |first, num| {
            for row in first..first + num {
                // SAFETY: rows do not overlap.
                let (values, ids) = unsafe { (values.range(row * k, k), ids.range(row * k, k)) };
                if row_weights.is_some_and(|weights| weights[row] == 0.0) {
                    values.fill(0.0);
                    ids.fill(cols as u32);
                    continue;
                }
                let row = &x[row * cols..(row + 1) * cols];
                let score = |id: usize| row[id] + bias.map_or(0.0, |bias| bias[id]);
                let (groups, len) = rule.chosen_groups(cols, &score);
                for place in 0..k {
                    let (before, rest) = ids.split_at_mut(place);
                    let is_left =
                        |id: &usize| groups >> (id / len) & 1 == 1 && !before.contains(&(*id as u32));
                    let best = first_largest((0..cols).filter(is_left), &score);
                    rest[0] = best.expect("there are so many") as u32;
                }
                let (factor, _) = rule.factor(ids.iter().map(|&id| row[id as usize]));
                values.iter_mut().zip(&*ids).for_each(|(value, &id)| *value = row[id as usize] * factor);
            }
        });
    }

    pub(crate) fn top_k_backward(
        &self,
        x: &[f32],
        cols: usize,
        rule: RoutingRule,
        ids: &[u32],
        dy: &[f32],
        dx: &mut [f32],
    ) {
        let k = rule.num_choices;
        self.for_each_row(dx, cols, |row, dx| {
            let (x, ids, dy) = (&x[row * cols..], &ids[row * k..(row + 1) * k], &dy[row * k..(row + 1) * k]);
            dx.fill(0.0);
            if ids[0] as usize == cols {
                return;
            }
            let value = |id: u32| x[id as usize];
            let (factor, sum) = rule.factor(ids.iter().map(|&id| value(id)));
            let mean = if rule.normalizes {
                ids.iter().zip(dy).map(|(&id, dy)| dy * value(id)).sum::<f32>() / sum
            } else {
                0.0
            };
            ids.iter().zip(dy).for_each(|(&id, dy)| dx[id as usize] = (dy - mean) * factor);
        });
    }

    pub(crate) fn expert_loads(&self, ids: &[u32], out: &mut [f32]) {
        out.fill(0.0);
        chosen_experts(ids, out.len()).for_each(|id| out[id] += 1.0);
    }

    pub(crate) fn excess_loads(&self, ids: &[u32], out: &mut [f32], accumulate: bool) {
        let even = chosen_experts(ids, out.len()).count() as f32 / out.len() as f32;
        if !accumulate {
            out.fill(0.0);
        }
        out.iter_mut().for_each(|load| *load -= even);
        chosen_experts(ids, out.len()).for_each(|id| out[id] += 1.0);
    }

    pub(crate) fn permute_rows<X: Element, Y: Element>(
        &self,
        x: &[X],
        cols: usize,
        order: &[u32],
        num_choices: usize,
        weights: Option<&[f32]>,
        y: &mut [Y],
    ) {
        assert_eq!(y.len(), order.len() * cols);
        self.for_each_row(y, cols, |place, y| {
            let choice = order[place] as usize;
            let weight = weights.map_or(1.0, |weights| weights[choice]);
            scale_row(self.simd_level, &x[choice / num_choices * cols..][..cols], weight, y);
        });
    }

    pub(crate) fn combine_rows<X: Element, Y: Element>(
        &self,
        x: &[X],
        cols: usize,
        chosen: ChosenRows<'_>,
        residual: Option<&[f32]>,
        y: &mut [Y],
    ) {
        let num_tokens = y.len() / cols.max(1);
        let y = SharedSlice::new(y);
        self.for_row_blocks(num_tokens, cols * (chosen.num_choices + 1), |first, num| {
            let mut sums = [0.0_f32; COLUMNS_PER_BLOCK];
            for token in first..first + num {
                // SAFETY: rows do not overlap.
                let y = unsafe { y.range(token * cols, cols) };
                for (block, y) in y.chunks_mut(COLUMNS_PER_BLOCK).enumerate() {
                    let sums = &mut sums[..y.len()];
                    let at = |row: usize| row * cols + block * COLUMNS_PER_BLOCK;
                    match residual {
                        Some(residual) => sums.copy_from_slice(&residual[at(token)..][..y.len()]),
                        None => sums.fill(0.0),
                    }
                    for (row, weight) in chosen.of_token(token) {
                        add_scaled_row(self.simd_level, &x[at(row)..][..y.len()], weight, sums);
                    }
                    scale_row(self.simd_level, sums, 1.0, y);
                }
            }
        });
    }

    pub(crate) fn row_products<X: Element, Y: Element>(
        &self,
        x: &[X],
        cols: usize,
        positions: &[u32],
        num_choices: usize,
        y: &[Y],
        products: &mut [f32],
    ) {
        self.for_each_reduced_row(products, 1, cols, |choice, product| {
            let x = &x[positions[choice] as usize * cols..][..cols];
            let y = &y[choice / num_choices * cols..][..cols];
            product[0] = row_product(self.simd_level, x, y);
        });
    }
}
