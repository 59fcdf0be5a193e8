//! Token files: written tokens are read back, and modified files are refused.

use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use trireme_base::DType;
use trireme_data::{DataError, TokenFile, TokenFileWriter};

fn write(path: &Path, documents: &[Vec<u32>], vocabulary_size: usize) {
    let mut writer = TokenFileWriter::create(path, vocabulary_size).unwrap();
    for document in documents {
        writer.push(document).unwrap();
        writer.end_document().unwrap();
    }
    writer.finish().unwrap();
}

fn read_all(file: &TokenFile) -> Vec<u32> {
    let mut tokens = vec![0; file.num_tokens() as usize];
    file.read_window(0, &mut tokens).unwrap();
    tokens
}

fn two_documents() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    write(&path, &[(0..100).collect(), (100..150).collect()], 257);
    (folder, path)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn written_tokens_are_read_back(
        lengths in prop::collection::vec(0_usize..40_000, 0..6),
        vocabulary_size in prop::sample::select(vec![1_usize, 257, 65_536, 65_537, 1 << 24]),
        start in 0.0_f64..1.0,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tokens");
        let id = |document, index| ((document * 7919 + index * 104_729) % vocabulary_size) as u32;
        let documents: Vec<Vec<u32>> =
            lengths.iter().enumerate().map(|(d, &n)| (0..n).map(|i| id(d, i)).collect()).collect();
        write(&path, &documents, vocabulary_size);
        let file = TokenFile::open(&path).unwrap();
        let expected = documents.concat();
        prop_assert_eq!(file.dtype(), if vocabulary_size <= 65_536 { DType::U16 } else { DType::U32 });
        prop_assert_eq!(file.vocabulary_size(), vocabulary_size);
        prop_assert!(read_all(&file) == expected);
        let mut end = 0;
        let mut ranges = Vec::new();
        for &length in lengths.iter().filter(|&&length| length > 0) {
            ranges.push(end..end + length as u64);
            end += length as u64;
        }
        prop_assert_eq!(file.num_documents(), ranges.len() as u64);
        prop_assert_eq!(file.documents().map(Result::unwrap).collect::<Vec<_>>(), ranges.clone());
        let start = (start * expected.len() as f64) as usize;
        let mut window = vec![0; (expected.len() - start).min(1000)];
        file.read_window(start as u64, &mut window).unwrap();
        prop_assert_eq!(&window[..], &expected[start..start + window.len()]);
        let mut starts = window;
        file.document_starts(start as u64, &mut starts).unwrap();
        for (place, found) in starts.into_iter().enumerate() {
            let token = (start + place) as u64;
            let index = ranges.iter().position(|range| range.contains(&token)).unwrap();
            prop_assert_eq!(file.document_at(token).unwrap(), index as u64);
            prop_assert_eq!(u64::from(found), ranges[index].start.saturating_sub(start as u64));
        }
        prop_assert_eq!(file.document_at(expected.len() as u64).unwrap(), ranges.len() as u64);
    }
}

#[test]
fn every_flipped_byte_is_refused() {
    let (_folder, path) = two_documents();
    let good = fs::read(&path).unwrap();
    for index in 0..good.len() {
        let mut bad = good.clone();
        bad[index] ^= 0x10;
        fs::write(&path, &bad).unwrap();
        assert!(TokenFile::open(&path).is_err(), "byte {index}");
    }
    fs::write(&path, &good).unwrap();
    TokenFile::open(&path).unwrap();
}

#[test]
fn every_other_length_is_refused() {
    let (_folder, path) = two_documents();
    let good = fs::read(&path).unwrap();
    for length in 0..good.len() {
        fs::write(&path, &good[..length]).unwrap();
        let error = TokenFile::open(&path).unwrap_err();
        match error {
            DataError::NotATokenFile { .. } if length < 8 => {}
            DataError::TokenFileLength { actual_bytes, .. } => assert_eq!(actual_bytes, length as u64),
            other => panic!("{length}: {other}"),
        }
    }
    fs::write(&path, [&good[..], &[0]].concat()).unwrap();
    assert!(matches!(TokenFile::open(&path), Err(DataError::TokenFileLength { .. })));
}

#[test]
fn an_id_outside_the_vocabulary_is_refused_even_under_valid_checksums() {
    let (_folder, path) = two_documents();
    let mut bytes = fs::read(&path).unwrap();
    bytes[64..66].copy_from_slice(&257_u16.to_le_bytes());
    let tables = 64 + 150 * 2;
    let block = crc32fast::hash(&bytes[64..tables]);
    bytes[tables + 16..].copy_from_slice(&block.to_le_bytes());
    let of_tables = crc32fast::hash(&bytes[tables..]);
    bytes[56..60].copy_from_slice(&of_tables.to_le_bytes());
    let of_header = crc32fast::hash(&bytes[..60]);
    bytes[60..64].copy_from_slice(&of_header.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let error = TokenFile::open(&path).unwrap_err();
    assert!(
        matches!(error, DataError::TokenOutsideVocabulary { id: 257, vocabulary_size: 257, .. }),
        "{error}"
    );
}

#[test]
fn documents_out_of_order_are_refused_even_under_valid_checksums() {
    let (_folder, path) = two_documents();
    let good = fs::read(&path).unwrap();
    let tables = 64 + 150 * 2;
    for (first, second) in [(0_u64, 150_u64), (150, 150), (200, 150), (100, 149), (100, u64::MAX)] {
        let mut bytes = good.clone();
        bytes[tables..tables + 8].copy_from_slice(&first.to_le_bytes());
        bytes[tables + 8..tables + 16].copy_from_slice(&second.to_le_bytes());
        let of_tables = crc32fast::hash(&bytes[tables..]);
        bytes[56..60].copy_from_slice(&of_tables.to_le_bytes());
        let of_header = crc32fast::hash(&bytes[..60]);
        bytes[60..64].copy_from_slice(&of_header.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let error = TokenFile::open(&path).unwrap_err().to_string();
        assert!(error.contains("its documents"), "{first} {second}: {error}");
    }
}

#[test]
fn an_unfinished_file_vanishes_and_an_existing_one_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.tokens");
    let mut writer = TokenFileWriter::create(&path, 10).unwrap();
    writer.push(&[1, 2, 3]).unwrap();
    let error = writer.push(&[10]).unwrap_err();
    assert!(matches!(error, DataError::TokenOutsideVocabulary { id: 10, .. }), "{error}");
    drop(writer);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

    write(&path, &[vec![1]], 10);
    assert!(matches!(TokenFileWriter::create(&path, 10), Err(DataError::Write { .. })));
    assert_eq!(read_all(&TokenFile::open(&path).unwrap()), [1]);
}

#[test]
fn impossible_vocabularies_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    for vocabulary_size in [0, (1 << 24) + 1] {
        assert!(matches!(
            TokenFileWriter::create(&path, vocabulary_size),
            Err(DataError::VocabularySize { .. })
        ));
        assert!(matches!(
            TokenFile::open_flat_u16(&path, vocabulary_size),
            Err(DataError::VocabularySize { .. })
        ));
    }
}

#[test]
fn flat_files_are_read_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.u16");
    let tokens: Vec<u16> = (0..100_000_u32).map(|i| (i * 31 % 512) as u16).collect();
    fs::write(&path, tokens.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let file = TokenFile::open_flat_u16(&path, 512).unwrap();
    assert!(read_all(&file).iter().zip(&tokens).all(|(&read, &id)| read == u32::from(id)));
    assert_eq!((file.num_tokens(), file.num_documents()), (100_000, 0));
    assert_eq!(file.documents().count(), 0);
    let error = TokenFile::open_flat_u16(&path, 511).unwrap_err();
    assert!(matches!(error, DataError::TokenOutsideVocabulary { id: 511, .. }), "{error}");
    for bytes in [&[][..], &[1, 2, 3]] {
        fs::write(&path, bytes).unwrap();
        let error = TokenFile::open_flat_u16(&path, 512).unwrap_err();
        assert!(matches!(error, DataError::FlatFileLength { .. }), "{error}");
    }
}

#[test]
fn a_file_that_is_not_a_token_file_is_refused_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    fs::write(&path, "just some text, longer than the header of a token file would be, really").unwrap();
    assert!(matches!(TokenFile::open(&path), Err(DataError::NotATokenFile { .. })));
    assert!(matches!(TokenFile::open(folder.path()), Err(DataError::NotATokenFile { .. })));
    assert!(matches!(TokenFile::open(&folder.path().join("none")), Err(DataError::Read { .. })));
}

#[test]
#[should_panic(expected = "past the end of 150 tokens")]
fn a_window_past_the_end_panics() {
    let (_folder, path) = two_documents();
    let _ = TokenFile::open(&path).unwrap().read_window(100, &mut [0; 51]);
}

/// Opens the file at `path` with a modification time in the past, so that any later change is noticeable.
fn open_aged(path: &Path) -> TokenFile {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    fs::File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    TokenFile::open(path).unwrap()
}

#[test]
fn a_file_truncated_in_use_is_an_error_that_names_it() {
    let (_folder, path) = two_documents();
    let flat = path.with_extension("u16");
    fs::write(&flat, [1; 1 << 16]).unwrap();
    for (path, file) in
        [(&flat, TokenFile::open_flat_u16(&flat, 300).unwrap()), (&path, TokenFile::open(&path).unwrap())]
    {
        let expected = fs::metadata(path).unwrap().len();
        fs::File::options().write(true).open(path).unwrap().set_len(80).unwrap();
        let error = file.read_window(file.num_tokens() - 100, &mut [0; 100]).unwrap_err();
        assert!(
            matches!(&error, DataError::TokenFileLength { expected_bytes, actual_bytes: 80, .. }
                if *expected_bytes == expected),
            "{error}"
        );
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_file_overwritten_in_use_is_an_error_that_names_it() {
    let (_folder, path) = two_documents();
    let good = fs::read(&path).unwrap();
    let mut other_tokens = good.clone();
    other_tokens[64..66].copy_from_slice(&7_u16.to_le_bytes());
    let other = path.with_extension("other");
    write(&other, &[(0..100).rev().collect(), (0..50).collect()], 257);
    let other_corpus = fs::read(other).unwrap();
    for overwritten in [&other_tokens, &other_corpus] {
        fs::write(&path, &good).unwrap();
        let file = open_aged(&path);
        file.read_window(0, &mut [0; 150]).unwrap();
        fs::write(&path, overwritten).unwrap();
        for _ in 0..2 {
            let error = file.read_window(0, &mut [0; 150]).unwrap_err();
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
    }
    fs::write(&path, &good).unwrap();
    let file = open_aged(&path);
    fs::write(&path, &good).unwrap();
    file.read_window(0, &mut [0; 150]).expect("the same bytes were written again");
}

#[test]
fn an_invalid_id_written_to_an_open_flat_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.u16");
    fs::write(&path, [1; 1000]).unwrap();
    let file = TokenFile::open_flat_u16(&path, 300).unwrap();
    file.read_window(0, &mut [0; 500]).unwrap();
    let mut bytes = [1; 1000];
    bytes[700..702].copy_from_slice(&300_u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let error = file.read_window(300, &mut [0; 100]).unwrap_err();
    assert!(matches!(error, DataError::TokenOutsideVocabulary { index: 350, id: 300, .. }), "{error}");
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}
