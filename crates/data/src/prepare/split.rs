use crate::sampler::permuted;
use crate::{DataError, TokenFile, TokenFileWriter};
use std::ops::Range;

const COPY_TOKENS: u64 = 64 << 10;
/// The seed of the random choice. Any value works, but the same corpus must always be split the same way.
const SELECTION_SEED: u64 = 0;
/// Choosing stops when this fraction of the wanted tokens is reached. Filling the rest exactly would favor tiny documents.
const SELECTION_STOP_FRACTION: f64 = 0.95;

/// The choice of validation tokens.
#[derive(Debug, PartialEq, Eq)]
struct HeldOut {
    /// Indices of the short documents that are held out completely, ascending.
    documents: Vec<u64>,
    /// Maximum number of tokens of a short document. Short documents are held out completely or not at all; longer ones may be split.
    max_short_len: u64,
    /// Index of the first held-out token of long documents, counted over the tokens of all long documents.
    tail_start: u64,
}

/// Chooses about `fraction` of the tokens, rounded, at least one, but not all.
///
/// A document is long if it has more tokens than are held out in total. Short documents are visited in a fixed random
/// order. Each one that still fits is held out completely, until nearly `fraction` of the tokens of all short documents
/// is held out; filling the rest exactly would favor small documents. In addition, the tail of the concatenated long
/// documents is held out. If complete documents make up less than half of the tokens that short documents should
/// contribute, the tail of the whole corpus is held out instead.
fn held_out(all: &TokenFile, fraction: f64) -> Result<HeldOut, DataError> {
    let rounded = (fraction * all.num_tokens() as f64).round() as u64;
    let num_held_out = rounded.min(all.num_tokens().saturating_sub(1)).max(1);
    let share = |num_tokens: u64| {
        (u128::from(num_held_out) * u128::from(num_tokens) / u128::from(all.num_tokens().max(1))) as u64
    };
    let is_short = |document: &Range<u64>| document.end - document.start <= num_held_out;
    let mut num_short_tokens = 0;
    for document in all.documents() {
        let document = document?;
        num_short_tokens += if is_short(&document) { document.end - document.start } else { 0 };
    }
    let wanted = share(num_short_tokens);
    let (mut documents, mut num_taken) = (Vec::new(), 0);
    for position in 0..all.num_documents() {
        if num_taken as f64 >= SELECTION_STOP_FRACTION * wanted as f64 {
            break;
        }
        let index = permuted(position, all.num_documents(), SELECTION_SEED, 0);
        let document = all.document(index)?;
        let num_tokens = document.end - document.start;
        if is_short(&document) && num_taken + num_tokens <= wanted {
            num_taken += num_tokens;
            documents.push(index);
        }
    }
    if num_taken < wanted.div_ceil(2) {
        let tail_start = all.num_tokens() - num_held_out;
        return Ok(HeldOut { documents: Vec::new(), max_short_len: 0, tail_start });
    }
    documents.sort_unstable();
    let num_long_tokens = all.num_tokens() - num_short_tokens;
    let tail_start = num_long_tokens - (num_held_out - wanted).min(num_long_tokens);
    Ok(HeldOut { documents, max_short_len: num_held_out, tail_start })
}

/// Copies each token of `all` to either `train` or `validation`. After each document, calls `on_document` with the
/// number of documents and tokens that are done, and with the writer of the training part.
///
/// The split depends only on the ends of documents. It takes 8 bytes of memory for each document held out.
pub(super) fn split(
    all: &TokenFile,
    fraction: f64,
    train: &mut TokenFileWriter,
    validation: &mut TokenFileWriter,
    mut on_document: impl FnMut(u64, u64, &TokenFileWriter),
) -> Result<(), DataError> {
    let HeldOut { documents, max_short_len, tail_start } = held_out(all, fraction)?;
    let mut num_long_tokens = 0;
    for index in 0..all.num_documents() {
        let document = all.document(index)?;
        let num_tokens = document.end - document.start;
        if num_tokens > max_short_len {
            let middle = document.start + tail_start.saturating_sub(num_long_tokens).min(num_tokens);
            num_long_tokens += num_tokens;
            copy(all, document.start..middle, train)?;
            copy(all, middle..document.end, validation)?;
        } else if documents.binary_search(&index).is_ok() {
            copy(all, document.clone(), validation)?;
        } else {
            copy(all, document.clone(), train)?;
        }
        on_document(index + 1, document.end, train);
    }
    Ok(())
}

/// Copies `tokens` of `all` as one document.
fn copy(all: &TokenFile, tokens: Range<u64>, to: &mut TokenFileWriter) -> Result<(), DataError> {
    let mut buffer = vec![0; COPY_TOKENS.min(tokens.end - tokens.start) as usize];
    for start in tokens.clone().step_by(COPY_TOKENS as usize) {
        let part = &mut buffer[..COPY_TOKENS.min(tokens.end - start) as usize];
        all.read_window(start, part)?;
        to.push(part)?;
    }
    to.end_document()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn write(path: &std::path::Path, documents: &[Vec<u32>]) -> TokenFile {
        let mut writer = TokenFileWriter::create(path, 1 << 16).unwrap();
        for document in documents {
            writer.push(document).unwrap();
            writer.end_document().unwrap();
        }
        writer.finish().unwrap();
        TokenFile::open(path).unwrap()
    }

    /// Splits the documents, and returns the documents of each part, read from its file.
    fn split_documents(documents: &[Vec<u32>], fraction: f64) -> [Vec<Vec<u32>>; 2] {
        let folder = tempfile::tempdir().unwrap();
        let all = write(&folder.path().join("all"), documents);
        let paths = ["train", "validation"].map(|name| folder.path().join(name));
        let [mut train, mut validation] =
            paths.each_ref().map(|path| TokenFileWriter::create(path, 1 << 16).unwrap());
        split(&all, fraction, &mut train, &mut validation, |_, _, _| ()).unwrap();
        train.finish().unwrap();
        validation.finish().unwrap();
        paths.map(|path| {
            let file = TokenFile::open(&path).unwrap();
            file.documents()
                .map(Result::unwrap)
                .map(|document| {
                    let mut tokens = vec![0; (document.end - document.start) as usize];
                    file.read_window(document.start, &mut tokens).unwrap();
                    tokens
                })
                .collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_token_goes_to_one_side(
            lengths in prop::collection::vec(1_u32..200, 1..60),
            fraction in 0.01_f64..0.9,
        ) {
            let document = |(index, &length)| (0..length).map(|token| index as u32 * 256 + token).collect();
            let documents: Vec<Vec<u32>> = lengths.iter().enumerate().map(document).collect();
            let [train, validation] = split_documents(&documents, fraction);
            let mut together = [train.concat(), validation.concat()].concat();
            let mut expected = documents.concat();
            together.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(&together, &expected);
            let share = validation.concat().len() as f64 / expected.len() as f64;
            prop_assert!(share >= fraction / 2.0 - 1e-9);
            prop_assert!(share <= fraction + 1.0 / expected.len() as f64, "{} {}", share, fraction);
        }
    }

    #[test]
    fn many_documents_stay_whole_and_are_spread() {
        let documents: Vec<Vec<u32>> = (0..100).map(|document| vec![document; 10]).collect();
        let [train, validation] = split_documents(&documents, 0.05);
        assert!(validation.iter().all(|document| document.len() == 10));
        assert_eq!((train.len(), validation.len()), (95, 5));
        let indices: Vec<u32> = validation.iter().map(|document| document[0]).collect();
        assert!(indices.is_sorted() && indices[0] < 50 && indices[4] >= 50, "{indices:?}");
    }

    #[test]
    fn small_documents_are_not_favored() {
        let length = |document: u32| if document.is_multiple_of(2) { 100 } else { 4 };
        let documents: Vec<Vec<u32>> = (0..1000).map(|document| vec![document; length(document)]).collect();
        let [_, validation] = split_documents(&documents, 0.1);
        let num_small = validation.iter().filter(|document| document.len() == 4).count();
        assert!(
            (35..=65).contains(&(num_small * 100 / validation.len())),
            "{num_small} of {}",
            validation.len()
        );
    }

    #[test]
    fn a_single_document_gives_its_tail() {
        let [train, validation] = split_documents(&[(0..100).collect()], 0.05);
        assert_eq!(train, [(0..95).collect::<Vec<u32>>()]);
        assert_eq!(validation, [(95..100).collect::<Vec<u32>>()]);
    }

    #[test]
    fn something_is_left_to_train_on() {
        let [train, validation] = split_documents(&[vec![1; 50], vec![2; 50]], 0.995);
        assert_eq!((train.concat().len(), validation.concat().len()), (50, 50));
        let [train, validation] = split_documents(&[vec![1; 100]], 0.999);
        assert_eq!((train.concat().len(), validation.concat().len()), (1, 99));
    }

    #[test]
    fn two_large_documents_give_the_tail_of_the_last() {
        let [train, validation] = split_documents(&[(0..100).collect(), (100..200).collect()], 0.1);
        assert_eq!(train.iter().map(Vec::len).collect::<Vec<_>>(), [100, 80]);
        assert_eq!(validation, [(180..200).collect::<Vec<u32>>()]);
    }

    #[test]
    fn short_documents_give_their_share_next_to_a_long_one() {
        let short = (0..100).map(|document| vec![document; 10]);
        for is_long_first in [false, true] {
            let long = std::iter::once(vec![100; 9000]);
            let documents: Vec<Vec<u32>> = if is_long_first {
                long.chain(short.clone()).collect()
            } else {
                short.clone().chain(long).collect()
            };
            let [train, validation] = split_documents(&documents, 0.05);
            let mut lens: Vec<usize> = validation.iter().map(Vec::len).collect();
            lens.sort_unstable();
            assert_eq!(lens, [10, 10, 10, 10, 10, 450]);
            assert_eq!(train.len(), 96);
        }
    }

    /// Documents must stay complete, because a model learns from the ends of conversations how to end its answers.
    #[test]
    fn at_most_one_of_few_equal_documents_is_split() {
        let documents: Vec<Vec<u32>> = (0..15).map(|document| vec![document; 100]).collect();
        let [train, validation] = split_documents(&documents, 0.05);
        assert_eq!(train.iter().filter(|document| document.len() == 100).count(), 14);
        assert_eq!(validation, [vec![14; 75]]);
        // A complete document is held out if it fits exactly.
        let documents: Vec<Vec<u32>> = (0..49).map(|document| vec![document; 1000]).collect();
        let [train, validation] = split_documents(&documents, 1.0 / 49.0);
        assert!(train.len() == 48 && validation.len() == 1 && validation[0].len() == 1000);
    }
}
