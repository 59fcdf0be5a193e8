use super::Bags;
use crate::kernels::cpu::test_support::{
    Exact, assert_close, cases, cases_for_miri, cpu, levels, narrow, not_finite, random, run, to_f64,
};
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use trireme_base::{AxisRank, Bf16, Positions};

/// Wraps one id per bag.
fn single_ids(ids: &[u32]) -> Bags<&[u32]> {
    Bags::of_single_ids(ids)
}

/// Values of gradients before they are accumulated.
const BEFORE: f32 = 0.5;

/// Number of rows of the position table that no sequence uses.
const SPARE_POSITIONS: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Case {
    vocabulary: usize,
    cols: usize,
    sequences: usize,
    seq_len: usize,
    first_position: usize,
}

const fn case(vocabulary: usize, cols: usize, sequences: usize, seq_len: usize) -> Case {
    Case { vocabulary, cols, sequences, seq_len, first_position: 0 }
}

/// Small cases first: a table of one row, which receives all gradients; widths near the width of a register and of a task; more positions
/// than one task has.
const CASES: [Case; 9] = [
    case(1, 1, 1, 1),
    case(3, 15, 2, 3),
    Case { first_position: 4, ..case(5, 17, 1, 2) },
    case(1, 33, 2, 40),
    case(7, 63, 3, 5),
    case(7, 64, 1, 7),
    case(7, 65, 3, 5),
    Case { first_position: 1, ..case(11, 130, 2, 9) },
    case(50, 60, 3, 300),
];

struct Inputs {
    case: Case,
    ids: Vec<u32>,
    table: Vec<f32>,
    positions: Vec<f32>,
    dy: Vec<f32>,
}

impl Inputs {
    fn new(case: Case) -> Self {
        let Case { vocabulary, cols, sequences, seq_len, first_position } = case;
        let num_ids = sequences * seq_len;
        Inputs {
            case,
            ids: (0..num_ids).map(|index| (index * index * 5 % vocabulary) as u32).collect(),
            table: random(vocabulary * cols, "table"),
            positions: random((first_position + seq_len + SPARE_POSITIONS) * cols, "positions"),
            dy: random(num_ids * cols, "dy"),
        }
    }

    /// Returns the output, the output without positions, and the gradients of the table and of the positions.
    fn run(&self) -> [Vec<f32>; 4] {
        let Case { cols, seq_len, first_position, .. } = self.case;
        run(|cpu| {
            let embed = |positions| {
                let mut out = vec![f32::NAN; self.dy.len()];
                cpu.embedding::<f32, f32>(
                    &self.ids,
                    &self.table,
                    positions,
                    Positions::run(first_position, seq_len),
                    &mut out,
                );
                out
            };
            let (mut d_table, mut d_positions) =
                (vec![BEFORE; self.table.len()], vec![BEFORE; self.positions.len()]);
            cpu.embedding_bag_backward(
                single_ids(&self.ids),
                &self.dy,
                self.dy.len() / self.ids.len(),
                &mut d_table,
            );
            cpu.position_backward(&self.dy, Positions::run(0, seq_len), cols, &mut d_positions);
            [embed(Some(&self.positions)), embed(None), d_table, d_positions]
        })
    }

    /// Returns the indices of the token's element and of the position's element for an element of the output.
    fn sources(&self, index: usize) -> (usize, usize) {
        let Case { cols, seq_len, first_position, .. } = self.case;
        let (row, col) = (index / cols, index % cols);
        (self.ids[row] as usize * cols + col, (first_position + row % seq_len) * cols + col)
    }
}

/// Sums in f64, starting from `BEFORE`, the elements of `dy` that belong to each of `len` destinations.
fn scattered(dy: &[f32], len: usize, destination: impl Fn(usize) -> usize) -> Vec<Exact> {
    let before = f64::from(BEFORE);
    let mut sums = vec![(before, before); len];
    for (index, dy) in to_f64(dy).into_iter().enumerate() {
        let (sum, magnitude) = &mut sums[destination(index)];
        *sum += dy;
        *magnitude += dy.abs();
    }
    sums.into_iter().map(|(sum, magnitude)| Exact::new(sum, magnitude)).collect()
}

fn check(inputs: &Inputs) {
    let case = inputs.case;
    let [out, tokens, d_table, d_positions] = inputs.run();
    for (index, (out, token)) in out.iter().zip(&tokens).enumerate() {
        let (in_table, in_positions) = inputs.sources(index);
        let (expected, position) = (inputs.table[in_table], inputs.positions[in_positions]);
        assert_eq!(token.to_bits(), expected.to_bits(), "{case:?}: element {index}");
        // A single sum is rounded as in f64.
        let sum = (f64::from(expected) + f64::from(position)) as f32;
        assert_eq!(out.to_bits(), sum.to_bits(), "{case:?}: element {index} with its position");
    }
    let num_rows = inputs.ids.len();
    let exact = scattered(&inputs.dy, d_table.len(), |index| inputs.sources(index).0);
    assert_close::<f32>(&("gradient of the table", case), &d_table, exact, num_rows);
    // `run` accumulates the gradients of positions from row 0 on, not from `first_position` on.
    let skipped = case.first_position * case.cols;
    let exact = scattered(&inputs.dy, d_positions.len(), |index| inputs.sources(index).1 - skipped);
    assert_close::<f32>(&("gradient of the positions", case), &d_positions, exact, num_rows);
}

#[test]
fn rows_and_gradients_match_f64() {
    for &case in cases_for_miri(&CASES, 4) {
        check(&Inputs::new(case));
    }
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn tables_and_sequences_of_any_size(
        (vocabulary, cols) in (1_usize..30, 1_usize..140),
        (sequences, seq_len, first_position) in (1_usize..5, 1_usize..20, 0_usize..4),
        ids in proptest::collection::vec(any::<u32>(), 80),
        scale in prop_oneof![Just(1.0_f32), Just(1e-40), Just(1e30)],
    ) {
        let case = Case { vocabulary, cols, sequences, seq_len, first_position };
        let mut inputs = Inputs::new(case);
        inputs.ids.iter_mut().zip(ids).for_each(|(id, random)| *id = random % vocabulary as u32);
        for values in [&mut inputs.table, &mut inputs.positions, &mut inputs.dy] {
            values.iter_mut().for_each(|value| *value *= scale);
        }
        check(&inputs);
    }
}

#[test]
fn gradients_of_one_token_are_added_in_the_order_of_rows() {
    // Any other order would round differently, because small values vanish next to the large one.
    let cols = 70;
    let rows = [1.0, 2.0_f32.powi(30), 1.0, -(2.0_f32.powi(30)), 0.25];
    let dy: Vec<f32> = rows.iter().flat_map(|&value| vec![value; cols]).collect();
    let [d_table, d_positions] = run(|cpu| {
        let (mut d_table, mut d_positions) = (vec![0.0; 2 * cols], vec![0.0; cols]);
        cpu.embedding_bag_backward(single_ids(&[1; 5]), &dy, dy.len() / 5, &mut d_table);
        cpu.position_backward(&dy, Positions::run(0, 1), cols, &mut d_positions);
        [d_table, d_positions]
    });
    assert_eq!(d_table, [vec![0.0; cols], vec![0.25; cols]].concat());
    assert_eq!(d_positions, vec![0.25; cols]);
}

#[test]
fn non_finite_values_reach_their_row_and_column_only() {
    let case = Case { first_position: 1, ..case(4, 67, 2, 3) };
    let with = |spoil: &dyn Fn(&mut Inputs)| {
        let mut inputs = Inputs::new(case);
        inputs.ids = vec![2, 0, 2, 1, 3, 2];
        spoil(&mut inputs);
        inputs.run()
    };
    let clean = with(&|_| ());
    let spoilt = |found: [Vec<f32>; 4]| [0, 1, 2, 3].map(|output| not_finite(&clean[output], &found[output]));
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for col in [0, 31, 64, 66] {
            let at = |rows: &[usize]| rows.iter().map(|row| row * case.cols + col).collect::<Vec<_>>();
            let found = with(&|inputs| inputs.table[2 * case.cols + col] = value);
            assert_eq!(spoilt(found), [at(&[0, 2, 5]), at(&[0, 2, 5]), vec![], vec![]]);
            // Position 2 is the second position of each sequence.
            let found = with(&|inputs| inputs.positions[2 * case.cols + col] = value);
            assert_eq!(spoilt(found), [at(&[1, 4]), vec![], vec![], vec![]]);
            let found = with(&|inputs| inputs.dy[4 * case.cols + col] = value);
            assert_eq!(spoilt(found), [vec![], vec![], at(&[3]), at(&[1])]);
        }
    }
}

#[test]
fn rows_are_rounded_to_the_precision_from_any_stored_dtype() {
    let (table, positions) = (random(5 * 6, "table"), random(3 * 6, "positions"));
    let (narrow_table, narrow_positions) = (narrow::<Bf16>(&table), narrow::<Bf16>(&positions));
    let ids = [4, 0, 3];
    let [wide, stored] = run(|cpu| {
        let (mut wide, mut stored) = (vec![0.0; 18], vec![0.0; 18]);
        cpu.embedding::<f32, Bf16>(&ids, &table, Some(&positions), Positions::run(0, 3), &mut wide);
        cpu.embedding::<Bf16, Bf16>(
            &ids,
            &narrow_table,
            Some(&narrow_positions),
            Positions::run(0, 3),
            &mut stored,
        );
        [wide, stored]
    });
    assert_eq!(wide, stored);
    for (index, found) in wide.into_iter().enumerate() {
        let (row, col) = (index / 6, index % 6);
        let expected = narrow_table[ids[row] as usize * 6 + col].to_f32() + narrow_positions[index].to_f32();
        assert_eq!(found, expected);
    }
}

#[test]
fn ids_and_positions_outside_of_their_tables_are_refused() {
    let panics = |test: &dyn Fn()| catch_unwind(AssertUnwindSafe(test)).is_err();
    for level in levels() {
        let embed = |id: u32, positions: Option<&[f32]>, first: usize| {
            let at = Positions::run(first, 2);
            cpu(level, 1).embedding::<f32, f32>(&[0, id], &[0.0; 6], positions, at, &mut [0.0; 4]);
        };
        let backward =
            |id: u32| cpu(level, 1).embedding_bag_backward(single_ids(&[0, id]), &[0.0; 4], 2, &mut [0.0; 6]);
        embed(2, Some(&[0.0; 6]), 1);
        backward(2);
        assert!(panics(&|| embed(3, None, 0)) && panics(&|| embed(u32::MAX, None, 0)));
        assert!(panics(&|| embed(2, Some(&[0.0; 6]), 2)));
        assert!(panics(&|| backward(3)) && panics(&|| backward(u32::MAX)));
        let at = Positions::run(0, 2);
        assert!(panics(&|| cpu(level, 1).position_backward(&[0.0; 4], at, 2, &mut [0.0; 3])));
    }
}

#[test]
fn zig_zag_positions_match_contiguous_positions() {
    let (cols, len) = (5, 12);
    let (ids, table) = (vec![0_u32; 2 * len], random(cols, "table"));
    let (positions, dy) = (random(len * cols, "positions"), random(2 * len * cols, "dy"));
    let run_at = |at: Positions| {
        let rows = move |all: &[f32]| -> Vec<f32> {
            let of_sequence =
                move |sequence: usize| (0..at.len()).map(move |index| sequence * len + at.at(index));
            (0..2).flat_map(of_sequence).flat_map(|row| all[row * cols..(row + 1) * cols].to_vec()).collect()
        };
        let [out, d_positions] = run(|cpu| {
            let (mut out, mut d_positions) = (vec![f32::NAN; 2 * at.len() * cols], vec![0.0; len * cols]);
            let ids = &ids[..2 * at.len()];
            cpu.embedding::<f32, f32>(ids, &table, Some(&positions), at, &mut out);
            cpu.position_backward(&rows(&dy), at, cols, &mut d_positions);
            [out, d_positions]
        });
        (out, d_positions, rows)
    };
    let (whole, d_whole, _) = run_at(Positions::run(0, len));
    let mut sum = vec![0.0; len * cols];
    for place in AxisRank::all(3) {
        let (out, d_positions, rows) = run_at(Positions::zig_zag(len, place));
        assert_eq!(out, rows(&whole), "{place:?}");
        sum.iter_mut().zip(d_positions).for_each(|(sum, d)| *sum += d);
    }
    assert_eq!(sum, d_whole);
}
