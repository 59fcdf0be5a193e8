//! Elements that lie one after the other in two boxes of a row-major tensor.

use crate::placement::Extent;

/// Position of the element `point` among the row-major elements of `frame`.
pub fn position_in(frame: &Extent, point: &[usize]) -> usize {
    (0..point.len()).fold(0, |position, dim| position * frame.shape[dim] + point[dim] - frame.start[dim])
}

/// Elements that are consecutive both where they come from and where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First element within the source box.
    pub source: usize,
    /// First element within the destination box.
    pub destination: usize,
    /// Number of elements.
    pub len: usize,
}

/// The runs that copy `shared`, a box within both others, in ascending order of both positions.
pub fn runs<'a>(
    shared: &'a Extent,
    source: &'a Extent,
    destination: &'a Extent,
) -> impl Iterator<Item = Run> + 'a {
    let num_dims = shared.shape.len();
    let whole = |dim: &usize| {
        shared.shape[*dim] == source.shape[*dim] && shared.shape[*dim] == destination.shape[*dim]
    };
    // Dims after `inner` are whole in both boxes, so one run reaches over all of them.
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
        Run { source: position_in(source, &point), destination: position_in(destination, &point), len }
    })
}
