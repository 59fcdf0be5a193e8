//! Named tensors, and what stands for them.

use crate::tokens::DOCUMENT_STARTS;
use smallvec::SmallVec;
use std::fmt;
use trireme_base::{ContextPlace, DType, Positions};
use trireme_tensor::{Category, Device, DeviceError, Shape, Tensor};

/// A few named values in a fixed order: the tensors that units pass on, those of a microbatch, or what stands for them.
///
/// Up to four are held without an allocation.
#[derive(Debug, Clone)]
pub struct Bundle<T>(SmallVec<[(&'static str, T); 4]>);

/// The tensors of a microbatch, such as token ids, images or labels, with its samples along dim 0.
pub type Batch = Bundle<Tensor>;

impl<T> Bundle<T> {
    /// Nothing.
    pub fn new() -> Self {
        Bundle(SmallVec::new())
    }

    /// Appends a value.
    ///
    /// # Panics
    /// If its name is taken.
    pub fn push(&mut self, name: &'static str, value: T) {
        assert!(self.get(name).is_none(), "a bundle has one '{name}'");
        self.0.push((name, value));
    }

    /// Takes the value of this name out.
    pub fn take(&mut self, name: &str) -> Option<T> {
        let place = self.0.iter().position(|(own, _)| *own == name)?;
        Some(self.0.remove(place).1)
    }

    /// The value of this name.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.0.iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }

    /// All values with their names, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&'static str, &T)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }

    /// All values, to change, in order.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(|(_, value)| value)
    }
}

impl Bundle<Tensor> {
    /// The specs of the tensors, in order.
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

/// What is known of a tensor before it exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in a bundle.
    pub name: &'static str,
    /// Its shape.
    pub shape: Shape,
    /// Type of its elements.
    pub dtype: DType,
}

/// Type and shape, as in `f32 [4, 8]`.
impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl TensorSpec {
    /// A tensor of this name, shape and type.
    pub fn new(name: &'static str, dims: &[usize], dtype: DType) -> Self {
        TensorSpec { name, shape: Shape::new(dims), dtype }
    }

    /// The spec of a tensor.
    pub fn of(name: &'static str, tensor: &Tensor) -> Self {
        TensorSpec { name, shape: tensor.shape(), dtype: tensor.dtype() }
    }

    /// The spec of a batch of so many of these: with one more dim before the others.
    ///
    /// # Panics
    /// If there are as many dims as a shape can have.
    pub fn in_batch(self, num_samples: usize) -> Self {
        let dims = [&[num_samples], self.shape.dims()].concat();
        TensorSpec { shape: Shape::new(&dims), ..self }
    }

    /// The spec for `num_samples` instead of `before` samples along dim 0.
    pub fn with_samples(self, num_samples: usize, before: usize) -> Self {
        let rows = self.shape.dims()[0] / before * num_samples;
        TensorSpec { shape: self.shape.with_dim(0, rows), ..self }
    }

    /// The positions of a tensor of a batch: dim 1. One number a sample has none.
    pub fn num_positions(&self) -> Option<usize> {
        self.shape.dims().get(1).copied()
    }

    /// The spec of what one of the ranks of the context axis has of a tensor of a batch: some of the positions, or all of what has none.
    pub fn of_positions(self, context: ContextPlace) -> Self {
        match self.positions(context) {
            None => self,
            Some(positions) => TensorSpec { shape: self.shape.with_dim(1, positions.len()), ..self },
        }
    }

    /// The positions that a rank of the context axis has of a tensor: its own, or its heads' of document starts; `None` for all.
    fn positions(&self, context: ContextPlace) -> Option<Positions> {
        let len = self.num_positions().filter(|_| context != ContextPlace::ALONE)?;
        Some(if self.name == DOCUMENT_STARTS {
            context.positions_of_heads(len)
        } else {
            context.positions(len)
        })
    }

    /// Whether the tensor has a gradient: those of whole numbers have none.
    pub fn has_grad(&self) -> bool {
        self.dtype.is_float()
    }

    /// Bytes of its elements.
    pub fn num_bytes(&self) -> usize {
        self.shape.num_elements().saturating_mul(self.dtype.size())
    }

    /// Words of 4 bytes that its elements take in a message.
    pub fn num_words(&self) -> usize {
        self.num_bytes().div_ceil(4)
    }
}

/// The tensors of a microbatch in memory of the host, where samples are written before they go to a device.
#[derive(Debug)]
pub struct HostBatch(Vec<(TensorSpec, Vec<Word>)>);

/// What elements of all types are aligned to.
type Word = u64;

impl HostBatch {
    /// Zeros for these tensors.
    pub fn new(specs: &[TensorSpec]) -> Self {
        let words = |spec: &TensorSpec| vec![0; spec.num_bytes().div_ceil(size_of::<Word>())];
        HostBatch(specs.iter().map(|spec| (*spec, words(spec))).collect())
    }

    /// Number of samples.
    pub fn num_samples(&self) -> usize {
        self.0.first().map_or(0, |(spec, _)| spec.shape.dims()[0])
    }

    /// The bytes of a sample's elements of the tensor of this name.
    ///
    /// # Panics
    /// If there is no such tensor, it has another type, or it has no such sample.
    pub fn sample_mut(&mut self, name: &str, sample: usize, dtype: DType) -> &mut [u8] {
        let tensor = self.0.iter_mut().find(|(spec, _)| spec.name == name);
        let (spec, words) = tensor.unwrap_or_else(|| panic!("a sample has no '{name}'"));
        assert_eq!(spec.dtype, dtype, "the type of '{name}'");
        let len = spec.num_bytes() / spec.shape.dims()[0];
        &mut bytemuck::cast_slice_mut(words)[sample * len..][..len]
    }

    /// Copies all to a device, as [`upload_positions`](HostBatch::upload_positions) does.
    pub fn upload(&self, device: &Device) -> Result<Batch, DeviceError> {
        self.upload_positions(device, ContextPlace::ALONE)
    }

    /// Copies to a device what one of the ranks of the context axis has: its positions, dim 1 of each tensor.
    ///
    /// # Errors
    /// If it has no memory for them.
    pub fn upload_positions(&self, device: &Device, context: ContextPlace) -> Result<Batch, DeviceError> {
        let tensor = |(spec, words): &(TensorSpec, Vec<Word>)| {
            let bytes = &bytemuck::cast_slice::<_, u8>(words)[..spec.num_bytes()];
            let shape = spec.of_positions(context).shape;
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
