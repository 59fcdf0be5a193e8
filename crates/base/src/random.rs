//! Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). A
//! value is a pure function of (key, counter), so any rank can compute any part of a stream, in any order, and get the same bits.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The key of one random stream, derived from the run's seed and the purpose of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RandomKey {
    key: [u32; 2],
    stream: u64,
}

impl RandomKey {
    /// Returns the key of the stream for `purpose`, such as a parameter's name, under `seed`.
    pub fn new(seed: u64, purpose: &str) -> Self {
        // FNV-1a. The hash only distinguishes streams; it needs no cryptographic strength.
        let stream = purpose.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        RandomKey { key: [seed as u32, (seed >> 32) as u32], stream }
    }

    /// Returns the key of Philox and the stream, for code that computes the words elsewhere.
    pub fn parts(self) -> ([u32; 2], u64) {
        (self.key, self.stream)
    }

    /// Returns the four random words at position `counter` of the stream.
    pub fn words(self, counter: u64) -> [u32; 4] {
        let mut c = [counter as u32, (counter >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        let mut key = self.key;
        for _ in 0..ROUNDS {
            let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
            let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
            c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        c
    }

    /// Returns the key of a stream that is derived from this one and `index`, such as the index of a step.
    pub fn derived(self, index: u64) -> Self {
        let [a, b, c, d] = self.words(index);
        RandomKey { key: [a, b], stream: self.stream ^ (u64::from(c) | u64::from(d) << 32) }
    }

    /// Fills `out` with the words of the stream that start at word `first`. Each counter yields four words.
    pub fn fill_words_from(self, first: u64, out: &mut [u32]) {
        let skipped = (first % 4) as usize;
        let (head, rest) = out.split_at_mut(out.len().min((4 - skipped) % 4));
        head.copy_from_slice(&self.words(first / 4)[skipped..][..head.len()]);
        let counter = first.div_ceil(4);
        let (whole, tail) = rest.as_chunks_mut::<4>();
        for (index, words) in whole.iter_mut().enumerate() {
            *words = self.words(counter.wrapping_add(index as u64));
        }
        let last = counter.wrapping_add(whole.len() as u64);
        tail.copy_from_slice(&self.words(last)[..tail.len()]);
    }

    /// Fills `out` with normal variates of mean 0 and the given standard deviation, by the Box-Muller transform. Element `i` depends only
    /// on the key and `i`.
    pub fn fill_normal(self, out: &mut [f32], standard_deviation: f32) {
        self.fill_normal_from(0, out, standard_deviation);
    }

    /// Fills `out` with the variates that [`fill_normal`](RandomKey::fill_normal) generates for the elements from `first` on.
    pub fn fill_normal_from(self, first: u64, out: &mut [f32], standard_deviation: f32) {
        // Blocks of independent words let the compiler vectorize the loops.
        const COUNTERS: usize = 16;
        const LEN: usize = 4 * COUNTERS;
        let mut skipped = (first % LEN as u64) as usize;
        let (mut block, mut rest) = (first / LEN as u64, out);
        while !rest.is_empty() {
            let mut words = [[0; 4]; COUNTERS];
            for (index, words) in words.iter_mut().enumerate() {
                *words = self.words(block * COUNTERS as u64 + index as u64);
            }
            let mut values = [0.0; LEN];
            for (pair, words) in
                values.as_chunks_mut::<2>().0.iter_mut().zip(words.as_flattened().as_chunks::<2>().0)
            {
                let (x, y) = normal_pair(words[0], words[1]);
                *pair = [x * standard_deviation, y * standard_deviation];
            }
            let (chunk, others) = rest.split_at_mut(rest.len().min(LEN - skipped));
            chunk.copy_from_slice(&values[skipped..skipped + chunk.len()]);
            (block, skipped, rest) = (block + 1, 0, others);
        }
    }
}

/// Returns two independent normal variates from 64 random bits, by the Box-Muller transform.
///
/// Uses plain f32 arithmetic instead of the system's math library, because initial weights must have the same bits on every machine.
#[inline]
fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    const UNIT: f32 = 1.0 / 16_777_216.0;
    // A value in (0, 1], in 2^24 steps, so that the logarithm is finite.
    let radius = (-2.0 * ln((a >> 8) as f32 * UNIT + UNIT)).sqrt();
    // An angle in [-pi/4, pi/4). Two more bits rotate it by a multiple of 90 degrees.
    let (sin, cos) = sin_cos(((b & 0x00ff_ffff) as f32 * UNIT - 0.5) * std::f32::consts::FRAC_PI_2);
    let (x, y) = if b & 1 << 30 == 0 { (cos, sin) } else { (-sin, cos) };
    let radius = if b & 1 << 31 == 0 { radius } else { -radius };
    (radius * x, radius * y)
}

/// Returns the natural logarithm of a positive normal number, accurate to 1e-7 (Cephes, `logf`).
#[inline]
fn ln(x: f32) -> f32 {
    const COEFFICIENTS: [f32; 9] = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_7e-1,
        2.000_071_4e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    let exponent = (x.to_bits() >> 23) as i32 - 126;
    let mantissa = f32::from_bits(x.to_bits() & 0x007f_ffff | 0x3f00_0000);
    let is_small = mantissa < std::f32::consts::FRAC_1_SQRT_2;
    let exponent = if is_small { exponent - 1 } else { exponent } as f32;
    let m = if is_small { 2.0 * mantissa - 1.0 } else { mantissa - 1.0 };
    let polynomial = COEFFICIENTS.iter().fold(0.0, |sum, coefficient| sum * m + coefficient);
    let square = m * m;
    let tail = polynomial * m * square - 2.121_944_4e-4 * exponent - 0.5 * square;
    m + tail + 0.693_359_4 * exponent
}

/// Returns sine and cosine of an angle of at most pi/4 in magnitude, accurate to 1e-7 (Cephes, `sinf` and `cosf`).
#[inline]
fn sin_cos(x: f32) -> (f32, f32) {
    let square = x * x;
    let sin = ((-1.951_529_6e-4 * square + 8.332_161e-3) * square - 1.666_665_5e-1) * square * x + x;
    let cos = ((2.443_315_7e-5 * square - 1.388_731_6e-3) * square + 4.166_664_6e-2) * square * square;
    (sin, cos - 0.5 * square + 1.0)
}

/// A sequential reader of a random stream. Its full state is `(key, position)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Random {
    key: RandomKey,
    position: u64,
}

impl Random {
    /// Creates a reader that starts `position` words into the stream of `key`.
    pub fn new(key: RandomKey, position: u64) -> Self {
        Random { key, position }
    }

    /// Returns the current position in words. Store it to resume the stream from here.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        let word = self.key.words(self.position / 4)[(self.position % 4) as usize];
        self.position += 1;
        word
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) << 32 | u64::from(self.next_u32())
    }

    /// Returns a uniform number in [0, 1) with 53 random bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a uniform integer in `0..bound`, without bias (Lemire's rejection method).
    ///
    /// # Panics
    /// If `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "no number lies below 0");
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_depend_only_on_their_positions() {
        let key = RandomKey::new(7, "words");
        let mut whole = [0; 40];
        key.fill_words_from(0, &mut whole);
        assert_eq!(whole[8..12], key.words(2));
        for first in 0..9 {
            for len in 0..20 {
                let mut part = vec![0; len];
                key.fill_words_from(first as u64, &mut part);
                assert_eq!(part, whole[first..first + len], "{len} words from {first}");
            }
        }
        assert_ne!(key.derived(1).words(0), key.derived(2).words(0));
        assert_ne!(key.derived(0).words(0), key.words(0));
    }

    #[test]
    fn philox_gives_the_published_words() {
        // Known answers of the Random123 library (philox4x32, 10 rounds).
        let zeros = RandomKey { key: [0, 0], stream: 0 };
        assert_eq!(zeros.words(0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = RandomKey { key: [u32::MAX; 2], stream: u64::MAX };
        assert_eq!(ones.words(u64::MAX), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn a_stream_can_be_entered_anywhere() {
        let key = RandomKey::new(7, "test");
        let mut all = Random::new(key, 0);
        let words: Vec<u32> = (0..50).map(|_| all.next_u32()).collect();
        for start in [0, 1, 4, 17] {
            let mut part = Random::new(key, start as u64);
            assert!(words[start..].iter().all(|&word| word == part.next_u32()));
        }
        assert_ne!(Random::new(RandomKey::new(7, "other"), 0).next_u32(), words[0]);
    }

    #[test]
    fn elementary_functions_are_accurate() {
        for i in 1..=10_000_u16 {
            let x = f32::from(i) / 10_000.0;
            assert!((ln(x) - x.ln()).abs() <= 2e-7 * x.ln().abs().max(1.0), "ln {x}");
            let angle = (x - 0.5) * std::f32::consts::FRAC_PI_2;
            let (sin, cos) = sin_cos(angle);
            assert!((sin - angle.sin()).abs() < 2e-7 && (cos - angle.cos()).abs() < 2e-7, "sin, cos {angle}");
        }
    }

    #[test]
    fn normals_have_the_moments_asked_for() {
        let mut values = vec![0.0; 1 << 16];
        RandomKey::new(1, "normal").fill_normal(&mut values, 0.5);
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
        let variance =
            values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance.sqrt() - 0.5).abs() < 0.01, "{variance}");
        // All four quadrants occur: both values of a pair take both signs, and they are independent.
        let product: f64 = values.chunks_exact(2).map(|pair| f64::from(pair[0]) * f64::from(pair[1])).sum();
        assert!((product / values.len() as f64).abs() < 0.005, "{product}");
        for parity in 0..2 {
            let positive = values.iter().skip(parity).step_by(2).filter(|&&x| x > 0.0).count() as f64;
            assert!((positive / values.len() as f64 - 0.25).abs() < 0.01, "{positive}");
        }
        let within = values.iter().filter(|x| x.abs() < 0.5).count() as f64 / values.len() as f64;
        assert!((within - 0.6827).abs() < 0.01, "{within}");
    }

    #[test]
    fn below_is_in_range_and_reaches_both_ends() {
        let mut random = Random::new(RandomKey::new(3, "below"), 0);
        let draws: Vec<u64> = (0..1000).map(|_| random.below(5)).collect();
        assert!((0..5).all(|value| draws.contains(&value)));
        assert!(draws.iter().all(|&value| value < 5));
    }
}
