//! Training in 8-bit floats, emulated: factors of products are rounded as fp8 would round them.
//!
//! Formats and their use are those of Micikevicius et al. ("FP8 formats for deep learning", 2022): the products of linear layers
//! are made of fp8, and everything else stays as it is. A factor is multiplied by a scale before it is rounded, so that its
//! largest values use the format's range; the scale follows from the largest magnitudes ("amax") of the same factor in earlier steps
//! (*delayed scaling*, as in NVIDIA's Transformer Engine), for then a value is read once.
//!
//! Scales are powers of two. So a rounded factor, divided by its scale again, is exact in bf16, the product of two of them is
//! exact in f32, and a product of matrices in bf16 sums just the terms that fp8 hardware sums. What may differ is the sum: its order,
//! and hardware that keeps fewer than f32's digits of it (about 14 bits on Hopper: DeepSeek-AI, "DeepSeek-V3 technical report",
//! 2024, section 3.3.2).

use crate::device::{Device, Result};
use crate::parameter_table::{ParameterId, ParameterTable};
use crate::tensor::{Tensor, View};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use trireme_base::{Category, DType, Fp8Format};

trireme_base::named! {
    /// Which formats factors are rounded to.
    pub enum Fp8Formats {
        /// E4M3 for all.
        E4m3 = "e4m3",
        /// E4M3 for inputs and weights, and E5M2, which has more range and fewer digits, for gradients.
        Hybrid = "hybrid",
    }
}

/// How linear layers work in fp8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Recipe {
    /// Which formats factors are rounded to.
    pub formats: Fp8Formats,
    /// Steps whose amaxes a scale follows from; at least 1.
    pub amax_history_len: usize,
    /// Scales leave room for values `2^margin` times larger than those of earlier steps.
    pub margin: u32,
}

impl Fp8Recipe {
    /// With a history of 16 steps, and no margin.
    pub const fn new(formats: Fp8Formats) -> Self {
        Fp8Recipe { formats, amax_history_len: 16, margin: 0 }
    }

    const fn format(&self, operand: Operand) -> Fp8Format {
        match (self.formats, operand) {
            (Fp8Formats::E4m3, _) | (_, Operand::Input | Operand::Weight) => Fp8Format::E4m3,
            (Fp8Formats::Hybrid, Operand::OutputGrad) => Fp8Format::E5m2,
        }
    }

    /// Exponent of the largest power of two with `amax * scale * 2^margin` at most the format's maximum.
    fn scale_exponent(&self, operand: Operand, amax: f32) -> i32 {
        let exponent = self.format(operand).scale_exponent(amax);
        exponent.saturating_sub_unsigned(self.margin).clamp(-SCALE_EXPONENT_MAX, SCALE_EXPONENT_MAX)
    }
}

/// How a factor is scaled before it is rounded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8Scale {
    recipe: Fp8Recipe,
    operand: Operand,
    /// Largest magnitude of earlier steps, if one is known.
    reference: Option<f32>,
}

impl Fp8Scale {
    pub(crate) fn format(&self) -> Fp8Format {
        self.recipe.format(self.operand)
    }

    /// Whether it follows from earlier steps, else from the values themselves (*current scaling*).
    pub(crate) fn is_known(&self) -> bool {
        self.reference.is_some()
    }

    /// The exponent of the scale, if it is known.
    pub(crate) fn exponent(&self) -> Option<i32> {
        self.reference.map(|amax| self.exponent_for(amax))
    }

    /// The exponent of a scale by this largest magnitude.
    pub(crate) fn exponent_for(&self, amax: f32) -> i32 {
        self.recipe.scale_exponent(self.operand, amax)
    }
}

/// Scales lie between two to minus this and two to this: beyond, rounded values would not be normal in bf16.
pub(crate) const SCALE_EXPONENT_MAX: i32 = 100;

/// What a linear layer's products read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    /// What the weight is applied to.
    Input,
    Weight,
    /// Gradient of the output, before a bias and a residual.
    OutputGrad,
}

const OPERANDS: usize = 3;

/// Scales of a step, and the amaxes found in it: what tapes share.
#[derive(Debug)]
pub struct Fp8Scales {
    recipe: Fp8Recipe,
    /// First parameter of each layer's weight, ascending.
    layers: Vec<ParameterId>,
    /// By layer, then [`Operand`]: the largest amax of the history, as bits of an f32; 0 where nothing is known.
    history_max: Vec<AtomicU32>,
    /// By layer, then [`Operand`]: the largest magnitudes of this step so far, on the device.
    amaxes: Mutex<Tensor>,
}

/// One layer's part of [`Fp8Scales`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8Layer<'a> {
    scales: &'a Fp8Scales,
    layer: usize,
    /// Whether amaxes count for the scales to come.
    observes: bool,
}

impl Fp8Scales {
    /// The layer whose weight begins with parameter `weight`, if it works in fp8. Of passes that train, the amaxes count
    /// for the scales to come.
    pub(crate) fn layer(&self, weight: ParameterId, trains: bool) -> Option<Fp8Layer<'_>> {
        let layer = self.layers.binary_search(&weight).ok()?;
        Some(Fp8Layer { scales: self, layer, observes: trains })
    }

    fn amaxes(&self) -> MutexGuard<'_, Tensor> {
        self.amaxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fp8Layer<'_> {
    /// A copy of `values`, rounded as `operand`; bf16.
    ///
    /// Where nothing is known of earlier steps, the scale is that of the values themselves (*current scaling*).
    pub(crate) fn quantize(&self, device: &Device, operand: Operand, values: View<'_>) -> Result<Tensor> {
        let place = self.layer * OPERANDS + operand as usize;
        let history_max = f32::from_bits(self.scales.history_max[place].load(Ordering::Relaxed));
        let reference = (history_max > 0.0).then_some(history_max);
        let scale = Fp8Scale { recipe: self.scales.recipe, operand, reference };
        let mut rounded = device.activation_of(values.shape(), DType::Bf16)?;
        let mut amaxes = self.scales.amaxes();
        let amax = self.observes.then(|| amaxes.view_mut().into_part(place, [1].into()));
        device.quantize_fp8(values, scale, rounded.view_mut(), amax);
        Ok(rounded)
    }
}

/// The scales of a model's layers from step to step.
///
/// All of it is a function of the amaxes given to [`Fp8State::advance`]: ranks that are given the same ones have the same
/// scales.
#[derive(Debug)]
pub struct Fp8State {
    scales: Arc<Fp8Scales>,
    /// By layer, then [`Operand`]: amaxes of earlier steps, the newest first; 0 where there was none.
    history: Vec<f32>,
}

impl Fp8State {
    /// The state of a model all of whose [matrices](ParameterTable::matrices) are weights of linear layers in fp8.
    ///
    /// Fails and panics as [`new`](Fp8State::new).
    pub fn of_matrices(recipe: Fp8Recipe, table: &ParameterTable, device: &Device) -> Result<Self> {
        Fp8State::new(recipe, table.matrices().iter().map(|span| span.first).collect(), device)
    }

    /// Nothing is known yet. `layers` has the first parameter of each layer's weight.
    ///
    /// # Errors
    /// If the device has no memory for the amaxes of a step.
    ///
    /// # Panics
    /// If the history has no room for a step.
    pub fn new(recipe: Fp8Recipe, mut layers: Vec<ParameterId>, device: &Device) -> Result<Self> {
        assert!(recipe.amax_history_len > 0, "scales follow from at least one step");
        layers.sort_unstable();
        let num_operands = layers.len() * OPERANDS;
        let history_max = (0..num_operands).map(|_| AtomicU32::default()).collect();
        let amaxes = device.zeros([num_operands].into(), DType::F32, Category::Communication)?;
        let history = vec![0.0; num_operands * recipe.amax_history_len];
        let scales = Fp8Scales { recipe, layers, history_max, amaxes: Mutex::new(amaxes) };
        Ok(Fp8State { scales: Arc::new(scales), history })
    }

    /// What tapes read and write.
    pub fn scales(&self) -> &Arc<Fp8Scales> {
        &self.scales
    }

    /// The first parameter of each layer's weight.
    pub fn layers(&self) -> &[ParameterId] {
        &self.scales.layers
    }

    /// Number of amaxes of a step.
    pub fn num_amaxes(&self) -> usize {
        self.scales.history_max.len()
    }

    /// Takes the amaxes of the step out of the scales: of this rank's microbatches.
    ///
    /// # Panics
    /// If there is no room for [`Fp8State::num_amaxes`].
    pub fn take_amaxes(&mut self, device: &Device, amaxes: &mut [f32]) {
        let mut own = self.scales.amaxes();
        device.download(own.view(), amaxes);
        device.zero(own.view_mut());
    }

    /// Ends a step: its `amaxes`, of all ranks, enter the history, and give new scales.
    ///
    /// # Panics
    /// If they are not [`Fp8State::num_amaxes`].
    pub fn advance(&mut self, amaxes: &[f32]) {
        assert_eq!(amaxes.len(), self.num_amaxes());
        let len = self.scales.recipe.amax_history_len;
        for (history, amax) in self.history.chunks_exact_mut(len).zip(amaxes) {
            history.copy_within(..len - 1, 1);
            history[0] = *amax;
        }
        self.update_scales();
    }

    /// The history of a layer, to be kept: `[3, amax_history_len]` for input, weight and output gradient, the newest step
    /// first, 0 where nothing is known.
    pub fn history(&self, layer: usize) -> (&[f32], [usize; 2]) {
        let len = self.scales.recipe.amax_history_len;
        (&self.history[layer * OPERANDS * len..][..OPERANDS * len], [OPERANDS, len])
    }

    /// Goes on from a kept history of a layer, of which the newest steps count that there is room for. `false`, and nothing
    /// changes, if it is none.
    #[must_use = "a history may be refused"]
    pub fn restore(&mut self, layer: usize, kept: &[f32], shape: &[usize]) -> bool {
        let is_amax = |amax: &f32| amax.is_finite() && *amax >= 0.0;
        let &[OPERANDS, kept_len] = shape else { return false };
        if kept.len() != OPERANDS * kept_len || kept_len == 0 || !kept.iter().all(is_amax) {
            return false;
        }
        let len = self.scales.recipe.amax_history_len;
        let history = &mut self.history[layer * OPERANDS * len..][..OPERANDS * len];
        history.fill(0.0);
        for (history, kept) in history.chunks_exact_mut(len).zip(kept.chunks_exact(kept_len)) {
            let num_steps = len.min(kept_len);
            history[..num_steps].copy_from_slice(&kept[..num_steps]);
        }
        self.update_scales();
        true
    }

    fn update_scales(&mut self) {
        let histories = self.history.chunks_exact(self.scales.recipe.amax_history_len);
        for (known, history) in self.scales.history_max.iter().zip(histories) {
            let max = history.iter().copied().fold(0.0, f32::max);
            known.store(max.to_bits(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
