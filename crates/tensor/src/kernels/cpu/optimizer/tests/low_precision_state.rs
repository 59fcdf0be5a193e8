//! Optimizer state in fewer bits.

use super::*;
use crate::kernels::cpu::simd::SimdLevel;
use crate::kernels::cpu::test_support::cpu;
use trireme_base::Bf16;

/// The state of one piece.
struct StoredState {
    dtype: StateDType,
    is_second_moment: bool,
    bf16: Vec<Bf16>,
    codes: Vec<u8>,
    steps: Vec<f32>,
}

impl StoredState {
    fn new(dtype: StateDType, is_second_moment: bool, len: usize) -> Self {
        let steps = vec![0.0; len.div_ceil(256)];
        StoredState { dtype, is_second_moment, bf16: vec![Bf16::default(); len], codes: vec![0; len], steps }
    }

    fn slice(&mut self) -> StateSlice<'_> {
        match self.dtype {
            StateDType::F32 => unreachable!("f32 is no narrow state"),
            StateDType::Bf16 => StateSlice::Bf16(SharedSlice::new(&mut self.bf16)),
            StateDType::Int8 => StateSlice::Int8 {
                codes: SharedSlice::new(&mut self.codes),
                steps: SharedSlice::new(&mut self.steps),
                is_second_moment: self.is_second_moment,
            },
        }
    }

    fn read(&mut self, cpu: &Cpu, pieces: &Pieces, len: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; len];
        pieces.read_state(cpu.simd_level, 0..pieces.as_slice().len(), self.slice(), &mut values);
        values
    }
}

/// Returns values after a round trip through a state.
fn round_trip(dtype: StateDType, is_square: bool, values: &[f32]) -> Vec<f32> {
    let [found] = run(|cpu| {
        let pieces = Pieces::whole(values.len());
        let all = 0..pieces.as_slice().len();
        let mut kept = StoredState::new(dtype, is_square, values.len());
        pieces.write_state(cpu.simd_level, all.clone(), kept.slice(), values);
        let found = kept.read(cpu, &pieces, values.len());
        pieces.write_state(cpu.simd_level, all, kept.slice(), &found);
        assert_eq!(kept.read(cpu, &pieces, values.len()), found, "what was kept once stays as it is");
        [found]
    });
    found
}

#[test]
fn narrow_states_keep_their_error_bounds() {
    for &len in cases_for_miri(&LENGTHS, 6) {
        for size in [0.0, 1e-25, 1e-8, 1.0, 1e15] {
            let values: Vec<f32> = random(len, "values").iter().map(|x| size * x).collect();
            let squares: Vec<f32> = values.iter().map(|x| x * x).collect();
            for (&x, found) in values.iter().zip(round_trip(StateDType::Bf16, false, &values)) {
                assert!((x - found).abs() <= x.abs() / 128.0, "{x} {found}");
            }
            for (values, found) in
                values.chunks(256).zip(round_trip(StateDType::Int8, false, &values).chunks(256))
            {
                let unit = values.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / 127.0 * 1.001;
                for (x, found) in values.iter().zip(found) {
                    assert!((x - found).abs() <= unit, "{x} {found}, a unit is {unit}");
                }
            }
            for (squares, found) in
                squares.chunks(256).zip(round_trip(StateDType::Int8, true, &squares).chunks(256))
            {
                let unit = squares.iter().fold(0.0_f32, |most, &x| most.max(x)).sqrt() / 255.0 * 1.001;
                for (&x, &found) in squares.iter().zip(found) {
                    assert!((x.sqrt() - found.sqrt()).abs() <= unit, "{x} {found}, a unit is {unit}");
                    assert!((x > 0.0) == (found > 0.0), "{x} became {found}");
                }
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_stay_apart_from_other_blocks() {
    let mut values = vec![1.0; 600];
    values[300] = f32::INFINITY;
    for is_square in [false, true] {
        let found = round_trip(StateDType::Int8, is_square, &values);
        assert!(found[..256].iter().chain(&found[512..]).all(|x| (x - 1.0).abs() < 1e-3), "{is_square}");
        assert!(found.iter().all(|x| x.is_finite()));
    }
}

/// All moments start at 1. Every other one falls by 0.1 % per step, far less than a unit of the format. The remaining ones stay at 1 and
/// keep the units of their blocks constant.
#[test]
fn rounding_at_random_keeps_means_right() {
    let len = cases_for_miri(&[8192, 512], 1)[0];
    for dtype in [StateDType::Bf16, StateDType::Int8] {
        let [first, second] = run(|cpu| {
            let pieces = Pieces::whole(len);
            let (mut first, mut second) =
                (StoredState::new(dtype, false, len), StoredState::new(dtype, true, len));
            let ones = vec![1.0; len];
            let all = 0..pieces.as_slice().len();
            pieces.write_state(cpu.simd_level, all.clone(), first.slice(), &ones);
            pieces.write_state(cpu.simd_level, all, second.slice(), &ones);
            let mut parameters = vec![0.0; len];
            let grads: Vec<f32> = (0..len).map(|index| (index % 2) as f32).collect();
            let mut sums = vec![[0.0; 2]; pieces.as_slice().len()];
            let step = AdamWStep { beta1: 0.999, beta2: 0.999, grad_scale: 1.0, ..ADAMW };
            for rounding_seed in 0..200 {
                let states = [first.slice(), second.slice()];
                let pass = PieceUpdates {
                    pieces: &pieces,
                    updates: &[Update::AdamW(step)],
                    scales: &[],
                    rounding_seed: rounding_seed * 77,
                    sums: Some(&mut sums[..]),
                };
                cpu.update(pass, &mut parameters, &grads, states);
            }
            [first.read(cpu, &pieces, len), second.read(cpu, &pieces, len)]
        });
        for (parity, expected) in [(0, 0.999_f32.powi(200)), (1, 1.0)] {
            for values in [&first, &second] {
                let mean = values.iter().skip(parity).step_by(2).sum::<f32>() / (len / 2) as f32;
                assert!((mean / expected - 1.0).abs() < 0.02, "{dtype:?}: {mean} instead of {expected}");
            }
        }
    }
}

#[test]
fn noise_does_not_repeat_after_as_many_elements_as_u32_has_values() {
    let cpu = cpu(SimdLevel::Portable, 1);
    let values = random(256, "values");
    for dtype in [StateDType::Bf16, StateDType::Int8] {
        let kept_at = |position| {
            let piece = Piece { position, start: 0, state: 0, len: values.len(), update: 0 };
            let pieces = Pieces::new(vec![piece]);
            let mut kept = StoredState::new(dtype, false, values.len());
            pieces.write_state(cpu.simd_level, 0..1, kept.slice(), &values);
            kept.read(&cpu, &pieces, values.len())
        };
        assert_eq!(kept_at(7), kept_at(7));
        assert_ne!(kept_at(7), kept_at(7 + (1 << 32)), "{dtype:?}");
        assert_ne!(kept_at(7 + (1 << 32)), kept_at(7 + (2 << 32)), "{dtype:?}");
    }
}
