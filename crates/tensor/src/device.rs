//! The boundary between what is computed and the hardware that computes it.

mod attention;
mod blocks;
mod elementwise;
mod error;
mod optimizer;
mod quantized;

pub(crate) use attention::AttentionViews;
pub use error::DeviceError;

use crate::fp8::Fp8Format;
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::{ALIGNMENT, Arena};
use crate::kernels::cpu::cross_entropy::VocabularyChunk;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::embedding::Bags;
use crate::kernels::cpu::matmul::{Matrix, Product};
use crate::kernels::cpu::norm::{NormKind, Normalised};
use crate::kernels::cpu::threads::ThreadPool;
use crate::kernels::{Activation, CpuFeatures, MatmulEpilogue, Traffic, Unit};
use crate::memory::MemoryCounter;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use trireme_base::{Category, DType};

/// How to open a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceOptions {
    /// Threads that kernels may use, the calling one included; 0 means one for each core.
    pub num_threads: usize,
    /// Use no higher SIMD level than this; `None` means the highest that the machine has.
    pub features_max: Option<CpuFeatures>,
    /// Bytes that may be in use at a time, of all categories together; `None` for as many as the machine has.
    pub budget: Option<usize>,
}

/// Whether a factor of a product is read transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transpose {
    /// As it lies in memory.
    No,
    /// Rows and columns exchanged.
    Yes,
}

/// Hardware that owns memory and runs kernels; cheap to clone.
///
/// Kernels run to their end before a call returns, and give the same bits for any number of threads.
#[derive(Debug, Clone)]
pub struct Device {
    cpu: Arc<Cpu>,
    arena: Arc<Arena>,
    counter: Arc<MemoryCounter>,
    num_operations: Arc<AtomicU64>,
}

impl Device {
    /// Sizes of memory are rounded up to a multiple of so many bytes.
    pub const ALIGNMENT: usize = ALIGNMENT;

    /// Threads that a device may have at most; more are refused before any is started.
    pub const THREADS_MAX: usize = 1 << 12;

    /// The CPU, with threads of its own.
    pub fn cpu(options: DeviceOptions) -> Result<Self, DeviceError> {
        let num_threads = num_threads(options)?;
        let threads =
            ThreadPool::new(num_threads).map_err(|source| DeviceError::Threads { num_threads, source })?;
        let counter = Arc::new(MemoryCounter::new(options.budget));
        let arena = Arena::reserve(Arc::clone(&counter)).map_err(DeviceError::Reserve)?;
        Ok(Self::new(threads, options, arena, counter))
    }

    /// A device that counts what [`Device::cpu`] with these options would take and compute, and does neither: its memory is
    /// never touched, and its kernels check their arguments and end. What runs on it tells its own size.
    pub fn counting(options: DeviceOptions) -> Result<Self, DeviceError> {
        let threads = ThreadPool::idle(num_threads(options)?);
        let counter = Arc::new(MemoryCounter::new(options.budget));
        let arena = Arena::counting(Arc::clone(&counter));
        Ok(Self::new(threads, options, arena.map_err(DeviceError::Reserve)?, counter))
    }

    fn new(threads: ThreadPool, options: DeviceOptions, arena: Arena, counter: Arc<MemoryCounter>) -> Self {
        let detected = CpuFeatures::detect();
        let features = options.features_max.map_or(detected, |most| most.min(detected));
        let (cpu, arena) = (Arc::new(Cpu { threads, features }), Arc::new(arena));
        Device { cpu, arena, counter, num_operations: Arc::default() }
    }

    /// Whether this device only counts: who fills its memory without a kernel must leave it alone.
    pub(crate) fn is_counting(&self) -> bool {
        self.cpu.threads.is_idle()
    }

    /// Floating-point operations so far of matrix multiplications, attention, normalisations, functions of elements, sums and
    /// softmax, as their formulas count them; `u64::MAX` if there are more.
    pub fn num_operations(&self) -> u64 {
        self.num_operations.load(Ordering::Relaxed)
    }

    /// Counts as many operations as the product of `factors`.
    fn count_operations(&self, factors: &[usize]) {
        let more = factors.iter().fold(1_u64, |product, &factor| product.saturating_mul(factor as u64));
        let add = |sum: u64| Some(sum.saturating_add(more));
        self.num_operations
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
            .expect("the closure always returns a sum");
    }

    /// The host beside this device: memory of its own, counted apart, and the processor that works in it. On the CPU that is
    /// the same one.
    ///
    /// # Errors
    /// If its memory cannot be reserved.
    pub fn host(&self) -> Result<Device, DeviceError> {
        let counter = Arc::new(MemoryCounter::new(None));
        let arena = match self.is_counting() {
            true => Arena::counting(Arc::clone(&counter)),
            false => Arena::reserve(Arc::clone(&counter)),
        };
        let (cpu, arena) = (Arc::clone(&self.cpu), Arc::new(arena.map_err(DeviceError::Reserve)?));
        Ok(Device { cpu, arena, counter, num_operations: Arc::default() })
    }

    /// Gives memory that is not in use back to the system, after something that took much of it for once.
    pub fn trim(&self) {
        self.arena.trim();
    }

    /// Threads that kernels use.
    pub fn num_threads(&self) -> usize {
        self.cpu.threads.num_threads()
    }

    /// The SIMD level that kernels use.
    pub fn cpu_features(&self) -> CpuFeatures {
        self.cpu.features
    }

    /// Bytes in use, by category.
    pub fn memory(&self) -> &MemoryCounter {
        &self.counter
    }

    /// Refuses what can never fit, before any of it is taken: `num_bytes` for `category`, if that is more than all the
    /// memory of the device.
    pub fn check_room(&self, num_bytes: usize, category: Category) -> Result<(), DeviceError> {
        Ok(self.arena.check_room(num_bytes, category)?)
    }

    /// A tensor with unspecified contents.
    ///
    /// # Errors
    /// If its size cannot be addressed, or there is no memory for it.
    pub fn empty(&self, shape: Shape, dtype: DType, category: Category) -> Result<Tensor, DeviceError> {
        let num_bytes =
            shape.num_bytes(dtype).ok_or(DeviceError::Unaddressable { shape, dtype, category })?;
        let block = self.arena.take(num_bytes, category)?;
        Ok(Tensor::new(block, shape, dtype))
    }

    /// A tensor of zeros.
    pub fn zeros(&self, shape: Shape, dtype: DType, category: Category) -> Result<Tensor, DeviceError> {
        let mut tensor = self.empty(shape, dtype, category)?;
        if !self.is_counting() {
            tensor.view_mut().zero();
        }
        Ok(tensor)
    }

    /// An f32 tensor for activations, with unspecified contents.
    pub(crate) fn activation(&self, shape: impl Into<Shape>) -> Result<Tensor, DeviceError> {
        self.activation_of(shape, DType::F32)
    }

    /// A tensor for activations, with unspecified contents.
    pub(crate) fn activation_of(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor, DeviceError> {
        self.empty(shape.into(), dtype, Category::Activations)
    }

    /// `y = x`, elementwise, from any of f32, bf16 and f16 to any, rounded to nearest even.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn convert(&self, x: View<'_>, mut y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
            self.cpu.convert::<X, Y>(x.elements(), y.elements());
        }));
    }

    /// `y = x`, element by element, of one type.
    ///
    /// # Panics
    /// If the shapes or the types differ.
    pub fn copy(&self, x: View<'_>, mut y: ViewMut<'_>) {
        assert_eq!(x.dtype(), y.dtype());
        match x.dtype() {
            DType::F32 | DType::Bf16 | DType::F16 => self.convert(x, y),
            _ if self.is_counting() => (),
            _ => y.copy_from(x),
        }
    }

    /// `y = fp8(x * 2^scale_exponent) / 2^scale_exponent`, elementwise, rounded to nearest even and saturated; `y` is bf16.
    /// Returns the largest finite `|x|`.
    ///
    /// # Panics
    /// If the shapes differ.
    pub(crate) fn quantize_fp8(
        &self,
        x: View<'_>,
        format: Fp8Format,
        scale_exponent: i32,
        mut y: ViewMut<'_>,
    ) -> f32 {
        assert_eq!(x.shape(), y.shape());
        with_element!(x.dtype() => |T| {
            self.cpu.quantize_fp8::<T>(x.elements(), y.elements(), format, scale_exponent)
        })
    }

    /// `out = op(left) op(right) + epilogue` for matrices, with factors rounded to `precision` and sums in f32; `out` is
    /// `rows x cols`.
    ///
    /// Cost: `2 rows cols inner` floating-point operations.
    ///
    /// # Errors
    /// If there is no memory to pack the right factor.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub(crate) fn matmul(
        &self,
        precision: Precision,
        (left, left_transpose): (View<'_>, Transpose),
        (right, right_transpose): (View<'_>, Transpose),
        mut out: ViewMut<'_>,
        epilogue: MatmulEpilogue<'_>,
    ) -> Result<(), DeviceError> {
        let sizes = |view: &View<'_>, transpose| match transpose {
            Transpose::No => (view.shape().rows(), view.shape().cols()),
            Transpose::Yes => (view.shape().cols(), view.shape().rows()),
        };
        let ((rows, inner), (right_inner, cols)) =
            (sizes(&left, left_transpose), sizes(&right, right_transpose));
        assert_eq!(inner, right_inner, "{:?} times {:?}", left.shape(), right.shape());
        let size = Product { rows, cols, inner };
        self.count_operations(&[2, rows, cols, inner]);
        let factors = (matrix(&left, left_transpose), matrix(&right, right_transpose));
        let num_words = self.cpu.matmul_scratch(precision, size, factors.0);
        let mut scratch = self.activation_of([num_words], DType::U32)?;
        self.cpu.matmul(precision, size, factors, out.floats(), epilogue, scratch.view_mut().u32s());
        Ok(())
    }

    /// Sums the rows of `x` into `out`, one value a column.
    pub(crate) fn column_sums(&self, x: View<'_>, mut out: ViewMut<'_>, accumulate: bool) {
        with_element!(x.dtype() => |T| self.cpu.column_sums::<T>(x.elements(), out.f32s(), accumulate));
    }

    /// Sum of the squares of `x`, in f64: within leaves of `leaf_len` elements, and then of neighbouring leaves first.
    ///
    /// # Panics
    /// If there are more than [`LEAVES`](crate::LEAVES) leaves.
    pub fn sum_of_squares(&self, x: View<'_>, leaf_len: usize) -> f64 {
        self.cpu.sum_of_squares(x.f32s(), leaf_len)
    }

    /// `y = activation(x)`.
    pub(crate) fn activate(&self, activation: Activation, x: View<'_>, mut y: ViewMut<'_>) {
        with_element!(x.dtype() => |T| self.cpu.activate::<T>(activation, x.elements(), y.elements()));
    }

    /// In place: `x` becomes `activation(x)`, and `dy` the gradient of `x`.
    pub(crate) fn activate_backward(&self, activation: Activation, mut x: ViewMut<'_>, mut dy: ViewMut<'_>) {
        with_element!(x.dtype() => |T| {
            self.cpu.activate_backward::<T>(activation, x.elements(), dy.elements());
        });
    }

    /// `y = activation(gate) * up` for rows `gate | up`.
    pub(crate) fn gate(&self, activation: Activation, gate_up: View<'_>, mut y: ViewMut<'_>) {
        let cols = y.shape().cols();
        with_element!(y.dtype() => |T| {
            self.cpu.gate::<T>(activation, gate_up.elements(), y.elements(), cols);
        });
    }

    /// In place: `gate_up` becomes its gradient, and `dy` the output.
    pub(crate) fn gate_backward(
        &self,
        activation: Activation,
        mut gate_up: ViewMut<'_>,
        mut dy: ViewMut<'_>,
    ) {
        let cols = dy.shape().cols();
        with_element!(dy.dtype() => |T| {
            self.cpu.gate_backward::<T>(activation, gate_up.elements(), dy.elements(), cols);
        });
    }

    /// Normalises each row of `x`; `statistics` is `rows x 2`.
    pub(crate) fn norm(
        &self,
        x: View<'_>,
        weight: View<'_>,
        bias: Option<View<'_>>,
        kind: NormKind,
        mut y: ViewMut<'_>,
        mut statistics: ViewMut<'_>,
    ) {
        let bias = bias.map(|bias| bias.f32s());
        self.count_operations(&[NORM_OPERATIONS, x.shape().num_elements()]);
        with_element!(y.dtype() => |T| {
            self.cpu.norm::<T>(x.f32s(), weight.f32s(), bias, kind, y.elements(), statistics.f32s());
        });
    }

    /// Gradient of [`Device::norm`] with respect to `x`, written or added.
    pub(crate) fn norm_backward_input(
        &self,
        (x, weight, statistics): (View<'_>, View<'_>, View<'_>),
        kind: NormKind,
        dy: View<'_>,
        mut dx: ViewMut<'_>,
        accumulate: bool,
    ) {
        let rows = Normalised { x: x.f32s(), weight: weight.f32s(), statistics: statistics.f32s(), kind };
        with_element!(dy.dtype() => |T| {
            self.cpu.norm_backward_input::<T>(rows, dy.elements(), dx.f32s(), accumulate);
        });
    }

    /// Gradient of [`Device::norm`] with respect to the weight, written or added.
    pub(crate) fn norm_backward_weight(
        &self,
        x: View<'_>,
        dy: View<'_>,
        statistics: View<'_>,
        mut d_weight: ViewMut<'_>,
        accumulate: bool,
    ) {
        let (x, statistics, d_weight) = (x.f32s(), statistics.f32s(), d_weight.f32s());
        with_element!(dy.dtype() => |T| {
            self.cpu.norm_backward_weight::<T>(x, dy.elements(), statistics, d_weight, accumulate);
        });
    }

    /// `y = x` rounded to `precision`, in f32.
    ///
    /// # Panics
    /// If the shapes differ.
    pub(crate) fn round(&self, precision: Precision, x: View<'_>, mut y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        with_element!(x.dtype() => |T| with_element!(precision.dtype() => |P| {
            self.cpu.round::<T, P>(x.elements(), y.f32s());
        }));
    }

    /// `out[i] = table[ids[i]] + positions[first_position + i % seq_len]`, of values rounded to `precision`.
    pub(crate) fn embedding(
        &self,
        precision: Precision,
        ids: View<'_>,
        table: View<'_>,
        positions: Option<View<'_>>,
        (seq_len, first_position): (usize, usize),
        mut out: ViewMut<'_>,
    ) {
        with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
            let positions = positions.map(|positions| positions.elements());
            let (ids, table, at) = (ids.u32s(), table.elements(), (seq_len, first_position));
            self.cpu.embedding::<T, P>(ids, table, positions, at, out.f32s());
        }));
    }

    /// Sums of rows of a table, rounded to `precision`, by bags of ids.
    pub(crate) fn embedding_bag(
        &self,
        precision: Precision,
        bags: Bags<'_>,
        table: View<'_>,
        mut out: ViewMut<'_>,
    ) {
        let cols = out.shape().cols();
        with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
            self.cpu.embedding_bag::<T, P>(bags, table.elements(), cols, out.f32s());
        }));
    }

    /// Adds to the gradient of the table of [`Device::embedding_bag`].
    pub(crate) fn embedding_bag_backward(&self, bags: Bags<'_>, dy: View<'_>, mut d_table: ViewMut<'_>) {
        self.cpu.embedding_bag_backward(bags, dy.f32s(), dy.shape().cols(), d_table.f32s());
    }

    /// `d_table[ids[i]] += dy[i]`.
    pub(crate) fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, d_table: ViewMut<'_>) {
        self.embedding_bag_backward(Bags::of_single_ids(ids.u32s()), dy, d_table);
    }

    /// `d_positions[t] += sum over sequences of dy[sequence, t]`.
    pub(crate) fn position_backward(&self, dy: View<'_>, seq_len: usize, mut d_positions: ViewMut<'_>) {
        self.cpu.position_backward(dy.f32s(), seq_len, dy.shape().cols(), d_positions.f32s());
    }

    /// Takes a chunk of logits into the `statistics` of their rows, `rows x 3`.
    pub(crate) fn softmax_statistics(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        mut statistics: ViewMut<'_>,
    ) {
        self.cpu.softmax_statistics(logits.f32s(), targets.u32s(), chunk, statistics.f32s());
    }

    /// Gradient of the rows' losses with respect to a chunk of logits, for the statistics of all chunks.
    pub(crate) fn cross_entropy_gradient(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        statistics: View<'_>,
        scale: f32,
        mut gradient: ViewMut<'_>,
    ) {
        let (logits, targets, statistics) = (logits.f32s(), targets.u32s(), statistics.f32s());
        with_element!(gradient.dtype() => |T| {
            self.cpu.cross_entropy_gradient::<T>(logits, targets, chunk, statistics, scale, gradient.elements());
        });
    }

    /// Lets a unit of every thread do nothing but its operation; returns how many floating-point operations that were.
    pub(crate) fn run_unit(&self, unit: Unit, rounds: u64) -> u64 {
        self.cpu.run_unit(unit, rounds)
    }

    /// Goes through memory and computes next to nothing.
    pub(crate) fn stream(&self, traffic: Traffic, mut memory: ViewMut<'_>) {
        self.cpu.stream(traffic, memory.u32s());
    }
}

/// Of a normalisation for each element: two sums, a difference, a product with the weight, and a bias.
const NORM_OPERATIONS: usize = 8;

fn num_threads(options: DeviceOptions) -> Result<usize, DeviceError> {
    match options.num_threads {
        0 => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
        num_threads if num_threads > Device::THREADS_MAX => Err(DeviceError::TooManyThreads { num_threads }),
        given => Ok(given),
    }
}

fn matrix<'a>(view: &View<'a>, transpose: Transpose) -> Matrix<'a> {
    Matrix::row_major(view.floats(), view.shape().cols(), transpose == Transpose::Yes)
}

#[cfg(test)]
mod tests;
