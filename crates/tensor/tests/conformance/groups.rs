//! Sorting rows by group, and grouped matmuls.

use super::{FLOATS, assert_same_or_near, empty, ids, on_all, on_all_near, random, rounded, rounding, wide};
use trireme_base::DType;
use trireme_tensor::{Device, GroupLimit, MatmulEpilogue, Precision, RowGroups, Transposition};

#[test]
fn rows_are_sorted_stably_by_group() {
    for (groups, num_groups) in [(&[2_u32, 0, 2, 4, 0, 2][..], 5), (&[], 3), (&[0, 0], 1)] {
        let [starts, order, places] = on_all(|device| {
            let num_rows = groups.len();
            let [mut starts, mut order, mut places] =
                [num_groups + 1, num_rows, num_rows].map(|len| empty(device, [len], DType::U32));
            let rows = [order.view_mut(), places.view_mut()];
            device.group_rows(ids(device, groups).view(), GroupLimit::NONE, starts.view_mut(), rows);
            [starts, order, places].map(|ids| device.read::<u32>(ids.view()).unwrap())
        });
        let mut expected: Vec<u32> = (0..groups.len() as u32).collect();
        expected.sort_by_key(|&row| groups[row as usize]);
        assert_eq!(order, expected);
        let place = |row: usize| expected.iter().position(|&other| other == row as u32).unwrap() as u32;
        assert_eq!(places, (0..groups.len()).map(place).collect::<Vec<_>>());
        let before = |group| groups.iter().filter(|&&other| other < group).count() as u32;
        assert_eq!(starts, (0..=num_groups as u32).map(before).collect::<Vec<_>>());
    }
}

/// More rows than a GPU sorts at a time, in chunks that it sorts at once or not.
#[test]
fn many_rows_are_sorted_like_few() {
    let num_rows = 9_001;
    let groups: Vec<u32> = (0..num_rows).map(|row| (row * row / 3 % 7) as u32).collect();
    for rows_per_capacity in [usize::MAX, 4500, 100] {
        let limit = GroupLimit { rows_per_capacity, factor: 0.8 };
        let [starts, order, places] = on_all(|device| {
            let [mut starts, mut order, mut places] =
                [7, num_rows, num_rows].map(|len| empty(device, [len], DType::U32));
            let rows = [order.view_mut(), places.view_mut()];
            device.group_rows(ids(device, &groups).view(), limit, starts.view_mut(), rows);
            [starts, order, places].map(|ids| device.read::<u32>(ids.view()).unwrap())
        });
        assert!((0..num_rows).all(|row| order[places[row] as usize] == row as u32));
        let rows = |group: usize| &order[starts[group] as usize..starts[group + 1] as usize];
        assert!((0..6).all(|group| rows(group).is_sorted()));
        assert!((0..6).all(|group| rows(group).iter().all(|&row| groups[row as usize] == group as u32)));
        let others = &order[starts[6] as usize..];
        assert!(others.is_sorted() && others.len() > num_rows / 7, "{} rows have no group", others.len());
    }
}

/// A group accepts the first rows of each `rows_per_capacity` consecutive rows, up to its limit. The others come last, in their order.
/// Rows with the id after the last group do not count in the limit.
#[test]
fn rows_beyond_a_limit_are_of_no_group() {
    const WEIGHTS: [f32; 6] = [1.5, 0.0, 0.25, 2.0, 1.0, 4.0];
    let groups = [2_u32, 2, 0, 2, 1, 3, 1, 1, 1, 2, 0, 3];
    let groups_len = groups.len();
    for (rows_per_capacity, factor) in
        [(4, 0.5), (4, 1.25), (12, 0.75), (3, 3.0), (5, 1.0), (12, f64::INFINITY)]
    {
        let ([starts, order, places], dropped) = on_all(|device| {
            let [mut starts, mut order, mut places] =
                [4, groups.len(), groups.len()].map(|len| empty(device, [len], DType::U32));
            let (groups, limit) = (ids(device, &groups), GroupLimit { rows_per_capacity, factor });
            let rows = [order.view_mut(), places.view_mut()];
            device.group_rows(groups.view(), limit, starts.view_mut(), rows);
            let mut dropped = [empty(device, [1], DType::F64), empty(device, [1], DType::F64)];
            let places_of_tokens = places.view().part(0, [groups_len / 2, 2].into());
            device.ungrouped_rows(starts.view(), places_of_tokens, None, dropped[0].view_mut());
            let mut weights = empty(device, [groups_len / 2], DType::F32);
            device.upload(&WEIGHTS, weights.view_mut());
            let by = Some(weights.view());
            device.ungrouped_rows(starts.view(), places_of_tokens, by, dropped[1].view_mut());
            let read = [starts, order, places].map(|ids| device.read::<u32>(ids.view()).unwrap());
            (read, dropped.map(|dropped| device.read::<f64>(dropped.view()).unwrap()[0]))
        });
        let is_kept = |row: usize| {
            let first = row / rows_per_capacity * rows_per_capacity;
            let together = &groups[first..(first + rows_per_capacity).min(groups_len)];
            let num_rows = together.iter().filter(|&&group| group < 3).count();
            let capacity = (factor * num_rows as f64 / 3.0).ceil().max(1.0);
            let num_before = groups[first..row].iter().filter(|&&group| group == groups[row]).count();
            groups[row] < 3 && (num_before as f64) < capacity
        };
        let group = |row: usize| if is_kept(row) { groups[row] } else { 3 };
        let mut expected: Vec<usize> = (0..groups.len()).collect();
        expected.sort_by_key(|&row| group(row));
        assert_eq!(order, expected.iter().map(|&row| row as u32).collect::<Vec<_>>());
        assert!((0..groups.len()).all(|row| order[places[row] as usize] == row as u32));
        let before = |end| (0..groups.len()).filter(|&row| group(row) < end).count() as u32;
        let weighted = |weight: fn(usize) -> f64| -> f64 {
            (0..groups_len).filter(|&row| !is_kept(row)).map(weight).sum()
        };
        assert_eq!(dropped, [weighted(|_| 1.0), weighted(|row| f64::from(WEIGHTS[row / 2]))]);
        assert_eq!(starts, (0..4).map(before).collect::<Vec<_>>(), "{rows_per_capacity}, {factor}");
    }
}

/// The parts of a group are summed in the order of a reduction over as many ranks; see [`Device::grouped_transposed_matmul`].
#[test]
fn parts_of_groups_are_summed_as_ranks_sum() {
    let (inner, cols, num_groups) = (30, 50, 2);
    for num_parts in [2_usize, 3, 4, 5, 7, 11] {
        // Some parts are empty.
        let lens: Vec<usize> = (0..num_groups * num_parts).map(|part| part * 5 % 8).collect();
        let starts: Vec<u32> =
            (0..=lens.len()).map(|part| lens[..part].iter().sum::<usize>() as u32).collect();
        let rows = lens.iter().sum::<usize>();
        let run = |device: &Device| {
            let values = |cols: usize, name| {
                rounded(device, &random(rows * cols, name), DType::F32).reshaped([rows, cols].into())
            };
            let (left, right, parts) = (values(inner, "left"), values(cols, "right"), ids(device, &starts));
            let mut all = empty(device, [num_groups * inner, cols], DType::F32);
            let groups = RowGroups { starts: parts.view(), num_groups };
            let (left_view, right_view, out) = (left.view(), right.view(), all.view_mut());
            device
                .grouped_transposed_matmul(Precision::F32, groups, left_view, right_view, out, false)
                .unwrap();
            let product = |part: usize| -> Vec<f32> {
                let mut own = empty(device, [inner, cols], DType::F32);
                device.zero(own.view_mut());
                if lens[part] > 0 {
                    let (left, right) = [&left, &right]
                        .map(|rows| rows.view().rows(starts[part] as usize, lens[part]))
                        .into();
                    let factors = ((left, Transposition::Yes), (right, Transposition::No));
                    let overwrite = MatmulEpilogue::Overwrite;
                    device.matmul(Precision::F32, factors.0, factors.1, own.view_mut(), overwrite).unwrap();
                }
                device.read(own.view()).unwrap()
            };
            let expected = (0..num_groups).flat_map(|group| {
                let mut sums: Vec<Vec<f32>> =
                    (0..num_parts).map(|part| product(group * num_parts + part)).collect();
                let add = |pair: &[Vec<f32>]| -> Vec<f32> {
                    pair[0].iter().zip(&pair[1]).map(|(left, right)| left + right).collect()
                };
                let num_pairs = num_parts - (1 << num_parts.ilog2());
                let pairs: Vec<Vec<f32>> =
                    sums.drain(..2 * num_pairs).collect::<Vec<_>>().chunks(2).map(add).collect();
                sums.splice(..0, pairs);
                while sums.len() > 1 {
                    sums = sums.chunks(2).map(add).collect();
                }
                sums.remove(0)
            });
            [device.read::<f32>(all.view()).unwrap(), expected.collect()]
        };
        assert_same_or_near(run, 1e-5, &format!("{num_parts} parts"));
    }
}

/// In every dtype, groups have the same bits as separate matmuls, including a group without rows and a group of one row.
#[test]
fn grouped_matmuls_equal_separate_matmuls() {
    let (starts, inner, cols) = ([0_usize, 150, 150, 151, 210], 140, 90);
    // The last rows belong to no group.
    let (rows, num_groups) = (starts[4] + 3, starts.len() - 1);
    for (dtype, precision) in FLOATS.into_iter().zip([Precision::F32, Precision::Bf16, Precision::F16]) {
        let run = |device: &Device| {
            // Only the differences of starts matter.
            let of_groups = ids(device, &starts.map(|start| start as u32 + 7));
            let values = |shape: [usize; 2], name| {
                rounded(device, &random(shape[0] * shape[1], name), dtype).reshaped(shape.into())
            };
            let (left, right) = (values([rows, inner], "left"), values([rows, cols], "right"));
            let [untransposed, transposed] = [[inner, cols], [cols, inner]]
                .map(|[block, len]| (values([num_groups * block, len], "blocks"), block));
            let pairs = [(&untransposed, Transposition::No), (&transposed, Transposition::Yes)].map(
                |((blocks, block), transpose)| {
                    let (mut all, mut own) =
                        (empty(device, [rows, cols], dtype), empty(device, [rows, cols], dtype));
                    let right = (blocks.view(), transpose);
                    device
                        .grouped_matmul(precision, of_groups.view(), left.view(), right, all.view_mut())
                        .unwrap();
                    device.zero(own.view_mut().rows(starts[4], 3));
                    for (group, bounds) in starts.windows(2).enumerate() {
                        let (first, num) = (bounds[0], bounds[1] - bounds[0]);
                        let factors = (
                            (left.view().rows(first, num), Transposition::No),
                            (blocks.view().rows(group * block, *block), transpose),
                        );
                        let mut out = own.view_mut();
                        let (out, overwrite) = (out.rows(first, num), MatmulEpilogue::Overwrite);
                        device.matmul(precision, factors.0, factors.1, out, overwrite).unwrap();
                    }
                    [all, own].map(|out| wide(device, &out))
                },
            );
            let mut pairs = Vec::from(pairs);
            for accumulate in [false, true] {
                let [mut all, mut own] = [(); 2].map(|()| {
                    let mut sums = empty(device, [num_groups * inner, cols], DType::F32);
                    device.upload(
                        &vec![if accumulate { 0.5_f32 } else { f32::NAN }; num_groups * inner * cols],
                        sums.view_mut(),
                    );
                    sums
                });
                let groups = RowGroups { starts: of_groups.view(), num_groups };
                let (left_view, right_view, out) = (left.view(), right.view(), all.view_mut());
                device
                    .grouped_transposed_matmul(precision, groups, left_view, right_view, out, accumulate)
                    .unwrap();
                for (group, bounds) in starts.windows(2).enumerate() {
                    let (first, num) = (bounds[0], bounds[1] - bounds[0]);
                    let mut out = own.view_mut();
                    let mut out = out.rows(group * inner, inner);
                    if num == 0 {
                        if !accumulate {
                            device.zero(out);
                        }
                        continue;
                    }
                    let epilogue =
                        if accumulate { MatmulEpilogue::Accumulate } else { MatmulEpilogue::Overwrite };
                    let (left, right) = (left.view().rows(first, num), right.view().rows(first, num));
                    let factors = ((left, Transposition::Yes), (right, Transposition::No));
                    device.matmul(precision, factors.0, factors.1, out.reborrow(), epilogue).unwrap();
                }
                pairs.push([all, own].map(|sums| wide(device, &sums)));
            }
            [0, 1].map(|side| pairs.iter().flat_map(|pair| pair[side].clone()).collect())
        };
        assert_same_or_near(run, 4.0 * rounding(dtype).max(2e-6), dtype.name());
    }
}

/// A left operand of one column is packed only for some numbers of rows.
#[test]
fn left_operands_of_one_column_with_odd_and_even_groups() {
    let (starts, cols) = ([0_u32, 3, 8], 700);
    for (dtype, precision) in FLOATS.into_iter().zip([Precision::F32, Precision::Bf16, Precision::F16]) {
        let found = on_all(|device| {
            let ones = |shape: [usize; 2]| {
                rounded(device, &vec![1.0; shape[0] * shape[1]], dtype).reshaped(shape.into())
            };
            let (left, right) = (ones([8, 1]), ones([8, cols]));
            let mut sums = empty(device, [2, cols], DType::F32);
            let starts = ids(device, &starts);
            let groups = RowGroups { starts: starts.view(), num_groups: 2 };
            let (left, right) = (left.view(), right.view());
            device.grouped_transposed_matmul(precision, groups, left, right, sums.view_mut(), false).unwrap();
            device.read::<f32>(sums.view()).unwrap()
        });
        assert!(found[..cols].iter().all(|&sum| sum == 3.0) && found[cols..].iter().all(|&sum| sum == 5.0));
    }
}

/// The scratch memory of a matmul depends on where it runs.
#[test]
fn a_group_of_one_row_with_many_terms_has_room_to_pack_its_block() {
    let (inner, cols) = (4096, 64);
    on_all_near(1e-4, |device| {
        let values = |shape: [usize; 2], name| {
            rounded(device, &random(shape[0] * shape[1], name), DType::Bf16).reshaped(shape.into())
        };
        let (left, block) = (values([1, inner], "left"), values([inner, cols], "block"));
        let mut out = empty(device, [1, cols], DType::F32);
        let (starts, right) = (ids(device, &[0, 1]), (block.view(), Transposition::No));
        device.grouped_matmul(Precision::Bf16, starts.view(), left.view(), right, out.view_mut()).unwrap();
        [device.read::<f32>(out.view()).unwrap()]
    });
}
