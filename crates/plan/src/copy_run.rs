//! Runs of elements that are contiguous in two boxes of a row-major tensor.

use crate::placement::Extent;

/// Returns the index of the element at `point` among the elements of `frame`, in row-major order. Both `point` and `frame` are given in
/// indices of the same tensor.
pub fn row_major_index(frame: &Extent, point: &[usize]) -> usize {
    (0..point.len()).fold(0, |position, dim| position * frame.shape[dim] + point[dim] - frame.start[dim])
}

/// A run of elements that is contiguous in both the source and the destination of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRun {
    /// Index of the first element within the source box.
    pub source: usize,
    /// Index of the first element within the destination box.
    pub destination: usize,
    /// Number of elements.
    pub len: usize,
}

/// Returns the runs that copy the box `shared` from `source` to `destination`, which both contain it. Runs are in ascending order of both
/// indices.
pub fn copy_runs<'a>(
    shared: &'a Extent,
    source: &'a Extent,
    destination: &'a Extent,
) -> impl Iterator<Item = CopyRun> + 'a {
    let num_dims = shared.shape.len();
    let whole = |dim: &usize| {
        shared.shape[*dim] == source.shape[*dim] && shared.shape[*dim] == destination.shape[*dim]
    };
    // Both boxes have exactly the `shared` range in each dim after `inner`, so a run spans all of these dims.
    let inner = num_dims.saturating_sub(1 + (1..num_dims).rev().take_while(whole).count());
    let len = shared.shape[inner..].iter().product();
    let num_runs: usize = shared.shape[..inner].iter().product();
    let mut point = shared.start.clone();
    (0..num_runs).map(move |index| {
        let mut rest = index;
        for dim in (0..inner).rev() {
            point[dim] = shared.start[dim] + rest % shared.shape[dim];
            rest /= shared.shape[dim];
        }
        CopyRun {
            source: row_major_index(source, &point),
            destination: row_major_index(destination, &point),
            len,
        }
    })
}
