//! Kernels for the CPU. They compute in f32; activations and matmul operands may be stored in 16 bits.
//!
//! Results do not depend on the number of threads: the shape alone determines how work is split into tasks, and only exact sums are split
//! between tasks. Outside of matmuls, results do not depend on the SIMD level either: sums run in sixteen lanes at any register width.
//!
//! The method of [`Device`](crate::Device) with the name of a kernel documents the kernel.

pub(crate) mod activation;
pub(crate) mod arena;
pub(crate) mod attention;
pub(crate) mod blocks;
mod blocks_in_use;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod element;
mod elementwise;
pub(crate) mod embedding;
pub(crate) mod exact_sum;
pub(crate) mod experts;
pub(crate) mod expression;
pub(crate) mod fp8;
mod free_list;
mod mapping;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod peak;
pub(crate) mod quantized;
pub(crate) mod reduce;
mod run;
pub(crate) mod simd;
mod softmax;
#[cfg(test)]
pub(crate) mod test_support;
pub(crate) mod threads;

use mapping::Mapping;
use simd::SimdLevel;
use std::sync::Arc;
use threads::ThreadPool;

/// The processor that kernels run on: threads and SIMD level. Required to turn [operands](crate::kernels::Operand) into slices.
#[derive(Debug)]
pub(crate) struct Cpu {
    pub(crate) threads: ThreadPool,
    pub(crate) simd_level: SimdLevel,
    /// The only memory that this processor can access, and its addresses; `None` if it can access all memory at the host's addresses.
    mapping: Option<Arc<Mapping>>,
}

impl Cpu {
    /// Creates a processor that can access all memory.
    pub(crate) fn new(threads: ThreadPool, simd_level: SimdLevel) -> Self {
        Cpu { threads, simd_level, mapping: None }
    }

    /// Restricts the processor to the memory of `mapping`.
    pub(crate) fn within(self, mapping: Arc<Mapping>) -> Self {
        Cpu { mapping: Some(mapping), ..self }
    }

    /// Returns the only memory that this processor can access; `None` if it can access all memory at the host's addresses.
    pub(crate) fn mapping(&self) -> Option<&Mapping> {
        self.mapping.as_deref()
    }
}

/// A mutable slice that the tasks of one kernel share.
///
/// Sound only while no two tasks access the same element; every use states why that holds.
#[derive(Clone, Copy)]
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: elements are accessed only through `range`, whose callers ensure that tasks do not overlap.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len(), lifetime: std::marker::PhantomData }
    }

    /// Returns the elements `start..start + len`.
    ///
    /// # Safety
    /// No other live reference covers these elements.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "{start}+{len} of {}", self.len);
        // SAFETY: in bounds by the line above; not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.start
    }
}

/// Maximum number of consecutive f32 roundings in a kernel, apart from its sums: at most a dozen operations, among them an exponential with
/// an error of five roundings.
const NUM_ROUNDINGS: f64 = 16.0;

/// Returns a first-order bound on a kernel's f32 rounding error, relative to the magnitudes of its terms, for sums of up to `num_terms`.
/// Sums have [`simd::LANES`] lanes. Sums of matmuls have one lane, but their errors partly cancel.
pub(crate) fn f32_error(num_terms: usize) -> f64 {
    (NUM_ROUNDINGS + num_terms as f64 / simd::LANES as f64) * 2.0_f64.powi(-24)
}

/// Number of elements per task of an elementwise kernel: large enough to amortize the hand-over between threads (about a microsecond),
/// small enough to balance the load.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Returns the number of rows per task for rows of `cols` elements.
pub(crate) fn rows_per_task(cols: usize) -> usize {
    (TASK_ELEMENTS / cols.max(1)).max(1)
}

impl Cpu {
    /// Runs `task(first_row, num_rows)` over blocks of rows whose size depends only on the shape.
    pub(crate) fn for_row_blocks(&self, rows: usize, cols: usize, task: impl Fn(usize, usize) + Sync) {
        let block = rows_per_task(cols);
        self.threads.run(rows.div_ceil(block), &|index| {
            let first = index * block;
            task(first, block.min(rows - first));
        });
    }

    /// Runs `task(first, elements)` over chunks of `len` elements of `out`; the last one may be shorter.
    pub(crate) fn for_each_chunk<T: Send>(
        &self,
        out: &mut [T],
        len: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let num_elements = out.len();
        let out = SharedSlice::new(out);
        self.threads.run(num_elements.div_ceil(len), &|index| {
            let first = index * len;
            // SAFETY: chunks do not overlap.
            task(first, unsafe { out.range(first, len.min(num_elements - first)) });
        });
    }

    /// Runs `task(first, elements)` over blocks of `out`, for elementwise kernels.
    pub(crate) fn for_each_block<T: Send>(&self, out: &mut [T], task: impl Fn(usize, &mut [T]) + Sync) {
        self.for_each_chunk(out, TASK_ELEMENTS, task);
    }

    /// Runs `task(row, elements)` over the rows of `cols` elements of `out`.
    pub(crate) fn for_each_row<T: Send>(
        &self,
        out: &mut [T],
        cols: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        self.for_each_reduced_row(out, cols, cols, task);
    }

    /// Like [`for_each_row`](Cpu::for_each_row), for rows that each take as much work as reading `num_read` elements.
    pub(crate) fn for_each_reduced_row<T: Send>(
        &self,
        out: &mut [T],
        cols: usize,
        num_read: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let cols = cols.max(1);
        self.for_each_chunk(out, rows_per_task(num_read) * cols, |first, rows| {
            (first / cols..).zip(rows.chunks_exact_mut(cols)).for_each(|(row, out)| task(row, out));
        });
    }
}
