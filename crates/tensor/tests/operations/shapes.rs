//! Reshapes, permutations and reductions along a dim.

use crate::{check, no_parameters, op};
use trireme_tensor::tape::{
    Concat, GatherRows, Mean, NewDim, Op, Reshape, ScatterAddRows, Slice, Softmax, Sum, Transpose,
};
use trireme_testkit::Input;

/// Returns the index in every dim of each element of `shape`.
fn coordinates(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let shape = shape.to_vec();
    (0..shape.iter().product()).map(move |index: usize| {
        let mut rest = index;
        let mut place: Vec<usize> = shape
            .iter()
            .rev()
            .map(|&dim| {
                let place = rest % dim;
                rest /= dim;
                place
            })
            .collect();
        place.reverse();
        place
    })
}

/// Returns the element of `x`, which has shape `shape`, at `place`.
fn at(x: &[f64], shape: &[usize], place: &[usize]) -> f64 {
    x[shape.iter().zip(place).fold(0, |index, (dim, place)| index * dim + place)]
}

#[test]
fn reshapes_and_transposes() {
    use NewDim::{Rest, Same, Size};
    for (shape, to) in [
        (&[2_usize, 3, 4][..], vec![Rest, Size(4)]),
        (&[6], vec![Size(1), Size(2), Rest, Size(1)]),
        (&[2, 3, 8], vec![Same, Same, Size(2), Size(4)]),
        (&[0, 5], vec![Size(0)]),
    ] {
        check(&op(Reshape(to)), &no_parameters(), &[Input::random(shape, "x")], &|x, _| x[0].clone());
    }
    for (shape, first, second) in [
        (&[3_usize, 5][..], 0, 1),
        (&[2, 3, 4, 5], 0, 3),
        (&[2, 3, 4, 5], 2, 1),
        (&[1, 7, 1], 0, 1),
        (&[4, 0], 0, 1),
    ] {
        let mut swapped = shape.to_vec();
        swapped.swap(first, second);
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let element = |mut place: Vec<usize>| {
                place.swap(first, second);
                at(&x[0], shape, &place)
            };
            coordinates(&swapped).map(element).collect()
        };
        check(&op(Transpose(first, second)), &no_parameters(), &[Input::random(shape, "x")], &reference);
    }
}

#[test]
fn slices_and_concatenations() {
    for (shape, dim, range) in
        [(&[3_usize, 5][..], 1, 1..3), (&[4, 2, 3], 0, 3..4), (&[2, 3, 4], 1, 0..3), (&[2, 3], 1, 2..2)]
    {
        let mut part = shape.to_vec();
        part[dim] = range.len();
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let element = |mut place: Vec<usize>| {
                place[dim] += range.start;
                at(&x[0], shape, &place)
            };
            coordinates(&part).map(element).collect()
        };
        let slice = op(Slice { dim, range: range.clone() });
        check(&slice, &no_parameters(), &[Input::random(shape, "x")], &reference);
    }
    for (before, dim, after, sizes) in
        [(3, 1, 2, vec![1, 4, 2]), (1, 0, 5, vec![2, 0, 1]), (2, 1, 1, vec![3])]
    {
        let shape = |size: usize| if dim == 0 { vec![size, after] } else { vec![before, size, after] };
        let inputs: Vec<Input> = sizes
            .iter()
            .enumerate()
            .map(|(index, &size)| Input::random(&shape(size), &index.to_string()))
            .collect();
        let joined = shape(sizes.iter().sum());
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let element = |mut place: Vec<usize>| {
                let mut input = 0;
                while place[dim] >= sizes[input] {
                    place[dim] -= sizes[input];
                    input += 1;
                }
                at(&x[input], &shape(sizes[input]), &place)
            };
            coordinates(&joined).map(element).collect()
        };
        check(&op(Concat { dim }), &no_parameters(), &inputs, &reference);
    }
}

#[test]
fn sums_and_means_over_a_dim() {
    for (shape, dim) in [
        (&[3_usize, 5, 7][..], 0),
        (&[3, 5, 7], 1),
        (&[3, 5, 7], 2),
        (&[1], 0),
        (&[2, 130], 0),
        (&[0, 2], 1),
        (&[0, 100], 0),
    ] {
        // The mean over an empty dim is NaN.
        for is_mean in [false, true].into_iter().filter(|is_mean| shape[dim] > 0 || !is_mean) {
            let mut summed = shape.to_vec();
            summed[dim] = 1;
            let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
                let sum = |mut place: Vec<usize>| {
                    let element = |index| {
                        place[dim] = index;
                        at(&x[0], shape, &place)
                    };
                    let sum: f64 = (0..shape[dim]).map(element).sum();
                    if is_mean { sum / shape[dim] as f64 } else { sum }
                };
                coordinates(&summed).map(sum).collect()
            };
            let op = if is_mean { op(Mean { dim }) } else { op(Sum { dim }) };
            check(&op, &no_parameters(), &[Input::random(shape, "x")], &reference);
        }
    }
}

#[test]
fn softmax_of_rows() {
    for shape in [&[3_usize, 5][..], &[1, 1], &[2, 2, 37], &[0, 4]] {
        let cols = shape[shape.len() - 1];
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let row = |row: &[f64]| -> Vec<f64> {
                let sum: f64 = row.iter().map(|x| x.exp()).sum();
                row.iter().map(|x| x.exp() / sum).collect()
            };
            x[0].chunks(cols).flat_map(row).collect()
        };
        check(&Op::from(&Softmax), &no_parameters(), &[Input::random(shape, "x")], &reference);
    }
}

#[test]
fn rows_by_id() {
    check_rows_by_id(&[4, 0, 0, 2, 4, 4]);
    check_rows_by_id(&[]);
}

fn check_rows_by_id(ids: &[u32]) {
    let (num_rows, cols) = (5, 3);
    let row = |x: &[f64], row: f64, col: usize| x[row as usize * cols + col];
    let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
        x[1].iter()
            .flat_map(|&id| (0..cols).map(move |col| (id, col)))
            .map(|(id, col)| row(&x[0], id, col))
            .collect()
    };
    let inputs = [Input::random(&[num_rows, cols], "x"), Input::ids(&[2, ids.len() / 2], ids)];
    check(&Op::from(&GatherRows), &no_parameters(), &inputs, &reference);
    let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
        let mut sums = vec![0.0; num_rows * cols];
        for (index, &id) in x[1].iter().enumerate() {
            (0..cols).for_each(|col| sums[id as usize * cols + col] += x[0][index * cols + col]);
        }
        sums
    };
    let inputs = [Input::random(&[ids.len(), cols], "x"), Input::ids(&[ids.len()], ids)];
    check(&op(ScatterAddRows { num_rows }), &no_parameters(), &inputs, &reference);
}
