use crate::{DataError, Source, TokenFile};
use std::ops::Range;
use std::sync::Arc;
use trireme_base::RandomKey;

/// A training sample: the tokens `start..start + len` of a token file, in pass `epoch` over its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Number of complete earlier passes over the source.
    pub epoch: u64,
    /// Index of the first token.
    pub start: u64,
    /// Number of tokens: sequence length plus one, or fewer if complete documents do not fill the window.
    pub len: usize,
}

/// How tokens are divided into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Windows follow each other without gaps, regardless of document boundaries.
    Stream,
    /// Each window begins at the start of a document and contains the following documents as far as they fit
    /// completely. The rest of the window is padding. Only documents that are longer than a window are split into
    /// pieces, and a window begins within a document only if it contains such a piece.
    Documents,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Windows {
    /// `num_windows` windows of equal length, from token `first` on.
    Stream { first: u64, num_windows: u64 },
    /// Window `i` consists of the tokens `bounds[i]..bounds[i + 1]`. `num_split` documents are longer than a window and
    /// therefore split.
    Documents { bounds: Arc<[u64]>, num_split: u64 },
}

impl Windows {
    fn stream(tokens: Range<u64>, seq_len: usize) -> Self {
        let num_tokens = tokens.end - tokens.start;
        let num_windows = num_tokens.saturating_sub(1).checked_div(seq_len as u64).unwrap_or(0);
        Windows::Stream { first: tokens.start, num_windows }
    }

    /// Packs complete documents. A document that is only partly in `tokens` is truncated to the part within it.
    fn documents(file: &TokenFile, tokens: Range<u64>, seq_len: usize) -> Result<Self, DataError> {
        let len_max = seq_len as u64 + 1;
        let mut bounds = vec![tokens.start];
        let (mut end, mut num_split) = (tokens.start, 0);
        let mut index = file.document_at(tokens.start)?;
        while end < tokens.end {
            let document_end = file.document(index)?.end.min(tokens.end);
            if document_end - bounds.last().expect("there is a first") > len_max {
                // The document does not fit into the window of the documents before it.
                if end > *bounds.last().expect("there is a first") {
                    bounds.push(end);
                }
                num_split += u64::from(document_end - end > len_max);
                let whole = (end..document_end).step_by(len_max as usize).skip(1);
                bounds.extend(whole);
            }
            end = document_end;
            index += 1;
        }
        bounds.push(end);
        Ok(Windows::Documents { bounds: bounds.into(), num_split })
    }

    fn len(&self) -> u64 {
        match self {
            Windows::Stream { num_windows, .. } => *num_windows,
            Windows::Documents { bounds, .. } => bounds.len() as u64 - 1,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SourceWindows {
    windows: Windows,
    /// The shuffled order of the windows; `None` for the order of the file.
    order: Option<Shuffle>,
    /// Number of samples of this source in each block.
    num_per_block: u64,
}

/// Number of samples in a block. Each block contains samples of all sources in proportion to their weights, so each
/// source's share of the samples is rounded to a multiple of 1 / 4096.
const BLOCK_SAMPLES: u64 = 1 << 12;

/// The source of one sample in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockSlot {
    source: u32,
    /// Number of earlier samples of the source in the block.
    index_in_source: u32,
}

/// Maps the index of a sample in the run to a window of a token file.
///
/// With [`Packing::Stream`], tokens are divided into windows of `seq_len + 1`: the inputs, and the targets, which are
/// shifted by one. The inputs of two windows do not overlap, and a remainder that is too short for a window is not
/// used. Windows may contain the end of a document and the beginning of the next one. [`Packing::Documents`] keeps
/// documents together.
///
/// Samples are numbered over the whole run: rank `r` of `n` reads its share of the indices of each global batch, and
/// the order is the same for every `n`. The sampler has no other state, so a run resumes from the number of samples it
/// has seen.
///
/// The shuffled order is computed for each index in constant memory, in less than a microsecond. The windows of
/// [`Packing::Documents`] are stored, at 8 bytes each; other windows are computed.
///
/// If sources have weights, each block of 4096 samples contains samples of each source in proportion to its weight,
/// evenly spread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sampler {
    sources: Vec<SourceWindows>,
    /// The source of each sample in a block; empty if there is only one source.
    block: Arc<[BlockSlot]>,
    seq_len: usize,
}

impl Sampler {
    /// Creates a sampler of [`Packing::Stream`] windows over `num_tokens` tokens. With a `seed`, every epoch reads each
    /// window once, in an order that depends on the seed and the epoch. Without one, every epoch reads the windows in
    /// the order of the file: window `i` starts at token `(i mod num_windows) × seq_len`.
    ///
    /// # Errors
    /// If `num_tokens` are too few for one window.
    pub fn stream(num_tokens: u64, seq_len: usize, seed: Option<u64>) -> Result<Self, DataError> {
        Self::with_one_source(Windows::stream(0..num_tokens, seq_len), num_tokens, seq_len, seed)
    }

    /// Creates a sampler of the windows of a file, in shuffled order if a `seed` is given. If `sources` is not empty,
    /// samples are drawn from the sources in proportion to their weights.
    ///
    /// # Errors
    /// If the file or one of the sources has too few tokens for one window, or the file cannot be read.
    pub fn new(
        file: &TokenFile,
        sources: &[Source],
        seq_len: usize,
        packing: Packing,
        seed: Option<u64>,
    ) -> Result<Self, DataError> {
        let windows = |tokens: Range<u64>| match packing {
            Packing::Stream => Ok(Windows::stream(tokens, seq_len)),
            Packing::Documents => Windows::documents(file, tokens, seq_len),
        };
        let num_tokens = file.num_tokens();
        if sources.is_empty() {
            return Self::with_one_source(windows(0..num_tokens)?, num_tokens, seq_len, seed);
        }
        let num_per_block = samples_per_block(sources);
        let (mut of_sources, mut first) = (Vec::with_capacity(sources.len()), 0);
        for (index, (source, &num_places)) in sources.iter().zip(&num_per_block).enumerate() {
            let tokens = first..(first + source.num_tokens).min(num_tokens);
            first = tokens.end;
            let own = RandomKey::new(seed.unwrap_or_default(), "data.source").words(index as u64);
            let own_seed = seed.map(|_| u64::from(own[0]) << 32 | u64::from(own[1]));
            let one = Self::with_one_source(windows(tokens)?, source.num_tokens, seq_len, own_seed)?;
            of_sources.extend(
                one.sources.into_iter().map(|one| SourceWindows { num_per_block: num_places, ..one }),
            );
        }
        Ok(Sampler { sources: of_sources, block: spread(&num_per_block), seq_len })
    }

    fn with_one_source(
        windows: Windows,
        num_tokens: u64,
        seq_len: usize,
        seed: Option<u64>,
    ) -> Result<Self, DataError> {
        if windows.len() == 0 || num_tokens < 2 {
            return Err(DataError::TooFewTokens { num_tokens, seq_len });
        }
        let order = seed.map(|seed| Shuffle::new(windows.len(), seed));
        let sources = vec![SourceWindows { windows, order, num_per_block: BLOCK_SAMPLES }];
        Ok(Sampler { sources, block: Arc::default(), seq_len })
    }

    /// Number of windows in one pass over all tokens.
    pub fn num_windows(&self) -> u64 {
        self.sources.iter().map(|source| source.windows.len()).sum()
    }

    /// Number of documents that [`Packing::Documents`] splits because they are longer than a window; 0 for
    /// [`Packing::Stream`].
    pub fn num_split_documents(&self) -> u64 {
        let num_split = |source: &SourceWindows| match source.windows {
            Windows::Stream { .. } => 0,
            Windows::Documents { num_split, .. } => num_split,
        };
        self.sources.iter().map(num_split).sum()
    }

    /// Returns the window of sample `global_sample_index` of the run.
    pub fn window(&self, global_sample_index: u64) -> Window {
        let (source, index) = self.source(global_sample_index);
        let num_windows = source.windows.len();
        let epoch = index / num_windows;
        let window = match source.order {
            Some(shuffle) => shuffle.element_at(index),
            None => index % num_windows,
        };
        match &source.windows {
            Windows::Stream { first, .. } => {
                Window { epoch, start: first + window * self.seq_len as u64, len: self.seq_len + 1 }
            }
            Windows::Documents { bounds, .. } => {
                let [start, end] = [window, window + 1].map(|bound| bounds[bound as usize]);
                Window { epoch, start, len: (end - start) as usize }
            }
        }
    }

    /// Returns the source of a sample, and the index of the sample within the source.
    fn source(&self, global_sample_index: u64) -> (&SourceWindows, u64) {
        if self.block.is_empty() {
            return (&self.sources[0], global_sample_index);
        }
        let BlockSlot { source, index_in_source } =
            self.block[(global_sample_index % BLOCK_SAMPLES) as usize];
        let source = &self.sources[source as usize];
        (source, global_sample_index / BLOCK_SAMPLES * source.num_per_block + u64::from(index_in_source))
    }
}

/// Assigns the samples of a block to sources, evenly spread: the next sample is of the source that is farthest behind
/// its share.
fn spread(num_per_block: &[u64]) -> Arc<[BlockSlot]> {
    let mut counts = vec![0_u64; num_per_block.len()];
    let next = |done: u64| {
        let behind = |source: &usize| {
            (num_per_block[*source] * (done + 1)) as i64 - (counts[*source] * BLOCK_SAMPLES) as i64
        };
        let source = (0..num_per_block.len()).rev().max_by_key(behind).expect("there are sources");
        let slot = BlockSlot { source: source as u32, index_in_source: counts[source] as u32 };
        counts[source] += 1;
        slot
    };
    (0..BLOCK_SAMPLES).map(next).collect()
}

/// Returns the number of samples of each source in a block: proportional to the weights, at least one for each source,
/// and rounded so that the sum is the block's size. The largest remainders are rounded up.
fn samples_per_block(sources: &[Source]) -> Vec<u64> {
    let total: f64 = sources.iter().map(|source| source.weight).sum();
    let exact: Vec<f64> = sources.iter().map(|source| source.weight / total * BLOCK_SAMPLES as f64).collect();
    let mut counts: Vec<u64> = exact.iter().map(|exact| (exact.floor() as u64).max(1)).collect();
    let mut by_remainder: Vec<usize> = (0..sources.len()).collect();
    by_remainder.sort_by(|&a, &b| (exact[b] - exact[b].floor()).total_cmp(&(exact[a] - exact[a].floor())));
    for &index in by_remainder.iter().cycle().take(sources.len()) {
        if counts.iter().sum::<u64>() < BLOCK_SAMPLES {
            counts[index] += 1;
        }
    }
    // Samples that were added to give each source at least one are taken from the source that has most.
    while counts.iter().sum::<u64>() > BLOCK_SAMPLES {
        *counts.iter_mut().max().expect("there are sources") -= 1;
    }
    counts
}

/// A pseudorandom permutation of `0..count` for each epoch. The element at a position is computed in constant memory,
/// in less than a microsecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shuffle {
    count: u64,
    seed: u64,
}

impl Shuffle {
    /// Creates the permutations of `0..count` that depend on `seed` and the epoch.
    ///
    /// # Panics
    /// If `count` is 0.
    pub fn new(count: u64, seed: u64) -> Self {
        assert!(count > 0, "there is nothing to shuffle");
        Shuffle { count, seed }
    }

    /// Returns the element of `0..count` at position `index` of the run. Each epoch has `count` positions.
    pub fn element_at(&self, index: u64) -> u64 {
        permuted(index % self.count, self.count, self.seed, index / self.count)
    }
}

const FEISTEL_ROUNDS: u64 = 8;

/// Returns the image of `position` under the permutation of `0..count` for `(seed, epoch)`.
///
/// A Feistel network permutes a domain of 4^n elements, the smallest one that contains `0..count`. It is applied
/// repeatedly until the result is below `count` (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite
/// domains", CT-RSA 2002). The domain has fewer than `4 * count` elements, so at most four applications are expected.
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
                Sampler::stream(tokens, seq_len, Some(1)).unwrap(),
                Sampler::stream(tokens, seq_len, None).unwrap(),
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
            let sampler = Sampler::stream(101 * 8 + 1, 8, Some(seed)).unwrap();
            (0..101).map(|position| sampler.window(epoch * 101 + position).start).collect()
        };
        assert_eq!(order(1, 0), order(1, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 0), (0..101).map(|window| window * 8).collect::<Vec<_>>());
    }

    #[test]
    fn permutations_are_uniform() {
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
        // Resuming a run of an earlier version requires the same order.
        let sampler = Sampler::stream(1001, 10, Some(42)).unwrap();
        let starts: Vec<u64> = (98..104).map(|index| sampler.window(index).start).collect();
        assert_eq!(starts, [110, 530, 670, 80, 720, 110]);
    }

    #[test]
    fn sequential_windows_wrap_at_the_last_whole_one() {
        let sampler = Sampler::stream(26, 5, None).unwrap();
        assert_eq!(sampler.num_windows(), 5);
        assert_eq!(sampler.window(4), Window { epoch: 0, start: 20, len: 6 });
        assert_eq!(sampler.window(5), Window { epoch: 1, start: 0, len: 6 });
        assert_eq!(Sampler::stream(25, 5, None).unwrap().num_windows(), 4);
    }

    #[test]
    fn too_few_tokens_are_refused() {
        for (tokens, seq_len) in [(0, 1), (1, 1), (8, 8), (5, 0)] {
            let error = Sampler::stream(tokens, seq_len, Some(0)).unwrap_err();
            assert!(matches!(error, DataError::TooFewTokens { .. }), "{error}");
        }
    }

    /// Writes a token file with documents of these lengths.
    fn documents(lengths: &[u32]) -> (tempfile::TempDir, TokenFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let mut writer = crate::TokenFileWriter::create(&path, 1 << 10).unwrap();
        for (index, &length) in lengths.iter().enumerate() {
            writer.push(&vec![index as u32; length as usize]).unwrap();
            writer.end_document().unwrap();
        }
        writer.finish().unwrap();
        (folder, TokenFile::open(&path).unwrap())
    }

    #[test]
    fn documents_are_whole_where_they_fit() {
        let (_folder, file) = documents(&[3, 2, 4, 6, 1, 13, 2]);
        let sampler = Sampler::new(&file, &[], 5, Packing::Documents, None).unwrap();
        let windows: Vec<(u64, usize)> = (0..sampler.num_windows())
            .map(|index| sampler.window(index))
            .map(|window| (window.start, window.len))
            .collect();
        // Document lengths per window: 3 + 2; 4; 6; 1; then the document of 13 as 6, 6, and its last token with the document of 2.
        assert_eq!(windows, [(0, 5), (5, 4), (9, 6), (15, 1), (16, 6), (22, 6), (28, 3)]);
        let shuffled = Sampler::new(&file, &[], 5, Packing::Documents, Some(3)).unwrap();
        let mut starts: Vec<u64> = (0..7).map(|index| shuffled.window(index).start).collect();
        starts.sort_unstable();
        assert_eq!(starts, [0, 5, 9, 15, 16, 22, 28]);
    }

    #[test]
    fn sources_are_sampled_by_weight_and_each_window_once_per_pass() {
        let (_folder, file) = documents(&[4001, 101]);
        let source = |weight, num_tokens| Source { input: String::new(), weight, num_tokens };
        let sources = [source(1.0, 4001), source(3.0, 101)];
        let sampler = Sampler::new(&file, &sources, 10, Packing::Stream, Some(7)).unwrap();
        let starts: Vec<u64> = (0..2 * BLOCK_SAMPLES).map(|index| sampler.window(index).start).collect();
        let of_second = |starts: &[u64]| starts.iter().filter(|start| **start >= 4001).count() as u64;
        assert_eq!(of_second(&starts[..BLOCK_SAMPLES as usize]), BLOCK_SAMPLES / 4 * 3);
        assert_eq!(of_second(&starts), BLOCK_SAMPLES / 2 * 3);
        // The samples of the two sources are interleaved.
        assert!((600..900).contains(&of_second(&starts[..1000])), "{}", of_second(&starts[..1000]));
        let mut first_pass: Vec<u64> =
            starts.iter().filter(|start| **start < 4001).take(400).copied().collect();
        first_pass.sort_unstable();
        assert_eq!(first_pass, (0..400).map(|window| window * 10).collect::<Vec<_>>());
        let missing = [source(1.0, 4001), source(1e-9, 5)];
        assert!(Sampler::new(&file, &missing, 10, Packing::Stream, Some(7)).is_err());
    }

    proptest! {
        #[test]
        fn a_block_has_samples_of_all_sources(weights in prop::collection::vec(1e-6_f64..1e6, 1..40)) {
            let source = |&weight: &f64| Source { input: String::new(), weight, num_tokens: 1 };
            let found = samples_per_block(&weights.iter().map(source).collect::<Vec<_>>());
            prop_assert_eq!(found.iter().sum::<u64>(), BLOCK_SAMPLES);
            prop_assert!(found.iter().all(|&places| places > 0));
            for (source, &places) in found.iter().enumerate() {
                let own = spread(&found).iter().filter(|place| place.source as usize == source).count();
                prop_assert_eq!(own as u64, places);
            }
        }
    }
}
