use crate::DataError;
use trireme_base::RandomKey;

/// In which order the windows of a token file are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Shuffled(Shuffle),
    Sequential,
}

/// One sample: the tokens `start..start + seq_len + 1` of the file, in pass `epoch` over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// How many whole passes over the file came before, from 0.
    pub epoch: u64,
    /// The index of the first token.
    pub start: u64,
}

/// Says which window of a token file is sample `i` of the run.
///
/// The tokens are cut into windows of `seq_len + 1`: the inputs, and the targets one further. The inputs of
/// two windows do not overlap; a last piece that is too short is left out. Windows are cut regardless of
/// documents, so one may hold the end of a document and the beginning of the next.
///
/// A sample is addressed by its index in the whole run, whichever rank reads it: rank `r` of `n` takes its
/// share of each global batch's indices, and the order is the same for any `n`. The index is the whole state,
/// so a run resumes from the number of samples it has seen.
///
/// A sampler holds no list of windows: the shuffled order is computed for each index, in constant memory, at
/// less than a microsecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    num_windows: u64,
    seq_len: u64,
    order: Order,
}

impl Sampler {
    /// Every epoch reads each window once, in an order that depends on `seed` and the epoch.
    ///
    /// # Errors
    /// If `num_tokens` are too few for one window.
    pub fn shuffled(num_tokens: u64, seq_len: usize, seed: u64) -> Result<Self, DataError> {
        let order = |num_windows| Order::Shuffled(Shuffle::new(num_windows, seed));
        Self::new(num_tokens, seq_len, order)
    }

    /// Every epoch reads the windows in the order of the file: window `i` starts at token
    /// `(i mod num_windows) × seq_len`. For validation, and for comparisons with other frameworks.
    ///
    /// # Errors
    /// If `num_tokens` are too few for one window.
    pub fn sequential(num_tokens: u64, seq_len: usize) -> Result<Self, DataError> {
        Self::new(num_tokens, seq_len, |_| Order::Sequential)
    }

    fn new(num_tokens: u64, seq_len: usize, order: impl Fn(u64) -> Order) -> Result<Self, DataError> {
        let num_windows = num_tokens.saturating_sub(1).checked_div(seq_len as u64).unwrap_or(0);
        if num_windows == 0 {
            return Err(DataError::TooFewTokens { num_tokens, seq_len });
        }
        Ok(Sampler { num_windows, seq_len: seq_len as u64, order: order(num_windows) })
    }

    /// Windows in one epoch.
    pub fn num_windows(&self) -> u64 {
        self.num_windows
    }

    /// The window that is sample `global_sample_index` of the run.
    pub fn window(&self, global_sample_index: u64) -> Window {
        let epoch = global_sample_index / self.num_windows;
        let position = global_sample_index % self.num_windows;
        let window = match self.order {
            Order::Shuffled(shuffle) => shuffle.place(global_sample_index),
            Order::Sequential => position,
        };
        Window { epoch, start: window * self.seq_len }
    }
}

/// A random order of `0..count` for each pass over them, which is computed for each index: in constant memory, at less than a
/// microsecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shuffle {
    count: u64,
    seed: u64,
}

impl Shuffle {
    /// Orders of `0..count` that depend on `seed` and the pass.
    ///
    /// # Panics
    /// If `count` is 0.
    pub fn new(count: u64, seed: u64) -> Self {
        assert!(count > 0, "there is nothing to shuffle");
        Shuffle { count, seed }
    }

    /// Which of `0..count` comes at `index` of the run. Each `count` indices are a pass.
    pub fn place(&self, index: u64) -> u64 {
        permuted(index % self.count, self.count, self.seed, index / self.count)
    }
}

const FEISTEL_ROUNDS: u64 = 8;

/// Where `position` goes under the permutation of `0..count` that belongs to `(seed, epoch)`.
///
/// A Feistel network permutes the smallest power of four that holds `count`; values outside `0..count` are
/// sent through it again until they fall inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary
/// finite domains", CT-RSA 2002). The domain is less than four times `count`, so four trips are expected at
/// most.
pub(crate) fn permuted(position: u64, count: u64, seed: u64, epoch: u64) -> u64 {
    let half_bits = (u64::BITS - (count - 1).leading_zeros()).div_ceil(2);
    let half_mask = (1_u64 << half_bits) - 1;
    let [low, high, ..] = RandomKey::new(seed, "data.epoch").words(epoch);
    let key = RandomKey::new(u64::from(high) << 32 | u64::from(low), "data.order");
    let mut value = position;
    loop {
        let (mut left, mut right) = (value >> half_bits, value & half_mask);
        for round in 0..FEISTEL_ROUNDS {
            let [word, ..] = key.words(round << 32 | right);
            (left, right) = (right, left ^ (u64::from(word) & half_mask));
        }
        value = left << half_bits | right;
        if value < count {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_epoch_reads_every_window_once(count in 1_u64..2000, seed: u64, epoch in 0_u64..1 << 40) {
            let mut seen = vec![false; count as usize];
            for position in 0..count {
                let window = permuted(position, count, seed, epoch) as usize;
                prop_assert!(!std::mem::replace(&mut seen[window], true));
            }
        }

        #[test]
        fn windows_lie_inside_the_file(tokens in 2_u64..u64::MAX / 2, seq_len in 1_usize..5000, index: u64) {
            prop_assume!(tokens > seq_len as u64);
            for sampler in [
                Sampler::shuffled(tokens, seq_len, 1).unwrap(),
                Sampler::sequential(tokens, seq_len).unwrap(),
            ] {
                let window = sampler.window(index);
                prop_assert!(window.start + (seq_len as u64) < tokens);
                prop_assert_eq!(window.start % seq_len as u64, 0);
                prop_assert_eq!(window.epoch, index / sampler.num_windows());
            }
        }
    }

    #[test]
    fn epochs_and_seeds_have_their_own_order() {
        let order = |seed, epoch: u64| -> Vec<u64> {
            let sampler = Sampler::shuffled(101 * 8 + 1, 8, seed).unwrap();
            (0..101).map(|position| sampler.window(epoch * 101 + position).start).collect()
        };
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 0), (0..101).map(|window| window * 8).collect::<Vec<_>>());
    }

    #[test]
    fn every_window_is_as_likely_everywhere() {
        for count in [2_u64, 3, 5, 7, 16] {
            let epochs = 4000;
            let mut tally = vec![0_u32; (count * count) as usize];
            for epoch in 0..epochs {
                for position in 0..count {
                    tally[(position * count + permuted(position, count, 11, epoch)) as usize] += 1;
                }
            }
            let expected = epochs as f64 / count as f64;
            let chi_squared: f64 =
                tally.iter().map(|&seen| (f64::from(seen) - expected).powi(2) / expected).sum();
            let freedom = ((count - 1) * (count - 1)) as f64;
            // Five standard deviations above the mean of the distribution.
            assert!(chi_squared < freedom + 5.0 * (2.0 * freedom).sqrt(), "{count}: {chi_squared}");
        }
    }

    #[test]
    fn the_order_never_changes() {
        // Resuming an old run depends on it.
        let sampler = Sampler::shuffled(1001, 10, 42).unwrap();
        let starts: Vec<u64> = (98..104).map(|index| sampler.window(index).start).collect();
        assert_eq!(starts, [110, 530, 670, 80, 720, 110]);
    }

    #[test]
    fn sequential_windows_wrap_at_the_last_whole_one() {
        let sampler = Sampler::sequential(26, 5).unwrap();
        assert_eq!(sampler.num_windows(), 5);
        assert_eq!(sampler.window(4), Window { epoch: 0, start: 20 });
        assert_eq!(sampler.window(5), Window { epoch: 1, start: 0 });
        assert_eq!(Sampler::sequential(25, 5).unwrap().num_windows(), 4);
    }

    #[test]
    fn too_few_tokens_are_refused() {
        for (tokens, seq_len) in [(0, 1), (1, 1), (8, 8), (5, 0)] {
            let error = Sampler::shuffled(tokens, seq_len, 0).unwrap_err();
            assert!(matches!(error, DataError::TooFewTokens { .. }), "{error}");
        }
    }
}
