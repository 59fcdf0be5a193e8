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
