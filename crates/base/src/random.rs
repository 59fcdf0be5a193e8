//! Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011). A value is a pure function of (key, counter), so any rank
//! can compute any part of a stream, in any order, and get the same bits.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Names one stream: the run's seed and what the numbers are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RandomKey {
    key: [u32; 2],
    stream: u64,
}

impl RandomKey {
    /// The stream of `purpose` (such as a parameter's name) under `seed`.
    pub fn new(seed: u64, purpose: &str) -> Self {
        // FNV-1a: names a stream, protects nothing.
        let stream = purpose.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        RandomKey { key: [seed as u32, (seed >> 32) as u32], stream }
    }

    /// Four random words at position `counter` of the stream.
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

    /// Fills `out` with normal variates of mean 0 and the given standard deviation, by the
    /// Box-Muller transform; element `i` depends on the key and `i` alone.
    pub fn fill_normal(self, out: &mut [f32], standard_deviation: f32) {
        for (counter, chunk) in out.chunks_mut(4).enumerate() {
            let [a, b, c, d] = self.words(counter as u64);
            let (x0, x1) = normal_pair(a, b);
            let (x2, x3) = normal_pair(c, d);
            for (slot, value) in chunk.iter_mut().zip([x0, x1, x2, x3]) {
                *slot = value * standard_deviation;
            }
        }
    }
}

fn normal_pair(a: u32, b: u32) -> (f32, f32) {
    // (0, 1], so that the logarithm is finite.
    let u = (f64::from(a) + 1.0) / 4_294_967_296.0;
    let angle = std::f64::consts::TAU * f64::from(b) / 4_294_967_296.0;
    let radius = (-2.0 * u.ln()).sqrt();
    ((radius * angle.cos()) as f32, (radius * angle.sin()) as f32)
}

/// Reads a stream in order. Its whole state is `(key, position)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Random {
    key: RandomKey,
    position: u64,
}

impl Random {
    /// Starts at `position` words into the stream of `key`.
    pub fn new(key: RandomKey, position: u64) -> Self {
        Random { key, position }
    }

    /// Words read so far: what to store to go on from here later.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        let word = self.key.words(self.position / 4)[(self.position % 4) as usize];
        self.position += 1;
        word
    }

    /// The next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) << 32 | u64::from(self.next_u32())
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform in `0..bound`, without bias (Lemire's rejection).
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
    fn normals_have_the_moments_asked_for() {
        let mut values = vec![0.0; 1 << 16];
        RandomKey::new(1, "normal").fill_normal(&mut values, 0.5);
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
        let variance =
            values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance.sqrt() - 0.5).abs() < 0.01, "{variance}");
    }

    #[test]
    fn below_is_in_range_and_reaches_both_ends() {
        let mut random = Random::new(RandomKey::new(3, "below"), 0);
        let draws: Vec<u64> = (0..1000).map(|_| random.below(5)).collect();
        assert!((0..5).all(|value| draws.contains(&value)));
        assert!(draws.iter().all(|&value| value < 5));
    }
}
