use super::*;
use std::sync::Barrier;
use trireme_base::{Bf16, RandomKey};
use trireme_testkit::emulate_amx;

/// Matmul operands with `2 * len` bf16 along the inner dim.
struct Factors {
    len: usize,
    /// `ROWS` rows.
    left: Vec<Bf16>,
    /// `COLS` columns, row by row.
    right: Vec<Bf16>,
}

impl Factors {
    fn random(len: usize, seed: u64) -> Self {
        let random = |num: usize, name| {
            let mut values = vec![0.0; num];
            RandomKey::new(seed, name).fill_normal(&mut values, 1.0);
            values.into_iter().map(Bf16::from_f32).collect()
        };
        Factors { len, left: random(ROWS * 2 * len, "left"), right: random(2 * len * COLS, "right") }
    }

    /// Sets every left element to one value and every right element to another.
    fn constant(len: usize, left: f32, right: f32) -> Self {
        let all = |value, num: usize| vec![Bf16::from_f32(value); num];
        Factors { len, left: all(left, ROWS * 2 * len), right: all(right, 2 * len * COLS) }
    }

    /// Runs the kernel with the left operand at an odd address and `padding` bytes after each of its rows.
    fn multiply(&self, padding: usize, out: &mut [f32], out_row_stride: usize, accumulate: bool) {
        let mut left = vec![0xff];
        for row in 0..ROWS {
            let row = &self.left[row * 2 * self.len..][..2 * self.len];
            left.extend(row.iter().flat_map(|value| value.to_bits().to_le_bytes()));
            left.extend(vec![0xff; padding]);
        }
        let word = |index: usize| {
            let (low, high) =
                (index / COLS * 2 * COLS + index % COLS, (index / COLS * 2 + 1) * COLS + index % COLS);
            u32::from(self.right[low].to_bits()) | u32::from(self.right[high].to_bits()) << 16
        };
        let panel: Vec<u32> = (0..self.len * COLS).map(word).collect();
        assert!(out.len() >= (ROWS - 1) * out_row_stride + COLS);
        let (left, left_row_bytes) = (left[1..].as_ptr(), 4 * self.len + padding);
        let (panel, out) = (panel.as_ptr(), out.as_mut_ptr());
        // SAFETY: tiles are configured, possibly emulated; the operands have the required layout, the result by the assertion.
        unsafe { multiply(self.len, left, left_row_bytes, panel, out, out_row_stride, accumulate) };
    }

    fn product(&self) -> Vec<f32> {
        let mut out = vec![f32::NAN; ROWS * COLS];
        self.multiply(0, &mut out, COLS, false);
        out
    }

    /// Returns an element's sum in f64, and the sum of its terms' magnitudes.
    fn exact(&self, row: usize, col: usize) -> (f64, f64) {
        let terms = (0..2 * self.len).map(|inner| {
            let right = self.right[inner * COLS + col].to_f32();
            f64::from(self.left[row * 2 * self.len + inner].to_f32()) * f64::from(right)
        });
        terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
    }
}

/// Runs `test` with the tiles configured.
fn with_tiles<T>(test: impl FnOnce() -> T) -> T {
    emulate_amx();
    // SAFETY: the tiles are in hardware or emulated.
    let tiles = unsafe { TileConfig::load() };
    let result = test();
    drop(tiles);
    result
}

#[test]
fn products_equal_sums_in_f64() {
    let check = |len: usize, accumulate: bool, padding: usize, stride: usize| {
        let factors = Factors::random(len, len as u64);
        let mut out: Vec<f32> = (0..ROWS * stride).map(|index| index as f32).collect();
        factors.multiply(padding, &mut out, stride, accumulate);
        for (index, &value) in out.iter().enumerate() {
            let (row, col) = (index / stride, index % stride);
            let before = if accumulate || col >= COLS { index as f64 } else { 0.0 };
            let (sum, magnitude) = if col < COLS { factors.exact(row, col) } else { (0.0, 0.0) };
            let error = (f64::from(value) - before - sum).abs();
            let bound = 3e-7 * (magnitude + before) * f64::from(u8::from(len > 0 && col < COLS));
            assert!(
                error <= bound,
                "{len} words, {accumulate}, {padding}, {stride}: {row},{col} off by {error}"
            );
        }
    };
    with_tiles(|| {
        for len in [0, 16, 32, 48] {
            for (padding, stride) in [(0, COLS), (3, COLS + 5), (60, COLS + 16)] {
                check(len, false, padding, stride);
                check(len, true, padding, stride);
            }
        }
    });
}

#[test]
fn infinities_and_nan_reach_their_rows_and_columns_only() {
    let mut factors = Factors::constant(32, 1.0, 2.0);
    factors.left[3 * 64 + 40] = Bf16::from_f32(f32::NEG_INFINITY);
    factors.left[20 * 64 + 63] = Bf16::from_f32(f32::NAN);
    factors.left[10 * 64 + 7] = Bf16::from_f32(0.0);
    factors.right[7 * COLS + 30] = Bf16::from_f32(f32::INFINITY);
    let out = with_tiles(|| factors.product());
    for (index, &value) in out.iter().enumerate() {
        match (index / COLS, index % COLS) {
            (20, _) | (3 | 10, 30) => assert!(value.is_nan(), "{index}: {value}"),
            (3, _) => assert_eq!(value, f32::NEG_INFINITY, "{index}"),
            (_, 30) => assert_eq!(value, f32::INFINITY, "{index}"),
            (10, _) => assert_eq!(value, 126.0, "{index}"),
            _ => assert_eq!(value, 128.0, "{index}"),
        }
    }
}

#[test]
fn denormals_count_as_zero() {
    let denormal = f32::MIN_POSITIVE / 2.0;
    with_tiles(|| {
        assert_eq!(Factors::constant(16, denormal, 1e30).product(), [0.0; ROWS * COLS], "a factor");
        assert_eq!(Factors::constant(16, 1e-20, 1e-20).product(), [0.0; ROWS * COLS], "a product");
        let mut out = [denormal; ROWS * COLS];
        Factors::constant(0, 0.0, 0.0).multiply(0, &mut out, COLS, true);
        assert_eq!(out, [denormal; ROWS * COLS], "no terms");
        Factors::constant(16, 0.0, 0.0).multiply(0, &mut out, COLS, true);
        assert_eq!(out, [0.0; ROWS * COLS], "what is added to");
    });
}

#[test]
fn every_thread_has_tiles_of_its_own() {
    let factors = [Factors::random(48, 1), Factors::random(48, 2)];
    let alone = factors.each_ref().map(|factors| with_tiles(|| factors.product()));
    let (together, factors, alone) = (&Barrier::new(2), &factors, &alone);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                for _ in 0..20 {
                    together.wait();
                    assert_eq!(with_tiles(|| factors[thread].product()), alone[thread]);
                }
            });
        }
    });
}

#[test]
fn tiles_are_detected_only_where_the_machine_lists_them() {
    let machine = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let lists = |flag| machine.split_whitespace().any(|word| word == flag);
    assert!(!detect() || (lists("amx_tile") && lists("amx_bf16")));
}
