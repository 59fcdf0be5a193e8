//! Kernels for the CPU. They compute in f32; activations and factors of products may be stored in 16 bits.
//!
//! Bits do not depend on the number of threads: work is cut into tasks by shape alone, and no sum
//! is split between tasks. Nor do they depend on the SIMD level outside of matrix products: sums run in
//! sixteen fixed lanes, whatever the register width.
//!
//! The method of [`Device`](crate::Device) with the name of a kernel documents the kernel.

pub(crate) mod activation;
pub(crate) mod arena;
pub(crate) mod attention;
pub(crate) mod blocks;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod element;
mod elementwise;
pub(crate) mod embedding;
pub(crate) mod exact_sum;
pub(crate) mod experts;
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
use simd::CpuFeatures;
use std::sync::Arc;
use threads::ThreadPool;

/// The processor that kernels run on: threads and the SIMD level. It is needed to turn [operands](crate::kernels::Operand) into slices.
#[derive(Debug)]
pub(crate) struct Cpu {
    pub(crate) threads: ThreadPool,
    pub(crate) features: CpuFeatures,
    /// Where this processor finds the only memory that it reaches; `None` if it reaches all memory where the host does.
    mapping: Option<Arc<Mapping>>,
}

impl Cpu {
    /// One that reaches all memory.
    pub(crate) fn new(threads: ThreadPool, features: CpuFeatures) -> Self {
        Cpu { threads, features, mapping: None }
    }

    /// The same, which reaches the memory of `mapping` and no other.
    pub(crate) fn within(self, mapping: Arc<Mapping>) -> Self {
        Cpu { mapping: Some(mapping), ..self }
    }

    /// Where this processor finds the only memory that it reaches, if it does not reach all where the host does.
    pub(crate) fn mapping(&self) -> Option<&Mapping> {
        self.mapping.as_deref()
    }
}

/// A mutable slice that tasks of one kernel cut among themselves.
///
/// Sound only while no two tasks touch the same element; every use says why that holds.
#[derive(Clone, Copy)]
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: elements are only reached through `range`, whose callers keep tasks apart.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len(), lifetime: std::marker::PhantomData }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// No other live reference reaches these elements.
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

/// Roundings to f32 one after the other in a kernel apart from its sums: at most a dozen operations, among them
/// an exponential with an error of five roundings.
const NUM_ROUNDINGS: f64 = 16.0;

/// Bound of a kernel's rounding errors in f32, in proportion to the magnitudes of its terms, for sums of up to `num_terms`: one of
/// the analysis of rounding errors, to first order. Sums have their terms in [`simd::LANES`] lanes; those of matrix products
/// have one lane, but also errors that cancel.
pub(crate) fn f32_error(num_terms: usize) -> f64 {
    (NUM_ROUNDINGS + num_terms as f64 / simd::LANES as f64) * 2.0_f64.powi(-24)
}

/// Elements one task of an elementwise kernel handles: enough to repay a hand-over between
/// threads (about a microsecond), small enough to divide among threads.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Rows one task handles when a row has `cols` elements.
pub(crate) fn rows_per_task(cols: usize) -> usize {
    (TASK_ELEMENTS / cols.max(1)).max(1)
}

impl Cpu {
    /// Runs `task(first_row, num_rows)` over blocks of rows whose cut depends on the shape alone.
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

    /// Runs `task(first, elements)` over blocks of `out`, for kernels of single elements.
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

    /// As [`for_each_row`](Cpu::for_each_row), where a row takes as much work as `num_read` elements.
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
