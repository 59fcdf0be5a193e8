//! Launches of kernels.

use super::Cuda;
use super::api::call;
use super::error::CudaError;
use crate::kernels::backend::Stream;
use crate::kernels::{Activation, Operand, OperandMut};
use crate::shape::Shape;
use cudarc::driver::sys::CUstream;
use smallvec::SmallVec;
use trireme_base::{DType, RandomKey};

/// Number of threads of a block; `BLOCK` in `sources/common.cuh`.
pub(super) const BLOCK_THREADS: u32 = 256;

/// Number of threads of a warp; `WARP` in `sources/common.cuh`.
const WARP: u32 = 32;

/// Maximum number of blocks of kernels whose threads loop over elements: enough for any GPU.
const BLOCKS_MAX: u64 = 1 << 14;

/// Number of columns that a block sums at a time; `SUM_COLUMNS` in `sources/common.cuh`.
const SUM_COLUMNS: usize = 32;

/// Memory of an argument.
pub(super) type Words = SmallVec<[u64; 4]>;

/// Returns the dtype of unsigned integers with the size of a dtype, for kernels that only copy.
pub(super) fn word(dtype: DType) -> DType {
    match dtype.size() {
        1 => DType::U8,
        2 => DType::U16,
        4 => DType::U32,
        size => panic!("elements of {size} bytes"),
    }
}

/// Returns a word that holds two numbers of four bytes.
pub(super) fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// An argument of a kernel.
pub(super) trait Argument {
    /// Appends the bytes of the argument to memory that is aligned to eight bytes.
    fn append(&self, to: &mut Words) -> usize;
}

/// Implements [`Argument`] for numbers, through a number of eight bytes with the same bytes at its start.
macro_rules! number_arguments {
    ($($number:ty => |$value:ident| $bits:expr),* $(,)?) => {$(
        impl Argument for $number {
            fn append(&self, to: &mut Words) -> usize {
                let $value = *self;
                to.push($bits);
                size_of::<$number>()
            }
        }
    )*};
}

// Little-endian, as all hosts of GPUs are.
number_arguments! {
    u32 => |value| u64::from(value),
    u64 => |value| value,
    usize => |value| value as u64,
    f32 => |value| u64::from(value.to_bits()),
    f64 => |value| value.to_bits(),
    bool => |value| u64::from(value),
}

impl Argument for Operand {
    fn append(&self, to: &mut Words) -> usize {
        self.addresses().start.append(to)
    }
}

impl Argument for OperandMut {
    fn append(&self, to: &mut Words) -> usize {
        self.as_operand().append(to)
    }
}

/// An absent array is a null pointer.
impl<A: Argument> Argument for Option<A> {
    fn append(&self, to: &mut Words) -> usize {
        match self {
            Some(argument) => argument.append(to),
            None => 0_u64.append(to),
        }
    }
}

impl<A: Argument> Argument for &A {
    fn append(&self, to: &mut Words) -> usize {
        (**self).append(to)
    }
}

/// A struct of numbers of eight bytes.
impl<const N: usize> Argument for [usize; N] {
    fn append(&self, to: &mut Words) -> usize {
        self.iter().map(|number| number.append(to)).sum()
    }
}

impl Argument for RandomKey {
    fn append(&self, to: &mut Words) -> usize {
        let ([low, high], stream) = self.parts();
        pair(low, high).append(to) + stream.append(to)
    }
}

/// The enumeration of `sources/elementwise.cu`.
impl Argument for Activation {
    fn append(&self, to: &mut Words) -> usize {
        let index: u32 = match self {
            Activation::Gelu => 0,
            Activation::ExactGelu => 1,
            Activation::Silu => 2,
        };
        index.append(to)
    }
}

/// A launch that is being put together.
pub(super) struct Launch<'c> {
    cuda: &'c Cuda,
    stream: CUstream,
    name: String,
    /// Each argument, with its size in bytes.
    arguments: SmallVec<[(Words, usize); 12]>,
}

impl Cuda {
    /// Begins a launch of a kernel. The names of `dtypes` are appended to its name.
    pub(super) fn kernel(&self, name: &str, dtypes: &[DType]) -> Launch<'_> {
        let mut name = name.to_owned();
        for dtype in dtypes {
            name.push('_');
            name.push_str(dtype.name());
        }
        self.launch(name)
    }

    fn launch(&self, name: String) -> Launch<'_> {
        let stream = self.streams.handle(Stream::Compute);
        Launch { cuda: self, stream, name, arguments: SmallVec::new() }
    }

    /// Begins a launch of a kernel of a header, which is compiled when these parameters are first used.
    pub(super) fn instance(&self, header: &str, kernel: &str, parameters: &[&str]) -> Launch<'_> {
        let name = instance_name(kernel, parameters);
        self.issue(|| self.context.load_generated(&name, || instance_source(header, kernel, parameters)));
        self.launch(name)
    }
}

fn instance_name(kernel: &str, parameters: &[&str]) -> String {
    format!("{kernel}_{}", parameters.join("_"))
}

/// Returns the source of a kernel with parameters. The header defines it by a macro that has the kernel's name in capitals.
pub(super) fn instance_source(header: &str, kernel: &str, parameters: &[&str]) -> String {
    let (definition, name) = (kernel.to_uppercase(), instance_name(kernel, parameters));
    format!("#include \"{header}\"\n{definition}({name}, {})\n", parameters.join(", "))
}

/// Returns the number of blocks for a thread per element, up to [`BLOCKS_MAX`].
fn blocks_over(shape: Shape) -> u32 {
    (shape.num_elements() as u64).div_ceil(u64::from(BLOCK_THREADS)).min(BLOCKS_MAX) as u32
}

impl Launch<'_> {
    /// Launches on `stream` instead of the compute stream.
    pub(super) fn on(self, stream: CUstream) -> Self {
        Launch { stream, ..self }
    }

    pub(super) fn arg(mut self, argument: impl Argument) -> Self {
        let mut words = SmallVec::new();
        let num_bytes = argument.append(&mut words);
        self.arguments.push((words, num_bytes));
        self
    }

    /// Launches with a thread per element of a shape, or with threads that loop over elements. The number of elements is the last argument.
    pub(super) fn over_elements(self, shape: Shape) {
        self.arg(shape.num_elements()).run(blocks_over(shape));
    }

    /// Like [`over_elements`](Launch::over_elements), but returns an error instead of failing the device.
    pub(super) fn try_over_elements(self, shape: Shape) -> Result<(), CudaError> {
        let num_blocks = blocks_over(shape);
        let mut launch = self.arg(shape.num_elements());
        let launched = if num_blocks > 0 { launch.try_run(num_blocks) } else { Ok(()) };
        launched.map_err(|error| CudaError::Kernel { name: launch.name, source: Box::new(error) })
    }

    /// Launches with a block per row, or with blocks that loop over rows. The number of rows is the last argument.
    pub(super) fn over_rows(self, num_rows: usize) {
        self.arg(num_rows).run((num_rows as u64).min(BLOCKS_MAX) as u32);
    }

    /// Launches with a warp per item, or with warps that loop over items. The number of items is the last argument.
    pub(super) fn over_warps(self, num_items: usize) {
        let num_blocks = (num_items as u64).div_ceil(u64::from(BLOCK_THREADS / WARP));
        self.arg(num_items).run(num_blocks.min(BLOCKS_MAX) as u32);
    }

    /// Launches a kernel that sums columns. Their number is the last argument.
    pub(super) fn over_columns(self, num_cols: usize) {
        self.arg(num_cols).run((num_cols.div_ceil(SUM_COLUMNS) as u64).min(BLOCKS_MAX) as u32);
    }

    /// Launches `num_blocks` blocks, or nothing if there are none. If the launch fails, the device fails.
    pub(super) fn run(mut self, num_blocks: u32) {
        if num_blocks > 0
            && let Err(error) = self.try_run(num_blocks)
        {
            self.cuda.streams.fail(&CudaError::Kernel { name: self.name, source: Box::new(error) });
        }
    }

    fn try_run(&mut self, num_blocks: u32) -> Result<(), CudaError> {
        let context = &self.cuda.context;
        context.enter()?;
        let function = context.function(&self.name)?;
        let sizes: SmallVec<[usize; 12]> = self.arguments.iter().map(|(_, num_bytes)| *num_bytes).collect();
        assert_eq!(*sizes, *function.argument_bytes, "arguments of the kernel {}", self.name);
        let mut pointers: SmallVec<[_; 12]> =
            self.arguments.iter_mut().map(|(words, _)| words.as_mut_ptr().cast()).collect();
        let driver = &context.installation.driver;
        // SAFETY: as many arguments as the kernel has, of the same sizes. Operands are arrays of this device's
        // memory, which outlives the kernel (see `kernels::operand`).
        unsafe {
            call!(
                driver,
                cuLaunchKernel(
                    function.handle,
                    num_blocks,
                    1,
                    1,
                    BLOCK_THREADS,
                    1,
                    1,
                    0,
                    self.stream,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            )
        }
    }
}
