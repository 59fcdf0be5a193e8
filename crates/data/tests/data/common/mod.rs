//! Small corpora for tests.

use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;
use trireme_data::{Corpus, PrepareOptions, TokenFile, Tokenizer};

/// A temporary folder with inputs in `in`. The output goes to `out`.
pub(crate) struct TestFolder {
    folder: TempDir,
}

impl TestFolder {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Self {
        let test_folder = TestFolder { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(test_folder.path("in")).unwrap();
        for (name, content) in files {
            let path = test_folder.path("in").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        test_folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns options that read `inputs` from `in` and hold out nothing.
    pub(crate) fn options(&self, inputs: &[&str]) -> PrepareOptions {
        let inputs = inputs.iter().map(|input| self.path("in").join(input)).collect();
        PrepareOptions { validation_fraction: 0.0, ..PrepareOptions::new(inputs, self.path("out")) }
    }

    /// Returns the documents of the training file, decoded.
    pub(crate) fn documents(&self) -> Vec<String> {
        let corpus = Corpus::open(&self.path("out")).unwrap();
        let tokenizer = Tokenizer::load(&self.path("out")).unwrap();
        decoded(&corpus.train.tokens, &tokenizer)
    }
}

pub(crate) fn decoded(file: &TokenFile, tokenizer: &Tokenizer) -> Vec<String> {
    let decode = |document: std::ops::Range<u64>| {
        let mut tokens = vec![0; (document.end - document.start) as usize];
        file.read_window(document.start, &mut tokens).unwrap();
        tokenizer.decode(&tokens).unwrap()
    };
    file.documents().map(Result::unwrap).map(decode).collect()
}

/// Returns for each document of the training file the text that counts in the loss.
pub(crate) fn counted(test_folder: &TestFolder) -> Vec<String> {
    let corpus = Corpus::open(&test_folder.path("out")).unwrap();
    let (tokenizer, mask) =
        (Tokenizer::load(&test_folder.path("out")).unwrap(), corpus.train.loss_mask.unwrap());
    let of_document = |document: std::ops::Range<u64>| {
        let read = |file: &TokenFile| {
            let mut values = vec![0; (document.end - document.start) as usize];
            file.read_window(document.start, &mut values).unwrap();
            values
        };
        let kept = read(&corpus.train.tokens).into_iter().zip(read(&mask)).filter(|(_, mask)| *mask == 1);
        // The end-of-document token has no text, so it is shown as `#`.
        let tokens = kept.map(|(token, _)| if token == 256 { u32::from(b'#') } else { token });
        tokenizer.decode(&tokens.collect::<Vec<_>>()).unwrap()
    };
    corpus.train.tokens.documents().map(Result::unwrap).map(of_document).collect()
}
