//! Training in 8-bit floats: operands of matmuls are rounded to fp8. GPUs that have fp8 units multiply the codes; elsewhere, their values
//! are multiplied in bf16.
//!
//! Formats and their use follow Micikevicius et al. ("FP8 formats for deep learning", 2022): the matmuls of linear layers have fp8
//! operands, and everything else keeps its precision. An operand is multiplied by a scale before it is rounded, so that its largest values
//! use the range of the format. The scale is derived from the largest magnitudes ("amax") of the same operand in earlier steps (*delayed
//! scaling*, as in NVIDIA's Transformer Engine), so that values are read only once.
//!
//! Scales are powers of two. A rounded operand, divided by its scale, is therefore exact in bf16, the product of two rounded elements is
//! exact in f32, and a bf16 matmul adds exactly the products that fp8 hardware adds. Only the sum may differ: in its order, and in its
//! precision on hardware that accumulates with fewer bits than f32 (about 14 on Hopper: DeepSeek-AI, "DeepSeek-V3 technical report", 2024,
//! section 3.3.2).
//!
//! All ranks use the same scales: they agree on the largest magnitudes by one all-reduce per step (`parallel/src/executor/fp8_scales.rs`),
//! and checkpoints contain the histories.

use crate::device::{Device, Result};
use crate::parameter_table::{ParameterId, ParameterTable};
use crate::tensor::Tensor;
use crate::view::View;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use trireme_base::{Category, DType, Fp8Format};

trireme_base::named! {
    /// The fp8 formats of matmul operands.
    pub enum Fp8Formats {
        /// E4M3 for all.
        E4m3 = "e4m3",
        /// E4M3 for inputs and weights; E5M2, with more range and less precision, for gradients.
        Hybrid = "hybrid",
    }
}

/// Settings of linear layers that compute in fp8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Recipe {
    /// Formats of matmul operands.
    pub formats: Fp8Formats,
    /// Number of steps whose amaxes determine a scale; at least 1.
    pub amax_history_len: usize,
    /// Headroom: scales leave room for values `2^margin` times larger than the values of earlier steps.
    pub margin: u32,
}

impl Fp8Recipe {
    /// Creates a recipe with a history of 16 steps and no margin.
    pub const fn new(formats: Fp8Formats) -> Self {
        Fp8Recipe { formats, amax_history_len: 16, margin: 0 }
    }

    const fn format(&self, operand: LinearOperand) -> Fp8Format {
        match (self.formats, operand) {
            (Fp8Formats::E4m3, _) | (_, LinearOperand::Input | LinearOperand::Weight) => Fp8Format::E4m3,
            (Fp8Formats::Hybrid, LinearOperand::OutputGrad) => Fp8Format::E5m2,
        }
    }

    /// Returns the exponent of the largest power of two `scale` with `amax * scale * 2^margin` at most the format's maximum.
    fn scale_exponent(&self, operand: LinearOperand, amax: f32) -> i32 {
        let exponent = self.format(operand).scale_exponent(amax);
        exponent.saturating_sub_unsigned(self.margin).clamp(-SCALE_EXPONENT_MAX, SCALE_EXPONENT_MAX)
    }
}

/// The scale of an operand, applied before it is rounded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8Scale {
    recipe: Fp8Recipe,
    operand: LinearOperand,
    /// Largest magnitude of earlier steps, if one is known.
    reference: Option<f32>,
}

impl Fp8Scale {
    pub(crate) fn format(&self) -> Fp8Format {
        self.recipe.format(self.operand)
    }

    pub(crate) fn margin(&self) -> u32 {
        self.recipe.margin
    }

    /// Returns whether the scale is derived from earlier steps. If not, it is derived from the values themselves (*current scaling*).
    pub(crate) fn is_known(&self) -> bool {
        self.reference.is_some()
    }

    /// Returns the exponent of the scale, if it is known.
    pub(crate) fn exponent(&self) -> Option<i32> {
        self.reference.map(|amax| self.exponent_for(amax))
    }

    /// Returns the exponent of the scale for values of largest magnitude `amax`.
    pub(crate) fn exponent_for(&self, amax: f32) -> i32 {
        self.recipe.scale_exponent(self.operand, amax)
    }
}

/// Values as fp8 codes with a scale in common.
#[derive(Debug)]
pub(crate) struct Fp8Tensor {
    codes: Tensor,
    /// The reciprocal of the scale, `[1]`.
    reciprocal: Tensor,
    format: Fp8Format,
}

impl Fp8Tensor {
    pub(crate) fn view(&self) -> Fp8View<'_> {
        let scaling = Fp8Scaling { reciprocal: self.reciprocal.view(), format: self.format };
        Fp8View { codes: self.codes.view(), scaling }
    }

    /// Returns the codes and the reciprocal of the scale.
    pub(crate) fn into_parts(self) -> [Tensor; 2] {
        [self.codes, self.reciprocal]
    }
}

/// A borrowed matrix `[rows, cols]` of fp8 codes (u8) with a scale in common. Linear layers that compute in fp8 create it.
#[derive(Debug, Clone, Copy)]
pub struct Fp8View<'a> {
    pub(crate) codes: View<'a>,
    pub(crate) scaling: Fp8Scaling<View<'a>>,
}

/// How to decode fp8 codes: the value of a code in `format`, times `reciprocal`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8Scaling<A> {
    /// The reciprocal of the scale, f32, `[1]`.
    pub(crate) reciprocal: A,
    pub(crate) format: Fp8Format,
}

impl<A: Copy> Fp8Scaling<A> {
    pub(crate) fn map<B>(&self, function: impl FnOnce(A) -> B) -> Fp8Scaling<B> {
        Fp8Scaling { reciprocal: function(self.reciprocal), format: self.format }
    }
}

/// Bound on the magnitude of scale exponents. Beyond it, rounded values would not be normal in bf16.
pub(crate) const SCALE_EXPONENT_MAX: i32 = 100;

/// A matmul operand of a linear layer's forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinearOperand {
    /// The layer's input.
    Input,
    Weight,
    /// Gradient of the layer's output, and thus of the matmul's result: bias and residual do not change it.
    OutputGrad,
}

const NUM_OPERANDS: usize = 3;

/// The scales of a step, and the amaxes observed in it. Shared by the tapes of the step.
#[derive(Debug)]
pub struct Fp8Scales {
    recipe: Fp8Recipe,
    /// First parameter of each layer's weight, ascending.
    layers: Vec<ParameterId>,
    /// Largest amax of the history, indexed by layer, then [`LinearOperand`], as the bits of an f32; 0 if unknown.
    history_max: Vec<AtomicU32>,
    /// Largest magnitudes in this step so far, on the device, indexed by layer, then [`LinearOperand`].
    amaxes: Mutex<Tensor>,
}

/// One layer's scales and amaxes in [`Fp8Scales`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp8Layer<'a> {
    scales: &'a Fp8Scales,
    layer: usize,
    /// Whether the amaxes of this pass are recorded for later scales.
    records_amaxes: bool,
}

impl Fp8Scales {
    /// Returns the layer whose weight begins with parameter `weight`, or `None` if it does not compute in fp8. Amaxes are recorded
    /// only if `trains`.
    pub(crate) fn layer(&self, weight: ParameterId, trains: bool) -> Option<Fp8Layer<'_>> {
        let layer = self.layers.binary_search(&weight).ok()?;
        Some(Fp8Layer { scales: self, layer, records_amaxes: trains })
    }

    fn amaxes(&self) -> MutexGuard<'_, Tensor> {
        self.amaxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fp8Layer<'_> {
    /// Returns the codes of `values` in the format of `operand`.
    ///
    /// Before the first amax is known, the scale is derived from the values themselves (*current scaling*).
    pub(crate) fn quantize(
        &self,
        device: &Device,
        operand: LinearOperand,
        values: View<'_>,
    ) -> Result<Fp8Tensor> {
        let place = self.layer * NUM_OPERANDS + operand as usize;
        let history_max = f32::from_bits(self.scales.history_max[place].load(Ordering::Relaxed));
        let reference = (history_max > 0.0).then_some(history_max);
        let scale = Fp8Scale { recipe: self.scales.recipe, operand, reference };
        let mut codes = device.activation_of(values.shape(), DType::U8)?;
        let mut reciprocal = device.activation([1])?;
        let mut amaxes = self.scales.amaxes();
        let amax = self.records_amaxes.then(|| amaxes.view_mut().into_part(place, [1].into()));
        let mut own_amax = if scale.is_known() { None } else { Some(device.activation([1])?) };
        let own_amax = own_amax.as_mut().map(Tensor::view_mut);
        device.quantize_fp8(values, scale, codes.view_mut(), reciprocal.view_mut(), amax, own_amax);
        Ok(Fp8Tensor { codes, reciprocal, format: scale.format() })
    }

    /// Returns a bf16 copy of `values`, rounded to the format of `operand`.
    pub(crate) fn round(&self, device: &Device, operand: LinearOperand, values: View<'_>) -> Result<Tensor> {
        let quantized = self.quantize(device, operand, values)?;
        let mut rounded = device.activation_of(values.shape(), DType::Bf16)?;
        let Fp8View { codes, scaling } = quantized.view();
        device.dequantize_fp8(codes, scaling, rounded.view_mut());
        Ok(rounded)
    }

    /// Returns a view of the [parts](Fp8Tensor::into_parts) of a tensor that [`quantize`](Fp8Layer::quantize) returned for `operand`.
    pub(crate) fn view_of_parts<'a>(
        &self,
        operand: LinearOperand,
        codes: View<'a>,
        reciprocal: View<'a>,
    ) -> Fp8View<'a> {
        Fp8View { codes, scaling: Fp8Scaling { reciprocal, format: self.scales.recipe.format(operand) } }
    }
}

/// The amax history of a model's fp8 layers, from which the scales follow.
///
/// The scales are a function of the amaxes passed to [`Fp8State::advance`]: ranks that pass the same amaxes have the same scales.
#[derive(Debug)]
pub struct Fp8State {
    scales: Arc<Fp8Scales>,
    /// Amaxes of earlier steps, newest first, indexed by layer, then [`LinearOperand`]; 0 if unknown.
    history: Vec<f32>,
}

impl Fp8State {
    /// Creates the state of a model whose [matrices](ParameterTable::matrices) are all weights of fp8 linear layers.
    ///
    /// # Errors
    /// As [`new`](Fp8State::new).
    ///
    /// # Panics
    /// As [`new`](Fp8State::new).
    pub fn of_matrices(recipe: Fp8Recipe, table: &ParameterTable, device: &Device) -> Result<Self> {
        Fp8State::new(recipe, table.matrices().iter().map(|span| span.first).collect(), device)
    }

    /// Creates a state without history. `layers` has the first parameter of each layer's weight.
    ///
    /// # Errors
    /// If the device has no memory for the amaxes of a step.
    ///
    /// # Panics
    /// If the recipe's history length is 0.
    pub fn new(recipe: Fp8Recipe, mut layers: Vec<ParameterId>, device: &Device) -> Result<Self> {
        assert!(recipe.amax_history_len > 0, "scales follow from at least one step");
        layers.sort_unstable();
        let num_operands = layers.len() * NUM_OPERANDS;
        let history_max = (0..num_operands).map(|_| AtomicU32::default()).collect();
        let amaxes = device.zeros([num_operands].into(), DType::F32, Category::Communication)?;
        let history = vec![0.0; num_operands * recipe.amax_history_len];
        let scales = Fp8Scales { recipe, layers, history_max, amaxes: Mutex::new(amaxes) };
        Ok(Fp8State { scales: Arc::new(scales), history })
    }

    /// Returns the scales that tapes read, and the amaxes that they write.
    pub fn scales(&self) -> &Arc<Fp8Scales> {
        &self.scales
    }

    /// Returns the first parameter of each layer's weight, ascending.
    pub fn layers(&self) -> &[ParameterId] {
        &self.scales.layers
    }

    /// Returns the number of amaxes per step.
    pub fn num_amaxes(&self) -> usize {
        self.scales.history_max.len()
    }

    /// Copies the step's amaxes of this rank's microbatches to `amaxes`, and resets them to 0.
    ///
    /// # Errors
    /// If the device has failed.
    ///
    /// # Panics
    /// If `amaxes` does not have length [`Fp8State::num_amaxes`].
    pub fn take_amaxes(&mut self, device: &Device, amaxes: &mut [f32]) -> Result<()> {
        let mut own = self.scales.amaxes();
        device.download(own.view(), amaxes)?;
        device.zero(own.view_mut());
        Ok(())
    }

    /// Ends a step: adds its `amaxes`, reduced over all ranks, to the history and updates the scales.
    ///
    /// # Panics
    /// If `amaxes` does not have length [`Fp8State::num_amaxes`].
    pub fn advance(&mut self, amaxes: &[f32]) {
        assert_eq!(amaxes.len(), self.num_amaxes());
        let len = self.scales.recipe.amax_history_len;
        for (history, amax) in self.history.chunks_exact_mut(len).zip(amaxes) {
            history.copy_within(..len - 1, 1);
            history[0] = *amax;
        }
        self.update_scales();
    }

    /// Returns the history of a layer and its shape, for a checkpoint: `[3, amax_history_len]` for input, weight and output gradient,
    /// newest step first, 0 if unknown.
    pub fn history(&self, layer: usize) -> (&[f32], [usize; 2]) {
        let len = self.scales.recipe.amax_history_len;
        (&self.history[layer * NUM_OPERANDS * len..][..NUM_OPERANDS * len], [NUM_OPERANDS, len])
    }

    /// Restores the history of a layer from a checkpoint. Steps beyond `amax_history_len` are dropped, oldest first. Returns `false` and
    /// changes nothing if `kept` is not a valid history of shape `shape`.
    #[must_use = "a history may be refused"]
    pub fn restore(&mut self, layer: usize, kept: &[f32], shape: &[usize]) -> bool {
        let is_amax = |amax: &f32| amax.is_finite() && *amax >= 0.0;
        let &[NUM_OPERANDS, kept_len] = shape else { return false };
        if NUM_OPERANDS.checked_mul(kept_len) != Some(kept.len())
            || kept_len == 0
            || !kept.iter().all(is_amax)
        {
            return false;
        }
        let len = self.scales.recipe.amax_history_len;
        let history = &mut self.history[layer * NUM_OPERANDS * len..][..NUM_OPERANDS * len];
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
