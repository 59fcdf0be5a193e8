//! The boundary between what is computed and the hardware that computes it.

mod attention;
mod blocks;
mod elementwise;
mod error;
mod layers;
mod optimizer;
mod quantized;
mod transfer;

pub(crate) use attention::AttentionViews;
pub use error::DeviceError;

use crate::fp8::Fp8Format;
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::{ALIGNMENT, Arena};
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::matmul::{Matrix, Product};
use crate::kernels::cpu::threads::ThreadPool;
use crate::kernels::{Activation, CpuFeatures, MatmulEpilogue, Unit};
use crate::memory::MemoryCounter;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use trireme_base::{Category, Cost, DType, Event, Journal, KernelCall, Traffic};

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
pub enum Transpose {
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
    cost: Arc<Mutex<Cost>>,
    journal: Arc<OnceLock<Journal>>,
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
        Device { cpu, arena, counter, cost: Arc::default(), journal: Arc::default() }
    }

    /// Whether this device [only counts](Device::counting): who fills its memory without a kernel must leave it alone.
    pub fn is_counting(&self) -> bool {
        self.cpu.threads.is_idle()
    }

    /// What the kernels have cost that this device has run since it was opened or since [`restart_cost`](Device::restart_cost), as
    /// their formulas say.
    pub fn cost(&self) -> Cost {
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the cost of kernels from zero.
    pub fn restart_cost(&self) {
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner) = Cost::ZERO;
    }

    /// Notes the kernels of this device and its [hosts](Device::host) from now on. A device keeps one journal; later ones are not
    /// kept.
    pub fn keep_journal(&self, journal: &Journal) {
        self.journal.get_or_init(|| journal.clone());
    }

    /// The journal that the device keeps.
    pub fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// Adds the cost of a kernel that begins, and notes it in the journal.
    fn count(&self, kernel: &'static str, cost: Cost) {
        if let Some(journal) = self.journal.get() {
            journal.note(Event::Kernel(KernelCall { kernel, cost }));
        }
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner) += cost;
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
        let journal = Arc::clone(&self.journal);
        Ok(Device { cpu, arena, counter, cost: Arc::default(), journal })
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
        self.zero(tensor.view_mut());
        Ok(tensor)
    }

    /// Sets all elements to 0.
    pub fn zero(&self, mut x: ViewMut<'_>) {
        self.count("zero", Cost::ZERO.writes(x.num_bytes()));
        if !self.is_counting() {
            x.zero();
        }
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
        self.count("convert", Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()));
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
        if x.dtype().is_float() {
            return self.convert(x, y);
        }
        self.count("copy", Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()));
        if !self.is_counting() {
            y.copy_from(x);
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
        self.count(
            "quantize_fp8",
            each(x.shape(), FP8_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes()),
        );
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
    /// If the shapes do not fit, if a factor is not of floats, or if what is added to is not f32.
    pub fn matmul(
        &self,
        precision: Precision,
        left: (View<'_>, Transpose),
        right: (View<'_>, Transpose),
        out: ViewMut<'_>,
        epilogue: MatmulEpilogue<'_>,
    ) -> Result<(), DeviceError> {
        let cost = Cost::products(&[2, out.shape().num_elements(), sides(&left).1]);
        let cost = cost.reads(left.0.num_bytes() + right.0.num_bytes());
        self.count(
            "matmul",
            match epilogue {
                MatmulEpilogue::Overwrite => cost.writes(out.num_bytes()),
                MatmulEpilogue::Accumulate => cost.updates(out.num_bytes()),
                MatmulEpilogue::Add { residual, .. } => {
                    cost.reads(residual.map_or(0, size_of_val)).writes(out.num_bytes())
                }
            },
        );
        self.uncounted_matmul(precision, left, right, out, epilogue)
    }

    /// As [`matmul`](Device::matmul), as a part of a kernel that counts its own cost.
    fn uncounted_matmul(
        &self,
        precision: Precision,
        left: (View<'_>, Transpose),
        right: (View<'_>, Transpose),
        mut out: ViewMut<'_>,
        epilogue: MatmulEpilogue<'_>,
    ) -> Result<(), DeviceError> {
        let ((rows, inner), (right_inner, cols)) = (sides(&left), sides(&right));
        let ((left, left_transpose), (right, right_transpose)) = (left, right);
        assert_eq!(inner, right_inner, "{:?} times {:?}", left.shape(), right.shape());
        let size = Product { rows, cols, inner };
        let factors = (matrix(&left, left_transpose), matrix(&right, right_transpose));
        let num_words = self.cpu.matmul_scratch(precision, size, factors.0);
        let mut scratch = self.activation_of([num_words], DType::U32)?;
        self.cpu.matmul(precision, size, factors, out.floats(), epilogue, scratch.view_mut().u32s());
        Ok(())
    }

    /// Sums the rows of `x` into `out`, one value a column.
    pub(crate) fn column_sums(&self, x: View<'_>, mut out: ViewMut<'_>, accumulate: bool) {
        self.count("column_sums", written(each(x.shape(), 1).reads(x.num_bytes()), &out, accumulate));
        with_element!(x.dtype() => |T| self.cpu.column_sums::<T>(x.elements(), out.f32s(), accumulate));
    }

    /// Sum of the squares of `x`, in f64: within leaves of `leaf_len` elements, and then of neighbouring leaves first.
    ///
    /// # Panics
    /// If there are more than [`LEAVES`](crate::LEAVES) leaves.
    pub fn sum_of_squares(&self, x: View<'_>, leaf_len: usize) -> f64 {
        self.count("sum_of_squares", each(x.shape(), 2).reads(x.num_bytes()));
        self.cpu.sum_of_squares(x.f32s(), leaf_len)
    }

    /// `y = activation(x)`.
    pub(crate) fn activate(&self, activation: Activation, x: View<'_>, mut y: ViewMut<'_>) {
        self.count(
            "activate",
            each(x.shape(), activation.num_operations()).reads(x.num_bytes()).writes(y.num_bytes()),
        );
        with_element!(x.dtype() => |T| self.cpu.activate::<T>(activation, x.elements(), y.elements()));
    }

    /// In place: `x` becomes `activation(x)`, and `dy` the gradient of `x`.
    pub(crate) fn activate_backward(&self, activation: Activation, mut x: ViewMut<'_>, mut dy: ViewMut<'_>) {
        let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
        self.count(
            "activate_backward",
            each(x.shape(), num_operations).updates(x.num_bytes()).updates(dy.num_bytes()),
        );
        with_element!(x.dtype() => |T| {
            self.cpu.activate_backward::<T>(activation, x.elements(), dy.elements());
        });
    }

    /// `y = activation(gate) * up` for rows `gate | up`.
    pub(crate) fn gate(&self, activation: Activation, gate_up: View<'_>, mut y: ViewMut<'_>) {
        let cols = y.shape().cols();
        let cost = each(y.shape(), activation.num_operations() + 1).reads(gate_up.num_bytes());
        self.count("gate", cost.writes(y.num_bytes()));
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
        let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
        self.count(
            "gate_backward",
            each(dy.shape(), num_operations).updates(gate_up.num_bytes()).updates(dy.num_bytes()),
        );
        with_element!(dy.dtype() => |T| {
            self.cpu.gate_backward::<T>(activation, gate_up.elements(), dy.elements(), cols);
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

/// Of an activation's derivative beside the activation, and of the products with it.
const DERIVATIVE_OPERATIONS: usize = 8;

/// Of a rounding to fp8: two products with the scale, limits, and the amax.
const FP8_OPERATIONS: usize = 6;

/// The cost of so many operations for each element.
fn each(shape: Shape, num_operations: usize) -> Cost {
    Cost::others(&[num_operations, shape.num_elements()])
}

/// The same, and `out` written or added to.
fn written(cost: Cost, out: &ViewMut<'_>, accumulate: bool) -> Cost {
    if accumulate { cost.updates(out.num_bytes()) } else { cost.writes(out.num_bytes()) }
}

fn num_threads(options: DeviceOptions) -> Result<usize, DeviceError> {
    match options.num_threads {
        0 => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
        num_threads if num_threads > Device::THREADS_MAX => Err(DeviceError::TooManyThreads { num_threads }),
        given => Ok(given),
    }
}

/// Rows and columns of a factor as a product reads it.
fn sides((view, transpose): &(View<'_>, Transpose)) -> (usize, usize) {
    let (rows, cols) = (view.shape().rows(), view.shape().cols());
    if *transpose == Transpose::Yes { (cols, rows) } else { (rows, cols) }
}

fn matrix<'a>(view: &View<'a>, transpose: Transpose) -> Matrix<'a> {
    Matrix::row_major(view.floats(), view.shape().cols(), transpose == Transpose::Yes)
}

#[cfg(test)]
mod tests;
