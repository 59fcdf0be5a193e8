//! Named tensors and other named values.

use crate::tokens::DOCUMENT_STARTS;
use smallvec::SmallVec;
use std::fmt;
use trireme_base::{ContextRank, DType, Positions};
use trireme_tensor::{Category, Device, DeviceError, Shape, Tensor};

/// A few named values in a fixed order, such as the outputs of a unit or the tensors of a microbatch.
///
/// Up to four values are stored without an allocation.
#[derive(Debug, Clone)]
pub struct Bundle<T>(SmallVec<[(&'static str, T); 4]>);

/// The tensors of a microbatch, such as token ids, images or labels, with its samples along dim 0.
pub type Batch = Bundle<Tensor>;

impl<T> Bundle<T> {
    /// Creates an empty bundle.
    pub fn new() -> Self {
        Bundle(SmallVec::new())
    }

    /// Appends a value.
    ///
    /// # Panics
    /// If the name is taken.
    pub fn push(&mut self, name: &'static str, value: T) {
        assert!(self.get(name).is_none(), "a bundle has one '{name}'");
        self.0.push((name, value));
    }

    /// Removes and returns the value of this name.
    pub fn take(&mut self, name: &str) -> Option<T> {
        let place = self.0.iter().position(|(own, _)| *own == name)?;
        Some(self.0.remove(place).1)
    }

    /// Returns the value of this name.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.0.iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }

    /// Returns all values with their names, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&'static str, &T)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }

    /// Returns mutable references to all values, in order.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(|(_, value)| value)
    }
}

impl Bundle<Tensor> {
    /// Returns the specs of the tensors, in order.
    pub fn specs(&self) -> impl Iterator<Item = TensorSpec> {
        self.iter().map(|(name, tensor)| TensorSpec::of(name, tensor))
    }
}

impl<T> Default for Bundle<T> {
    fn default() -> Self {
        Bundle::new()
    }
}

impl<T> IntoIterator for Bundle<T> {
    type Item = (&'static str, T);
    type IntoIter = smallvec::IntoIter<[(&'static str, T); 4]>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<T> FromIterator<(&'static str, T)> for Bundle<T> {
    fn from_iter<I: IntoIterator<Item = (&'static str, T)>>(values: I) -> Self {
        let mut bundle = Bundle::new();
        values.into_iter().for_each(|(name, value)| bundle.push(name, value));
        bundle
    }
}

/// Name, shape and dtype of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name of the tensor in a bundle.
    pub name: &'static str,
    /// Shape of the tensor.
    pub shape: Shape,
    /// Type of the elements.
    pub dtype: DType,
}

/// Formats dtype and shape, as in `f32 [4, 8]`.
impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl TensorSpec {
    /// Creates a spec.
    pub fn new(name: &'static str, dims: &[usize], dtype: DType) -> Self {
        TensorSpec { name, shape: Shape::new(dims), dtype }
    }

    /// Returns the spec of a tensor.
    pub fn of(name: &'static str, tensor: &Tensor) -> Self {
        TensorSpec { name, shape: tensor.shape(), dtype: tensor.dtype() }
    }

    /// Returns the spec of a batch of `num_samples` tensors of this spec, with a new dim 0.
    ///
    /// # Panics
    /// If the shape already has the maximum number of dims.
    pub fn in_batch(self, num_samples: usize) -> Self {
        let dims = [&[num_samples], self.shape.dims()].concat();
        TensorSpec { shape: Shape::new(&dims), ..self }
    }

    /// Returns the spec for `num_samples` instead of `before` samples along dim 0.
    pub fn with_samples(self, num_samples: usize, before: usize) -> Self {
        let rows = self.shape.dims()[0] / before * num_samples;
        TensorSpec { shape: self.shape.with_dim(0, rows), ..self }
    }

    /// Returns the number of positions of a batch tensor, which is dim 1. A tensor with one value per sample has none.
    pub fn num_positions(&self) -> Option<usize> {
        self.shape.dims().get(1).copied()
    }

    /// Returns the spec of the part of a batch tensor that a rank of the context axis holds: only the rank's positions along dim 1. A
    /// tensor without positions is not split.
    pub fn for_context_rank(self, context: ContextRank) -> Self {
        match self.positions(context) {
            None => self,
            Some(positions) => TensorSpec { shape: self.shape.with_dim(1, positions.len()), ..self },
        }
    }

    /// Returns the positions of the tensor that a rank of the context axis holds; `None` for all. For [`DOCUMENT_STARTS`], these are the
    /// positions of all ranks with the same place on the ring: after the all-to-all between these ranks, each of them computes attention
    /// for all of these positions.
    fn positions(&self, context: ContextRank) -> Option<Positions> {
        let len = self.num_positions().filter(|_| context != ContextRank::ALONE)?;
        Some(if self.name == DOCUMENT_STARTS { context.ring_positions(len) } else { context.positions(len) })
    }

    /// Returns whether the tensor can have a gradient. Integer tensors have none.
    pub fn has_grad(&self) -> bool {
        self.dtype.is_float()
    }

    /// Returns the size of all elements in bytes.
    pub fn num_bytes(&self) -> usize {
        self.shape.num_elements().saturating_mul(self.dtype.size())
    }

    /// Returns the number of 4-byte words that the elements take in a message.
    pub fn num_words(&self) -> usize {
        self.num_bytes().div_ceil(4)
    }
}

/// The tensors of a microbatch in host memory, where samples are written before they are copied to a device.
#[derive(Debug)]
pub struct HostBatch(Vec<(TensorSpec, Vec<StorageWord>)>);

/// Unit of storage, whose alignment suits all element types.
type StorageWord = u64;

impl HostBatch {
    /// Creates tensors of these specs, filled with zeros.
    pub fn new(specs: &[TensorSpec]) -> Self {
        let words = |spec: &TensorSpec| vec![0; spec.num_bytes().div_ceil(size_of::<StorageWord>())];
        HostBatch(specs.iter().map(|spec| (*spec, words(spec))).collect())
    }

    /// Returns the number of samples.
    pub fn num_samples(&self) -> usize {
        self.0.first().map_or(0, |(spec, _)| spec.shape.dims()[0])
    }

    /// Returns the bytes of one sample in the tensor of this name.
    ///
    /// # Panics
    /// If there is no such tensor, if its dtype differs, or if there is no such sample.
    pub fn sample_mut(&mut self, name: &str, sample: usize, dtype: DType) -> &mut [u8] {
        let tensor = self.0.iter_mut().find(|(spec, _)| spec.name == name);
        let (spec, words) = tensor.unwrap_or_else(|| panic!("a sample has no '{name}'"));
        assert_eq!(spec.dtype, dtype, "the type of '{name}'");
        let len = spec.num_bytes() / spec.shape.dims()[0];
        &mut bytemuck::cast_slice_mut(words)[sample * len..][..len]
    }

    /// Copies all tensors to a device.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    pub fn upload(&self, device: &Device) -> Result<Batch, DeviceError> {
        self.upload_positions(device, ContextRank::ALONE)
    }

    /// Copies to a device the part of each tensor that a rank of the context axis holds: the rank's positions along dim 1.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    pub fn upload_positions(&self, device: &Device, context: ContextRank) -> Result<Batch, DeviceError> {
        let tensor = |(spec, words): &(TensorSpec, Vec<StorageWord>)| {
            let bytes = &bytemuck::cast_slice::<_, u8>(words)[..spec.num_bytes()];
            let shape = spec.for_context_rank(context).shape;
            let mut tensor = device.empty(shape, spec.dtype, Category::Activations)?;
            let Some(positions) = spec.positions(context) else {
                device.upload(bytes, tensor.view_mut());
                return Ok((spec.name, tensor));
            };
            let num_samples = shape.dims()[0];
            let position_len: usize = shape.dims()[2..].iter().product();
            let position_bytes = position_len * spec.dtype.size();
            let sample_bytes = bytes.len() / num_samples;
            for (sample, bytes) in bytes.chunks_exact(sample_bytes).enumerate() {
                for (index, run) in positions.runs() {
                    let first = (sample * positions.len() + index) * position_len;
                    let part = tensor.view_mut().into_part(first, [run.len() * position_len].into());
                    device.upload(&bytes[run.start * position_bytes..run.end * position_bytes], part);
                }
            }
            Ok((spec.name, tensor))
        };
        self.0.iter().map(tensor).collect()
    }
}
