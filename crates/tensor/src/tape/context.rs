//! The context that forward and backward of an operation share.

use super::{
    AxisOps, ExpertAxis, OperationContext, PendingExchange, PendingMean, Randomness, ShadowedExperts,
};
use crate::cow_tensor::CowTensor;
use crate::device::{Device, Result};
use crate::fp8::Fp8Layer;
use crate::parameter_table::{ParameterId, ParameterSpan};
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::view::View;
use trireme_base::{Category, DType};

impl OperationContext<'_> {
    /// Returns the communication along the expert axis. Panics if the tape has no expert axis.
    pub(super) fn expert_axis_ops(&self) -> &dyn AxisOps {
        &*self.expert_axis().ops
    }

    /// Returns the experts that are replicated on all ranks of the expert axis. Panics like
    /// [`expert_axis_ops`](OperationContext::expert_axis_ops).
    pub(super) fn shadowed_experts(&self) -> &ShadowedExperts {
        &self.expert_axis().shadowed
    }

    fn expert_axis(&self) -> &ExpertAxis {
        self.tape.pass.axes.experts.as_ref().expect("only several ranks have different experts")
    }

    /// Stores a pending exchange of rows for the next operation that [takes](OperationContext::take_rows_in_flight) it.
    pub(super) fn store_rows_in_flight(&mut self, exchange: PendingExchange) {
        let other = self.tape.rows_in_flight.replace(exchange);
        assert!(other.is_none(), "one exchange of rows at a time is between operations");
    }

    /// Takes the pending exchange that an earlier operation has [stored](OperationContext::store_rows_in_flight).
    pub(super) fn take_rows_in_flight(&mut self) -> PendingExchange {
        self.tape.rows_in_flight.take().expect("an operation before has started an exchange of rows")
    }

    /// Returns the device of the tape.
    pub fn device(&self) -> &Device {
        &self.tape.device
    }

    /// Returns the precision of matmuls and activations.
    pub fn precision(&self) -> Precision {
        self.tape.pass.precision
    }

    /// Returns the key of the pass's random numbers.
    pub fn randomness(&self) -> Randomness {
        self.tape.pass.randomness
    }

    /// Returns the fp8 scales of a linear layer, if it computes in fp8. Amaxes are recorded only if the tape records.
    pub(crate) fn fp8_layer(&self, weight: ParameterId) -> Option<Fp8Layer<'_>> {
        self.tape.pass.fp8.as_deref()?.layer(weight, self.is_recording())
    }

    /// Returns whether the tape records, so that backward follows forward.
    pub fn is_recording(&self) -> bool {
        self.tape.recording == super::Recording::On
    }

    /// Returns parameters as stored: in f32, or rounded to 16 bits, depending on the layout. Only for kernels that round them to the
    /// precision, such as [`Device::matmul`]; others read [`parameter_in_f32`](OperationContext::parameter_in_f32).
    pub fn parameter(&self, span: &ParameterSpan) -> View<'_> {
        self.parameters.span(span)
    }

    /// Returns parameters in f32, rounded to the precision: the same values on every layout.
    ///
    /// # Errors
    /// If there is no memory for a copy.
    pub fn parameter_in_f32(&self, span: &ParameterSpan) -> Result<CowTensor<'_>> {
        CowTensor::rounded(&self.tape.device, self.tape.pass.precision, self.parameters.span(span))
    }

    /// Returns values in f32.
    ///
    /// # Errors
    /// If there is no memory for a copy.
    pub fn in_f32<'a>(&self, values: View<'a>) -> Result<CowTensor<'a>> {
        CowTensor::in_f32(&self.tape.device, values, Category::Activations)
    }

    /// Allocates memory for a result or for scratch, with unspecified contents.
    ///
    /// # Errors
    /// As [`Device::empty`].
    pub fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.tape.device.empty(shape.into(), dtype, Category::Activations)
    }

    /// Like [`empty`](OperationContext::empty), filled with zeros.
    ///
    /// # Errors
    /// As [`Device::empty`].
    pub fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.tape.device.zeros(shape.into(), dtype, Category::Activations)
    }

    /// Uploads one f64, such as a sum that the host has computed.
    ///
    /// # Errors
    /// As [`Device::empty`].
    pub fn scalar(&self, value: f64) -> Result<Tensor> {
        let mut scalar = self.empty([1], DType::F64)?;
        self.tape.device.upload(&[value], scalar.view_mut());
        Ok(scalar)
    }

    /// Sums the f32 elements of `values`, divided by `divisor`, and passes the sum and `num_rows` to
    /// [`add_loss`](OperationContext::add_loss).
    pub(super) fn add_sum_to_loss(&mut self, values: View<'_>, divisor: f64, num_rows: usize) -> Result<()> {
        let mut sum = self.empty([1], DType::F64)?;
        self.device().sum_elements(values, divisor, sum.view_mut());
        self.add_loss(sum, num_rows)
    }

    /// Adds `sum / num_rows`, times the term's weight, to the loss, or reports it as a [metric](super::Recorder::apply_metric). `sum` is
    /// one f64. For a loss, microbatches of equal size must have equal `num_rows`: each contributes the gradient of its own mean, so
    /// rows would otherwise have unequal weights. For a metric, `num_rows` may vary.
    ///
    /// # Errors
    /// If there is no memory for the weighted term.
    ///
    /// # Panics
    /// If `sum` is not one f64.
    pub fn add_loss(&mut self, sum: Tensor, num_rows: usize) -> Result<()> {
        assert_eq!((sum.dtype(), sum.shape()), (DType::F64, [1].into()), "a loss is one f64");
        let (weight, device) = (f64::from(self.loss_weight), &self.tape.device);
        match &mut self.tape.loss {
            Some(loss) => {
                let ratio = loss.num_rows as f64 / num_rows as f64;
                device.add_term(sum.view(), weight, Some(ratio), loss.sum.view_mut());
            }
            loss @ None if weight == 1.0 => *loss = Some(PendingMean { sum, num_rows }),
            loss @ None => {
                let mut weighted = device.activation_of([1], DType::F64)?;
                device.add_term(sum.view(), weight, None, weighted.view_mut());
                *loss = Some(PendingMean { sum: weighted, num_rows });
            }
        }
        Ok(())
    }
}
