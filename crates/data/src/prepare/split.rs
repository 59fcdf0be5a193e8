use crate::sampler::permuted;
use crate::{DataError, TokenFile, TokenFileWriter};
use std::ops::Range;

const COPY_TOKENS: u64 = 64 << 10;
/// Any value does, but the same corpus must be split the same way every time.
const SELECTION_SEED: u64 = 0;
/// Going on until the last token fits would favour tiny documents.
const FRACTION_REACHED: f64 = 0.95;

/// Which tokens are held out for validation.
#[derive(Debug, PartialEq)]
struct HeldOut {
    /// These documents, as increasing indices.
    documents: Vec<u64>,
    /// Documents with more tokens than this give their ends instead.
    whole_max: f64,
    /// The share of these that is held out.
    fraction: f64,
}

impl HeldOut {
    fn gives_end(&self, document: &Range<u64>) -> bool {
        (document.end - document.start) as f64 > self.whole_max
    }
}

/// Chooses about `fraction` of the tokens.
///
/// Of documents that have more tokens than should be held out in all, it is the end of each. Of the others it is whole documents: in a fixed random
/// order each that still fits, until the fraction of their tokens is nearly reached, so that small and large documents are as likely. Where they are
/// too large for half of that, they give their ends as well. The fraction is never exceeded.
fn held_out(all: &TokenFile, fraction: f64) -> Result<HeldOut, DataError> {
    let num_held_out = (fraction * all.num_tokens() as f64).round().max(1.0);
    let fraction = num_held_out / all.num_tokens().max(1) as f64;
    let ends = HeldOut { documents: Vec::new(), whole_max: num_held_out, fraction };
    let mut num_in_whole = 0;
    for document in all.documents() {
        let document = document?;
        num_in_whole += if ends.gives_end(&document) { 0 } else { document.end - document.start };
    }
    let wanted = fraction * num_in_whole as f64;
    let (mut documents, mut num_taken) = (Vec::new(), 0);
    for position in 0..all.num_documents() {
        if num_taken as f64 >= FRACTION_REACHED * wanted {
            break;
        }
        let index = permuted(position, all.num_documents(), SELECTION_SEED, 0);
        let document = all.document(index)?;
        let num_tokens = document.end - document.start;
        if !ends.gives_end(&document) && (num_taken + num_tokens) as f64 <= wanted {
            num_taken += num_tokens;
            documents.push(index);
        }
    }
    if (num_taken as f64) < wanted / 2.0 {
        return Ok(HeldOut { whole_max: 0.0, ..ends });
    }
    documents.sort_unstable();
    Ok(HeldOut { documents, ..ends })
}

/// Copies each token of `all` to one of the two files; `on_document` hears how many documents, and tokens, are done.
///
/// What is held out depends on where documents end alone. Takes 8 bytes of memory for each document held out.
pub(super) fn split(
    all: &TokenFile,
    fraction: f64,
    train: &mut TokenFileWriter,
    validation: &mut TokenFileWriter,
    mut on_document: impl FnMut(u64, u64, &TokenFileWriter),
) -> Result<(), DataError> {
    let held_out = held_out(all, fraction)?;
    // Tokens up to here of the documents that give their ends: all together give the fraction, rounded once.
    let mut num_cut = 0;
    for index in 0..all.num_documents() {
        let document = all.document(index)?;
        if held_out.gives_end(&document) {
            let given = |num_tokens: u64| (held_out.fraction * num_tokens as f64).round() as u64;
            let before = num_cut;
            num_cut += document.end - document.start;
            let start = document.end - (given(num_cut) - given(before)).min(document.end - document.start);
            copy(all, document.start..start, train)?;
            copy(all, start..document.end, validation)?;
        } else if held_out.documents.binary_search(&index).is_ok() {
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

    /// The documents of each half, as they come back.
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
    fn small_documents_are_not_favoured() {
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
    fn large_documents_give_their_ends_and_small_ones_their_share() {
        let [train, validation] = split_documents(&[(0..100).collect(), (100..200).collect()], 0.1);
        assert_eq!(train.iter().map(Vec::len).collect::<Vec<_>>(), [90, 90]);
        let ends: [Vec<u32>; 2] = [(90..100).collect(), (190..200).collect()];
        assert_eq!(validation, ends);
        // Beside one that is larger than all that is held out, as many of the small ones as without it.
        let small = (0..100).map(|document| vec![document; 10]);
        let documents: Vec<Vec<u32>> = small.chain([vec![100; 9000]]).collect();
        let [_, validation] = split_documents(&documents, 0.05);
        assert_eq!(validation.len(), 6);
        assert_eq!(validation[5], [100; 450]);
        assert_eq!(validation[..5].iter().map(Vec::len).collect::<Vec<_>>(), [10; 5]);
        // Documents that are small beside all, but too large for their share, give their ends, too.
        let documents: Vec<Vec<u32>> =
            std::iter::repeat_n(48, 19).chain([88]).map(|len| vec![0; len]).collect();
        let [_, validation] = split_documents(&documents, 0.05);
        assert_eq!(validation.iter().map(Vec::len).sum::<usize>(), 50);
    }
}
