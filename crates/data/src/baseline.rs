use crate::{DataError, TokenFile};

/// Approximate number of training tokens that the baseline reads. Larger files are sampled in evenly spaced stretches.
const TRAIN_TOKENS_MAX: u64 = 16 << 20;
const VALIDATION_TOKENS_MAX: u64 = 4 << 20;
const STRETCH_TOKENS: u64 = 64 << 10;

/// Computes the loss of a bigram model of `train` on `validation`, in nats per token. A bigram model predicts each token from the one
/// before it. A network with a clearly lower loss has learned more than token pairs.
///
/// The probability of `b` after `a` is interpolated, `(count(ab) + k p(b)) / (count(a) + k)`, with add-one smoothed
/// `p(b) = (count(b) + 1) / (tokens + vocabulary)`: MacKay and Peto, "A hierarchical Dirichlet language model", Natural
/// Language Engineering 1 (3), 1995. The strength `k` is the power of two from 2⁻⁴ to 2¹⁶ that minimizes the loss on
/// `validation`, so the baseline is not weaker than necessary.
///
/// Costs one pass over both files, 24 bytes of memory for each id of the vocabulary, and 20 bytes for each distinct
/// pair of neighboring tokens in `validation`, since only these pairs are counted. Sorting the pairs takes 8 to 16 bytes
/// for each token of `validation`. If a file has more than 16 Mi (`train`) or 4 Mi tokens (`validation`), evenly spaced
/// stretches of it are used.
///
/// # Errors
/// If `validation` has fewer than two tokens, or a file cannot be read or is damaged.
pub fn bigram_baseline(train: &TokenFile, validation: &TokenFile) -> Result<f64, DataError> {
    let vocabulary_size = train.vocabulary_size().max(validation.vocabulary_size());
    let mut pairs = Bigrams::of(validation, vocabulary_size)?;
    let num_pairs: u64 = pairs.validation_counts.iter().sum();
    if num_pairs == 0 {
        return Err(DataError::TooFewTokens { num_tokens: validation.num_tokens(), seq_len: 1 });
    }
    let mut counts = vec![0_u64; vocabulary_size];
    let mut num_tokens = 0;
    for_each_stretch(train, TRAIN_TOKENS_MAX, |tokens| {
        num_tokens += tokens.len();
        tokens.iter().for_each(|&id| counts[id as usize] += 1);
        tokens.windows(2).for_each(|pair| pairs.count(pair[0], pair[1]));
    })?;
    let denominator = num_tokens as f64 + vocabulary_size as f64;
    let unigram: Vec<f64> = counts.iter().map(|&count| (count as f64 + 1.0) / denominator).collect();
    let loss = |strength: f64| {
        let nats = pairs.iter().map(|(a, b, occurrences, count)| {
            let context = counts[a as usize] as f64 + strength;
            let probability = (count as f64 + strength * unigram[b as usize]) / context;
            -probability.ln() * occurrences as f64
        });
        nats.sum::<f64>() / num_pairs as f64
    };
    Ok((-4..=16).map(|exponent| loss(f64::from(exponent).exp2())).fold(f64::INFINITY, f64::min))
}

/// The distinct pairs of neighboring tokens in the validation text, sorted.
struct Bigrams {
    /// The pairs whose first token is `a` have the indices `starts[a]..starts[a + 1]`.
    starts: Vec<usize>,
    /// The second token of each pair, in ascending order for each first token.
    followers: Vec<u32>,
    /// Number of occurrences of each pair in the validation text.
    validation_counts: Vec<u64>,
    /// Number of occurrences of each pair in the training text.
    train_counts: Vec<u64>,
}

impl Bigrams {
    fn of(validation: &TokenFile, vocabulary_size: usize) -> Result<Self, DataError> {
        let mut all: Vec<(u32, u32)> = Vec::new();
        for_each_stretch(validation, VALIDATION_TOKENS_MAX, |tokens| {
            all.extend(tokens.windows(2).map(|pair| (pair[0], pair[1])));
        })?;
        all.sort_unstable();
        let mut starts = vec![0; vocabulary_size + 1];
        let (mut followers, mut occurrences) = (Vec::new(), Vec::new());
        for equal in all.chunk_by(|one, other| one == other) {
            let (a, b) = equal[0];
            starts[a as usize + 1] += 1;
            followers.push(b);
            occurrences.push(equal.len() as u64);
        }
        for a in 0..vocabulary_size {
            starts[a + 1] += starts[a];
        }
        Ok(Bigrams {
            starts,
            train_counts: vec![0; followers.len()],
            followers,
            validation_counts: occurrences,
        })
    }

    fn count(&mut self, a: u32, b: u32) {
        let start = self.starts[a as usize];
        let followers = &self.followers[start..self.starts[a as usize + 1]];
        if let Ok(index) = followers.binary_search(&b) {
            self.train_counts[start + index] += 1;
        }
    }

    /// Returns for each pair its two tokens, its occurrences in the validation text, and its count in the training
    /// text.
    fn iter(&self) -> impl Iterator<Item = (u32, u32, u64, u64)> + '_ {
        self.starts.windows(2).enumerate().flat_map(move |(a, bounds)| {
            (bounds[0]..bounds[1]).map(move |index| {
                (a as u32, self.followers[index], self.validation_counts[index], self.train_counts[index])
            })
        })
    }
}

fn for_each_stretch(
    file: &TokenFile,
    tokens_max: u64,
    mut visit: impl FnMut(&[u32]),
) -> Result<(), DataError> {
    let num_tokens = file.num_tokens();
    let stride = num_tokens.div_ceil(tokens_max).max(1);
    let mut buffer = vec![0; STRETCH_TOKENS.min(num_tokens) as usize];
    for start in (0..num_tokens).step_by((STRETCH_TOKENS * stride) as usize) {
        let stretch = &mut buffer[..STRETCH_TOKENS.min(num_tokens - start) as usize];
        file.read_window(start, stretch)?;
        visit(stretch);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenFileWriter;
    use std::collections::HashMap;

    fn token_file(
        folder: &tempfile::TempDir,
        name: &str,
        tokens: &[u32],
        vocabulary_size: usize,
    ) -> TokenFile {
        let path = folder.path().join(name);
        let mut writer = TokenFileWriter::create(&path, vocabulary_size).unwrap();
        writer.push(tokens).unwrap();
        writer.finish().unwrap();
        TokenFile::open(&path).unwrap()
    }

    /// Evaluates the formula directly, with a hash map of all training pairs.
    fn naive(train: &[u32], validation: &[u32], vocabulary_size: usize, strength: f64) -> f64 {
        let mut pairs = HashMap::new();
        let mut singles = HashMap::new();
        train.windows(2).for_each(|pair| *pairs.entry((pair[0], pair[1])).or_insert(0.0) += 1.0);
        train.iter().for_each(|id| *singles.entry(*id).or_insert(0.0) += 1.0);
        let single = |id: u32| singles.get(&id).copied().unwrap_or(0.0);
        let total: f64 = validation
            .windows(2)
            .map(|pair| {
                let unigram = (single(pair[1]) + 1.0) / (train.len() as f64 + vocabulary_size as f64);
                let count = pairs.get(&(pair[0], pair[1])).copied().unwrap_or(0.0);
                -((count + strength * unigram) / (single(pair[0]) + strength)).ln()
            })
            .sum();
        total / (validation.len() - 1) as f64
    }

    #[test]
    fn agrees_with_a_direct_evaluation_of_the_formula() {
        let folder = tempfile::tempdir().unwrap();
        let text = |seed: u32, length: u32| -> Vec<u32> {
            (0..length).map(|i| (i * i * 7 + i * seed + i / 5) % 23).collect()
        };
        let (train, validation) = (text(3, 4000), text(5, 500));
        let expected = (-4..=16)
            .map(|exponent| naive(&train, &validation, 30, f64::from(exponent).exp2()))
            .fold(f64::INFINITY, f64::min);
        let baseline = bigram_baseline(
            &token_file(&folder, "train", &train, 30),
            &token_file(&folder, "validation", &validation, 30),
        )
        .unwrap();
        assert!((baseline - expected).abs() < 1e-12, "{baseline} {expected}");
    }

    #[test]
    fn a_cycle_has_almost_no_loss_and_noise_has_full_entropy() {
        let folder = tempfile::tempdir().unwrap();
        let cycle: Vec<u32> = (0..10_000).map(|i| i % 10).collect();
        let train = token_file(&folder, "cycle", &cycle, 70_000);
        let known = bigram_baseline(&train, &token_file(&folder, "more", &cycle[3..500], 70_000)).unwrap();
        assert!(known < 0.001, "{known}");
        let reversed: Vec<u32> = cycle.iter().rev().copied().collect();
        let surprised = bigram_baseline(&train, &token_file(&folder, "less", &reversed, 70_000)).unwrap();
        assert!(surprised > 10_f64.ln(), "{surprised}");
    }

    #[test]
    fn one_token_is_no_validation_text() {
        let folder = tempfile::tempdir().unwrap();
        let file = token_file(&folder, "short", &[1], 2);
        assert!(matches!(bigram_baseline(&file, &file), Err(DataError::TooFewTokens { .. })));
    }
}
