//! Launches of kernels.

use super::Cuda;
use super::error::CudaError;
pub(super) use super::job::{BLOCK_THREADS, Words};
use super::job::{Job, KernelLaunch};
use crate::kernels::{Activation, Operand, OperandMut};
use crate::shape::Shape;
use cudarc::driver::sys::CUstream;
use smallvec::SmallVec;
use trireme_base::{DType, RandomKey};

/// Number of threads of a warp; `WARP` in `sources/common.cuh`.
const WARP: u32 = 32;

/// Maximum number of blocks of kernels whose threads loop over elements: enough for any GPU.
const BLOCKS_MAX: u64 = 1 << 14;

/// Number of columns that a block sums at a time; `SUM_COLUMNS` in `sources/common.cuh`.
const SUM_COLUMNS: usize = 32;

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
    /// Whether the argument differs from step to step, so that a graph with the launch would not repeat. Only speed depends on it.
    const CHANGES: bool = false;

    /// Appends the bytes of the argument, filled up to whole words. Returns their number.
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
    const CHANGES: bool = A::CHANGES;

    fn append(&self, to: &mut Words) -> usize {
        match self {
            Some(argument) => argument.append(to),
            None => 0_u64.append(to),
        }
    }
}

impl<A: Argument> Argument for &A {
    const CHANGES: bool = A::CHANGES;

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
    const CHANGES: bool = true;

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
    launch: KernelLaunch,
    /// Whether some argument differs from step to step.
    changes: bool,
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
        let launch = KernelLaunch { name, num_blocks: 0, words: Words::new(), sizes: SmallVec::new() };
        Launch { cuda: self, launch, changes: false }
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
    pub(super) fn arg<A: Argument>(mut self, argument: A) -> Self {
        let KernelLaunch { words, sizes, .. } = &mut self.launch;
        let first = words.len();
        let num_bytes = argument.append(words);
        assert_eq!(words.len() - first, num_bytes.div_ceil(size_of::<u64>()), "an argument fills its words");
        sizes.push(num_bytes as u32);
        self.changes |= A::CHANGES;
        self
    }

    /// Says that some argument differs from step to step.
    pub(super) fn changing(self) -> Self {
        Launch { changes: true, ..self }
    }

    /// Launches with a thread per element of a shape, or with threads that loop over elements. The number of elements is the last argument.
    pub(super) fn over_elements(self, shape: Shape) {
        self.arg(shape.num_elements()).run(blocks_over(shape));
    }

    /// Like [`over_elements`](Launch::over_elements), on another stream than that of kernels. Returns an error instead of failing the
    /// device.
    pub(super) fn over_elements_on(self, stream: CUstream, shape: Shape) -> Result<(), CudaError> {
        let Launch { cuda, mut launch, .. } = self.arg(shape.num_elements());
        launch.num_blocks = blocks_over(shape);
        cuda.context.enter()?;
        if launch.num_blocks > 0 { launch.issue(&cuda.context, stream) } else { Ok(()) }
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
    pub(super) fn run(self, num_blocks: u32) {
        let Launch { cuda, mut launch, changes } = self;
        if num_blocks == 0 {
            return;
        }
        launch.num_blocks = num_blocks;
        let job = Job::Kernel(launch);
        if changes { cuda.issue(|| cuda.jobs.issue_alone(&job, &cuda.blas)) } else { cuda.queue(job) }
    }
}
