//! A thread's tiles and the effects of the instructions on them (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2:
//! LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS).

use super::decode::{Instruction, Rows};

const NUM_TILES: usize = 8;
const ROWS_MAX: usize = 16;
const ROW_BYTES_MAX: usize = 64;

/// Maximum number of elements in a row: f32, or pairs of bf16.
const ROW_ELEMENTS_MAX: usize = ROW_BYTES_MAX / 4;

type Row = [u8; ROW_BYTES_MAX];
type Tile = [Row; ROWS_MAX];

const ZERO: Tile = [[0; ROW_BYTES_MAX]; ROWS_MAX];

/// The configured rows of a tile and the bytes of a row. Everything outside of them is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    rows: usize,
    row_bytes: usize,
}

#[derive(Debug)]
pub(super) struct Tiles {
    shapes: [Shape; NUM_TILES],
    data: [Tile; NUM_TILES],
}

impl Tiles {
    /// Tiles that are not configured.
    pub(super) const RELEASED: Tiles =
        Tiles { shapes: [Shape { rows: 0, row_bytes: 0 }; NUM_TILES], data: [ZERO; NUM_TILES] };

    /// Executes an instruction. Returns `None`, without an effect, if hardware would refuse the instruction.
    ///
    /// # Safety
    /// The memory that the instruction accesses must be valid for its reads or writes.
    pub(super) unsafe fn execute(&mut self, instruction: Instruction) -> Option<()> {
        match instruction {
            Instruction::LoadConfig { address } => {
                // SAFETY: the caller's promise.
                let config = unsafe { (address as *const [u8; 64]).read_unaligned() };
                *self = Tiles { shapes: read_config(&config)?, ..Tiles::RELEASED };
            }
            Instruction::Release => *self = Tiles::RELEASED,
            Instruction::Zero { tile } => {
                self.shape(tile)?;
                self.data[tile] = ZERO;
            }
            Instruction::Load { tile, rows } => {
                let shape = self.shape(tile)?;
                self.data[tile] = ZERO;
                for (address, row) in addresses(rows).zip(&mut self.data[tile][..shape.rows]) {
                    // SAFETY: the caller's promise; a row is no longer than the array.
                    unsafe { (address as *const u8).copy_to(row.as_mut_ptr(), shape.row_bytes) };
                }
            }
            Instruction::Store { tile, rows } => {
                let shape = self.shape(tile)?;
                for (address, row) in addresses(rows).zip(&self.data[tile][..shape.rows]) {
                    // SAFETY: as above.
                    unsafe { (address as *mut u8).copy_from(row.as_ptr(), shape.row_bytes) };
                }
            }
            Instruction::DotProduct { sum, left, right } => self.dot_product(sum, left, right)?,
        }
        Some(())
    }

    /// Returns the shape of a tile. `None` if the tile is not configured, or its rows are not made of full words.
    fn shape(&self, tile: usize) -> Option<Shape> {
        let shape = self.shapes[tile];
        (shape.rows > 0 && shape.row_bytes.is_multiple_of(4)).then_some(shape)
    }

    /// Adds the product of `left` and `right` to `sum`. The even and the odd elements of pairs are summed separately, each from zero and in
    /// the order of the pairs. The two sums are added to each other, and then to the element. Returns `None` if a tile occurs twice or the
    /// shapes do not fit.
    fn dot_product(&mut self, sum: usize, left: usize, right: usize) -> Option<()> {
        let (shape, left_shape, right_shape) = (self.shape(sum)?, self.shape(left)?, self.shape(right)?);
        let distinct = sum != left && sum != right && left != right;
        let fit = left_shape.rows == shape.rows
            && right_shape.row_bytes == shape.row_bytes
            && left_shape.row_bytes / 4 == right_shape.rows;
        if !distinct || !fit {
            return None;
        }
        let cols = shape.row_bytes / 4;
        for row in 0..shape.rows {
            let mut sums = [[0.0_f32; 2]; ROW_ELEMENTS_MAX];
            for pair in 0..right_shape.rows {
                let left = bf16_pair(&self.data[left][row], pair);
                for (col, [even, odd]) in sums[..cols].iter_mut().enumerate() {
                    let right = bf16_pair(&self.data[right][pair], col);
                    *even = multiply_add(left[0], right[0], *even);
                    *odd = multiply_add(left[1], right[1], *odd);
                }
            }
            let out = self.data[sum][row].as_chunks_mut::<4>().0;
            for (out, [even, odd]) in out.iter_mut().zip(&sums[..cols]) {
                *out = add(f32::from_le_bytes(*out), add(*even, *odd)).to_le_bytes();
            }
        }
        Some(())
    }
}

/// Returns the shapes of a configuration. `None` if it is invalid, or for a restart.
fn read_config(bytes: &[u8; 64]) -> Option<[Shape; NUM_TILES]> {
    match bytes[0] {
        0 => return Some(Tiles::RELEASED.shapes),
        1 => {}
        _ => return None,
    }
    let (row_bytes, rows) = (&bytes[16..32], &bytes[48..56]);
    let mut reserved = bytes[1..16].iter().chain(&bytes[32..48]).chain(&bytes[56..]);
    let shapes = std::array::from_fn(|tile| Shape {
        rows: usize::from(rows[tile]),
        row_bytes: usize::from(u16::from_le_bytes([row_bytes[2 * tile], row_bytes[2 * tile + 1]])),
    });
    let is_valid = |shape: &Shape| {
        shape.rows <= ROWS_MAX
            && shape.row_bytes <= ROW_BYTES_MAX
            && (shape.rows == 0) == (shape.row_bytes == 0)
    };
    (reserved.all(|&byte| byte == 0) && shapes.iter().all(is_valid)).then_some(shapes)
}

fn addresses(rows: Rows) -> impl Iterator<Item = u64> {
    (0..).map(move |row: u64| rows.first.wrapping_add(row.wrapping_mul(rows.stride)))
}

fn bf16_pair(row: &Row, pair: usize) -> [f32; 2] {
    let word = u32::from_le_bytes(row.as_chunks::<4>().0[pair]);
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

fn add(a: f32, b: f32) -> f32 {
    multiply_add(a, 1.0, b)
}

/// Returns `a b + c`, rounded once, to nearest with ties to even. Denormal operands and results count as zero.
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    // A sum with a smaller magnitude is denormal after rounding to 24 bits.
    const NORMAL_MIN: f64 = f32::MIN_POSITIVE as f64 * (1.0 - 1.0 / (1 << 25) as f64);
    let [a, b, c] = [a, b, c].map(|x| f64::from(if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }));
    // The product is exact, and so is the sum together with its error (Knuth, "The Art of Computer Programming", 4.2.2).
    let product = a * b;
    let sum = product + c;
    let from_c = sum - product;
    let error = (product - (sum - from_c)) + (c - from_c);
    if !sum.is_finite() {
        return sum as f32;
    }
    // Rounds to odd: an odd last bit stands for everything that was rounded away, so the second rounding gives the same result as a single
    // one.
    let bits = sum.to_bits();
    let odd = match error {
        0.0 => bits,
        _ if bits & 1 == 1 => bits,
        _ if (error > 0.0) == (sum > 0.0) => bits + 1,
        _ => bits - 1,
    };
    let sum = f64::from_bits(odd);
    if sum.abs() < NORMAL_MIN { 0.0_f32.copysign(sum as f32) } else { sum as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::{Random, RandomKey};

    const TINY: f32 = f32::MIN_POSITIVE;

    #[test]
    fn a_multiply_add_rounds_once() {
        let mut random = Random::new(RandomKey::new(1, "multiply-add"), 0);
        // Exponents from -20 to 20, so that sums cancel, lose bits, or equal the larger operand.
        let mut value = || {
            let bits = random.below(1 << 32) as u32;
            f32::from_bits((bits & 0x807f_ffff) | ((107 + bits % 41) << 23))
        };
        for _ in 0..200_000 {
            let (a, b, c) = (value(), value(), value());
            assert_eq!(multiply_add(a, b, c).to_bits(), a.mul_add(b, c).to_bits(), "{a:e} {b:e} {c:e}");
        }
        // 641 * 6700417 is 2^32 + 1. Scaled, this is half a unit in the last place of 1 and a little more, which an f64 cannot hold in a
        // sum with 1.
        let (half_unit, scale) = (2.0_f32.powi(-24), 2.0_f32.powi(-28));
        assert_eq!(multiply_add(641.0 * scale, 6_700_417.0 * scale, 1.0), 1.0 + 2.0 * half_unit);
        assert_eq!(
            multiply_add(-641.0 * scale, 6_700_417.0 * scale, 1.0 + 4.0 * half_unit),
            1.0 + 2.0 * half_unit
        );
        assert_eq!(add(1.0, half_unit), 1.0);
    }

    #[test]
    fn denormals_are_zeros() {
        let below = f32::from_bits(TINY.to_bits() - 1);
        assert_eq!(add(below, 0.0), 0.0);
        assert_eq!(add(below, TINY), TINY);
        assert_eq!(multiply_add(below, 1e30, 0.0), 0.0);
        assert_eq!(multiply_add(TINY, 0.5, 0.0), 0.0);
        assert!(multiply_add(-TINY, 0.5, -0.0).is_sign_negative());
        // Just below the smallest normal value: a result that rounds to it in 24 bits, and one that does not.
        let little = 2.0_f32.powi(-13);
        assert_eq!(multiply_add(TINY * (1.0 + little), 1.0 - little, 0.0), TINY);
        assert_eq!(multiply_add(TINY, 1.0 - 2.0_f32.powi(-24), 0.0), 0.0);
    }

    #[test]
    fn infinities_and_nan_go_through() {
        assert_eq!(multiply_add(f32::INFINITY, -2.0, 1.0), f32::NEG_INFINITY);
        assert_eq!(multiply_add(f32::MAX, f32::MAX, 0.0), f32::INFINITY);
        assert!(multiply_add(f32::INFINITY, 0.0, 1.0).is_nan());
        assert!(add(f32::INFINITY, f32::NEG_INFINITY).is_nan());
        assert!(multiply_add(f32::INFINITY, TINY / 2.0, 1.0).is_nan());
    }

    /// Returns a configuration of tiles. Tile `i` has `rows[i]` rows of `row_bytes[i]` bytes.
    fn config(row_bytes: [u8; NUM_TILES], rows: [u8; NUM_TILES]) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        for tile in 0..NUM_TILES {
            bytes[16 + 2 * tile] = row_bytes[tile];
            bytes[48 + tile] = rows[tile];
        }
        bytes
    }

    #[test]
    fn even_and_odd_elements_are_summed_separately() {
        let shapes = read_config(&config([4, 8, 4, 0, 0, 0, 0, 0], [1, 1, 2, 0, 0, 0, 0, 0])).unwrap();
        let mut tiles = Tiles { shapes, ..Tiles::RELEASED };
        let pair = |low: f32, high: f32| (low.to_bits() >> 16 | high.to_bits()).to_le_bytes();
        let big = 16_777_216.0;
        tiles.data[1][0][..4].copy_from_slice(&pair(big, -big));
        tiles.data[1][0][4..8].copy_from_slice(&pair(1.0, 1.0));
        tiles.data[2][0][..4].copy_from_slice(&pair(1.0, 1.0));
        tiles.data[2][1][..4].copy_from_slice(&pair(1.0, 1.0));
        tiles.dot_product(0, 1, 2).unwrap();
        // 2^24 + 1 is a tie and stays 2^24, and -2^24 + 1 is exact. Summing all products in one sequence would give 2.
        assert_eq!(f32::from_le_bytes(tiles.data[0][0][..4].try_into().unwrap()), 1.0);
    }

    #[test]
    fn products_of_tiles_that_do_not_fit_are_refused() {
        let shapes = read_config(&config([4, 8, 4, 8, 6, 8, 12, 6], [1, 1, 2, 2, 2, 2, 1, 1])).unwrap();
        let mut tiles = Tiles { shapes, ..Tiles::RELEASED };
        assert_eq!(tiles.dot_product(0, 1, 2), Some(()));
        for (left, right, what) in [(3, 2, "rows"), (1, 5, "columns"), (6, 2, "inner dim")] {
            assert_eq!(tiles.dot_product(0, left, right), None, "{what}");
        }
        assert_eq!(tiles.dot_product(7, 1, 4), None, "columns and a half");
        tiles.shapes = [Shape { rows: 1, row_bytes: 4 }; NUM_TILES];
        for (sum, left, right) in [(0, 0, 1), (0, 1, 0), (0, 1, 1)] {
            assert_eq!(tiles.dot_product(sum, left, right), None, "tiles {sum} {left} {right}");
        }
        tiles.shapes = Tiles::RELEASED.shapes;
        assert_eq!(tiles.dot_product(0, 1, 2), None, "not configured");
    }

    #[test]
    fn configurations_that_are_not_valid_are_refused() {
        let valid = config([4, 8, 4, 0, 0, 0, 0, 64], [1, 1, 2, 0, 0, 0, 0, 16]);
        assert!(read_config(&valid).is_some());
        assert_eq!(read_config(&[0; 64]), Some(Tiles::RELEASED.shapes));
        for (at, byte) in
            [(0, 2), (1, 1), (2, 1), (16, 68), (17, 1), (32, 1), (47, 1), (48, 17), (48, 0), (52, 1), (63, 1)]
        {
            let mut bytes = valid;
            bytes[at] = byte;
            assert_eq!(read_config(&bytes), None, "byte {at} is {byte}");
        }
    }
}
