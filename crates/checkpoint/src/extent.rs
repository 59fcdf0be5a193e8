//! Arithmetic on extents: boxes within a row-major tensor.

use trireme_plan::Extent;

/// Returns the number of elements of an untrusted shape. `None` if it overflows `usize`.
pub(crate) fn checked_num_elements(shape: &[usize]) -> Option<usize> {
    // A zero does not hide an overflow: 0 × 2^63 × 4 is refused, whatever the order of the dims.
    let nonzero = shape.iter().filter(|&&size| size > 0).try_fold(1_usize, |n, &size| n.checked_mul(size))?;
    Some(if shape.contains(&0) { 0 } else { nonzero })
}

pub(crate) fn is_within(extent: &Extent, shape: &[usize]) -> bool {
    extent.start.len() == shape.len()
        && extent.shape.len() == shape.len()
        && (extent.start.iter().zip(&extent.shape).zip(shape))
            .all(|((&start, &len), &size)| start.checked_add(len).is_some_and(|end| end <= size))
}

/// Returns the intersection of two boxes of the same tensor. `None` if it is empty.
pub(crate) fn intersection(a: &Extent, b: &Extent) -> Option<Extent> {
    let mut shared = Extent { start: Vec::new(), shape: Vec::new() };
    for dim in 0..a.start.len() {
        let start = a.start[dim].max(b.start[dim]);
        let end = (a.start[dim] + a.shape[dim]).min(b.start[dim] + b.shape[dim]);
        if end <= start {
            return None;
        }
        shared.start.push(start);
        shared.shape.push(end - start);
    }
    Some(shared)
}

/// Splits a box into boxes of at most `elements_max` (at least 1) elements. Each is a consecutive range of the box's row-major elements, in
/// order.
pub(crate) fn split(extent: &Extent, elements_max: usize) -> Vec<Extent> {
    let num_elements = extent.num_elements();
    if num_elements <= elements_max {
        return if num_elements == 0 { Vec::new() } else { vec![extent.clone()] };
    }
    // Only the first dim that is longer than 1 can be split without leaving row-major order.
    let dim = extent.shape.iter().position(|&size| size > 1).expect("more than one element in a box");
    let indices_max = (elements_max / (num_elements / extent.shape[dim])).max(1);
    let mut pieces = Vec::new();
    for first in (0..extent.shape[dim]).step_by(indices_max) {
        let mut piece = extent.clone();
        piece.start[dim] += first;
        piece.shape[dim] = indices_max.min(extent.shape[dim] - first);
        pieces.extend(split(&piece, elements_max));
    }
    pieces
}

/// Returns why `parts` do not hold each element of a tensor of `shape` exactly once. `None` if they do.
///
/// Cost: sorts the parts, then compares each part with the parts that begin before it ends along the first dim.
pub(crate) fn coverage_error(shape: &[usize], parts: &[&Extent]) -> Option<String> {
    let Some(total) = checked_num_elements(shape) else {
        return Some(format!("the shape {shape:?} has too many elements"));
    };
    if let Some(outside) = parts.iter().find(|part| !is_within(part, shape)) {
        return Some(format!("a part at {:?} of shape {:?} is out of bounds", outside.start, outside.shape));
    }
    let mut sorted = parts.to_vec();
    sorted.sort_by(|a, b| a.start.cmp(&b.start));
    for (index, part) in sorted.iter().enumerate() {
        let begins_before_end =
            |other: &&&Extent| other.start.is_empty() || other.start[0] < part.start[0] + part.shape[0];
        let overlaps = |other: &&Extent| intersection(part, other).is_some();
        if let Some(other) = sorted[index + 1..].iter().take_while(begins_before_end).copied().find(overlaps)
        {
            return Some(format!("the parts at {:?} and {:?} overlap", part.start, other.start));
        }
    }
    let held: usize = parts.iter().map(|part| part.num_elements()).sum();
    (held != total).then(|| format!("its parts contain {held} of {total} elements"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use trireme_plan::{CopyRun, copy_runs, row_major_index};

    fn extent(start: &[usize], shape: &[usize]) -> Extent {
        Extent { start: start.to_vec(), shape: shape.to_vec() }
    }

    /// Returns a tensor's shape and a box within it. For each dim, `sizes` has the numbers of indices before, in and after the box.
    fn shape_and_box(sizes: Vec<(usize, usize, usize)>) -> (Vec<usize>, Extent) {
        let shape = sizes.iter().map(|&(before, len, after)| before + len + after).collect();
        let start = sizes.iter().map(|&(before, ..)| before).collect();
        (shape, Extent { start, shape: sizes.iter().map(|&(_, len, _)| len).collect() })
    }

    proptest! {
        #[test]
        fn split_pieces_follow_each_other(sizes in prop::collection::vec((0..3_usize, 0..6_usize, 0..3_usize), 0..4),
                                          elements_max in 1..20_usize) {
            let (_, whole) = shape_and_box(sizes);
            let mut next = 0;
            for piece in split(&whole, elements_max) {
                prop_assert!((1..=elements_max).contains(&piece.num_elements()));
                prop_assert_eq!(row_major_index(&whole, &piece.start), next);
                next += piece.num_elements();
            }
            prop_assert_eq!(next, whole.num_elements());
        }

        #[test]
        fn runs_copy_each_element_of_a_box_to_its_place(
            sizes in prop::collection::vec((0..3_usize, 1..4_usize, 0..3_usize), 0..4),
        ) {
            let (shape, part) = shape_and_box(sizes);
            let whole = Extent::full(&shape);
            let mut copied = vec![usize::MAX; part.num_elements()];
            for run in copy_runs(&part, &whole, &part) {
                for element in 0..run.len {
                    copied[run.destination + element] = run.source + element;
                }
            }
            let mut back = vec![usize::MAX; whole.num_elements()];
            for run in copy_runs(&part, &part, &whole) {
                back[run.destination..run.destination + run.len]
                    .copy_from_slice(&copied[run.source..run.source + run.len]);
            }
            prop_assert!(!copied.contains(&usize::MAX));
            for (position, &value) in back.iter().enumerate() {
                prop_assert!(value == position || value == usize::MAX);
            }
            prop_assert_eq!(back.iter().filter(|&&value| value != usize::MAX).count(), copied.len());
        }
    }

    #[test]
    fn runs_are_as_long_as_they_can_be() {
        let whole = extent(&[0, 0], &[4, 3]);
        let all: Vec<CopyRun> = copy_runs(&whole, &whole, &whole).collect();
        assert_eq!(all, [CopyRun { source: 0, destination: 0, len: 12 }]);
        let rows = extent(&[1, 0], &[2, 3]);
        let two: Vec<CopyRun> = copy_runs(&rows, &whole, &rows).collect();
        assert_eq!(two, [CopyRun { source: 3, destination: 0, len: 6 }]);
        let scalar = extent(&[], &[]);
        assert_eq!(copy_runs(&scalar, &scalar, &scalar).count(), 1);
    }

    #[test]
    fn coverage_errors_are_found() {
        let left = extent(&[0, 0], &[2, 1]);
        let right = extent(&[0, 1], &[2, 2]);
        let corner = extent(&[1, 2], &[1, 1]);
        assert_eq!(coverage_error(&[2, 3], &[&right, &left]), None);
        assert_eq!(coverage_error(&[], &[&extent(&[], &[])]), None);
        assert_eq!(coverage_error(&[0], &[]), None);
        for (parts, word) in [
            (vec![&left], "contain 2 of 6"),
            (vec![&left, &right, &corner], "overlap"),
            (vec![&left, &right, &left], "overlap"),
            (vec![&right, &extent(&[0, 2], &[1, 2])], "out of bounds"),
            (vec![&extent(&[0], &[6])], "out of bounds"),
        ] {
            let problem = coverage_error(&[2, 3], &parts).expect("a problem");
            assert!(problem.contains(word), "{problem}");
        }
        assert!(coverage_error(&[1 << 40, 1 << 40], &[]).unwrap().contains("too many elements"));
        assert!(coverage_error(&[], &[&extent(&[], &[]), &extent(&[], &[])]).unwrap().contains("overlap"));
    }

    #[test]
    fn shapes_that_overflow_are_refused() {
        assert_eq!(checked_num_elements(&[2, 3]), Some(6));
        assert_eq!(checked_num_elements(&[]), Some(1));
        assert_eq!(checked_num_elements(&[5, 0]), Some(0));
        assert_eq!(checked_num_elements(&[1 << 40, 1 << 40]), None);
        assert!(!is_within(&extent(&[usize::MAX], &[2]), &[4]));
    }
}
