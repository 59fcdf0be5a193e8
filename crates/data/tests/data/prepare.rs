//! End-to-end preparation of small corpora.

use crate::common::{TestFolder, decoded};
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Mutex;
use trireme_data::{
    Corpus, DataError, ExistingCorpus, InvalidUtf8, NoProgress, Phase, PrepareOptions, PrepareReport,
    Progress, REPORT_FILE, Tokenizer, TokenizerChoice, has_no_corpus, is_up_to_date, prepare, stage,
};

fn files_in(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

fn failure(options: &PrepareOptions) -> DataError {
    let error = prepare(options, &NoProgress).unwrap_err();
    assert!(!options.out.exists(), "a failed preparation leaves nothing behind");
    error
}

/// Returns a long text with words, numbers, blank lines and characters of one to four bytes.
fn long_text(num_lines: usize) -> String {
    let words =
        ["the", "naïve", "fox", "jumps,", "over", "€100", "  ", "lazy", "𝄞", "dog.\n\n", "don't", "\t"];
    let pick = |line: usize, word: usize| words[(line * line * 31 + word * 7 + line * word) % words.len()];
    (0..num_lines)
        .map(|line| (0..12).map(|word| pick(line, word)).collect::<Vec<_>>().join(" ") + "\n")
        .collect()
}

#[test]
fn folders_are_read_in_order_and_some_entries_are_skipped() {
    let test_folder = TestFolder::new(&[
        ("b.txt", b"second"),
        ("a/z.txt", b"first"),
        ("c.MD", b"third"),
        (".hidden.txt", b"no"),
        (".git/config", b"no"),
        ("target/debug.txt", b"no"),
        ("image.png", b"\x89PNG\0\0"),
        ("empty.txt", b""),
    ]);
    std::os::unix::fs::symlink(test_folder.path("in"), test_folder.path("in").join("loop")).unwrap();
    let report = prepare(&test_folder.options(&["."]), &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["first", "second", "third"]);
    let skipped = report.skipped;
    assert_eq!((skipped.hidden, skipped.target_folders, skipped.binary), (2, 1, 1));
    assert_eq!((skipped.empty, skipped.not_files, skipped.total()), (1, 1, 6));
    assert_eq!(skipped.to_string(), "2 hidden, 1 target folders, 1 special files, 1 binary, 1 empty");
    assert_eq!((report.num_files, report.train.num_documents), (3, 3));
    assert_eq!(report.train.num_tokens, "first".len() as u64 + 6 + 5 + 3, "each document has its end");

    let mut options = test_folder.options(&[".", "b.txt"]);
    options.extensions = vec!["md".to_owned()];
    let report = prepare(&options, &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["third", "second"], "a named file needs no extension");
    assert_eq!(report.skipped.other_extensions, 4);
}

#[test]
fn the_output_is_never_its_own_input() {
    let test_folder = TestFolder::new(&[("a.txt", b"text")]);
    let mut options = test_folder.options(&["."]);
    options.out = test_folder.path("in").join("out");
    prepare(&options, &NoProgress).unwrap();
    assert!(is_up_to_date(&options).unwrap());
    let report = prepare(&options, &NoProgress).unwrap();
    assert_eq!((report.num_files, report.skipped.total()), (1, 0));
    let own = PrepareOptions {
        inputs: vec![test_folder.path("in")],
        out: test_folder.path("in"),
        ..options.clone()
    };
    assert!(matches!(prepare(&own, &NoProgress), Err(DataError::InputIsOutput { .. })));
    let file = PrepareOptions { out: test_folder.path("in/a.txt"), ..options };
    assert!(matches!(prepare(&file, &NoProgress), Err(DataError::OutputIsFile { .. })));
}

#[test]
fn json_lines_give_their_field() {
    let lines = [
        r#"{"id": 1, "text": "one\ntwo"}"#,
        "",
        "  {\"text\": \"\"}\r",
        r#"{"text": "\u00e9", "x": {"text": 1}}"#,
    ];
    let marked = b"\xef\xbb\xbf{\"body\": \"B\", \"text\": \"T\"}\n";
    let test_folder = TestFolder::new(&[("a.jsonl", lines.join("\n").as_bytes()), ("b.json", marked)]);
    let report = prepare(&test_folder.options(&["."]), &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["one\ntwo", "é", "T"]);
    assert_eq!(report.skipped.empty, 1);
    let mut options = test_folder.options(&["b.json"]);
    options.field = "body".to_owned();
    prepare(&options, &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["B"]);
}

#[test]
fn json_mistakes_are_named_with_their_line() {
    let cases: [(&[u8], &str); 5] = [
        (b"{\"text\": \"a\"}\n{\"text\": \"b\"\n", "a.jsonl, line 2, column 12"),
        (b"{\n  \"text\": \"a\"\n}\n", "line 1, column 1"),
        (b"\n\n[1, 2]\n", "line 3, column 2: invalid type"),
        (
            b"{\"text\": \"a\"}\n{\"body\": \"b\"}\n",
            "line 2: field 'text' is missing; the object has the fields body",
        ),
        (b"{\"text\": null}\n", "line 1: field 'text' is null"),
    ];
    for (content, expected) in cases {
        let test_folder = TestFolder::new(&[("a.jsonl", content)]);
        let error = failure(&test_folder.options(&["a.jsonl"])).to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn invalid_utf8_is_replaced_or_refused() {
    let long = [long_text(9000).as_bytes(), b"\xff\xfe end \xe2\x82"].concat();
    let test_folder =
        TestFolder::new(&[("a.txt", &long), ("b.jsonl", b"{\"text\": \"x\"}\n{\"text\": \"\xff\"}\n")]);
    let report = prepare(&test_folder.options(&["a.txt", "b.jsonl"]), &NoProgress).unwrap();
    assert_eq!(report.num_invalid_utf8_replaced, 4);
    assert_eq!(test_folder.documents(), [&String::from_utf8_lossy(&long), "x", "\u{FFFD}"]);
    fs::remove_dir_all(test_folder.path("out")).unwrap();

    let refused = |input, at| {
        let options = PrepareOptions { invalid_utf8: InvalidUtf8::Refuse, ..test_folder.options(&[input]) };
        match failure(&options) {
            DataError::InvalidUtf8 { path, offset } => {
                assert_eq!((path, offset), (test_folder.path("in").join(input), at));
            }
            other => panic!("{other}"),
        }
    };
    refused("a.txt", long_text(9000).len() as u64);
    refused("b.jsonl", 24);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let lines: String =
        (0..3000).map(|i| format!("{{\"text\": \"line {i} {}\"}}\n", "word ".repeat(i % 50))).collect();
    let text = long_text(12_000);
    let test_folder =
        TestFolder::new(&[("a.txt", text.as_bytes()), ("b.jsonl", lines.as_bytes()), ("c.txt", b"short")]);
    let outputs = [1, 2, 7].map(|num_threads| {
        let options = PrepareOptions {
            tokenizer: TokenizerChoice::TrainBpe { vocabulary_size: 400 },
            validation_fraction: 0.1,
            num_threads: NonZeroUsize::new(num_threads).unwrap(),
            ..test_folder.options(&["."])
        };
        prepare(&options, &NoProgress).unwrap();
        files_in(&options.out)
    });
    assert_eq!(
        outputs[0].iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(),
        ["prepare.json", "tokenizer.json", "train.tokens", "validation.tokens"]
    );
    assert!(outputs[0] == outputs[1] && outputs[0] == outputs[2]);
}

#[test]
fn a_long_text_has_the_tokens_of_the_whole() {
    let text = long_text(12_000);
    assert!(text.len() > 3 * (128 << 10));
    let test_folder = TestFolder::new(&[("a.txt", text.as_bytes())]);
    let options = PrepareOptions {
        tokenizer: TokenizerChoice::TrainBpe { vocabulary_size: 500 },
        ..test_folder.options(&["a.txt"])
    };
    prepare(&options, &NoProgress).unwrap();
    let tokenizer = Tokenizer::load(&options.out).unwrap();
    let mut expected = Vec::new();
    tokenizer.encode(&text, &mut expected).unwrap();
    expected.extend(tokenizer.end_of_document());
    let file = Corpus::open(&options.out).unwrap().train.tokens;
    let mut tokens = vec![0; file.num_tokens() as usize];
    file.read_window(0, &mut tokens).unwrap();
    assert!(tokens == expected);
}

#[test]
fn a_text_without_a_line_or_a_space_loses_nothing() {
    let text = "€".repeat(200_000);
    let test_folder = TestFolder::new(&[("a.txt", text.as_bytes())]);
    prepare(&test_folder.options(&["a.txt"]), &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), [text]);
}

#[test]
fn validation_is_held_out_and_reported() {
    let test_folder = TestFolder::new(&[("a.txt", long_text(100).as_bytes())]);
    let options = PrepareOptions { validation_fraction: 0.05, ..test_folder.options(&["a.txt"]) };
    let report = prepare(&options, &NoProgress).unwrap();
    let corpus = Corpus::open(&options.out).unwrap();
    let tokenizer = Tokenizer::load(&options.out).unwrap();
    let validation = corpus.validation.unwrap().tokens;
    assert_eq!(corpus.report, report);
    assert_eq!(report.validation.unwrap().num_tokens, validation.num_tokens());
    assert_eq!(report.train.num_tokens, corpus.train.tokens.num_tokens());
    let joined =
        [decoded(&corpus.train.tokens, &tokenizer), decoded(&validation, &tokenizer)].concat().concat();
    assert_eq!(joined.trim_matches('\u{FFFD}').len(), long_text(100).len());

    prepare(&test_folder.options(&["a.txt"]), &NoProgress).unwrap();
    assert!(Corpus::open(&options.out).unwrap().validation.is_none());
    assert!(!options.out.join("validation.tokens").exists(), "nothing of the old corpus stays");
}

#[test]
fn an_unchanged_corpus_is_current() {
    let test_folder = TestFolder::new(&[("a.txt", b"some text"), ("b.txt", b"more")]);
    let options = test_folder.options(&["."]);
    assert!(!is_up_to_date(&options).unwrap());
    prepare(&options, &NoProgress).unwrap();
    assert!(is_up_to_date(&options).unwrap());
    assert!(is_up_to_date(&PrepareOptions { num_threads: NonZeroUsize::MIN, ..options.clone() }).unwrap());
    for other in [
        PrepareOptions { validation_fraction: 0.5, ..options.clone() },
        PrepareOptions { extensions: vec!["txt".to_owned()], ..options.clone() },
        PrepareOptions { tokenizer: TokenizerChoice::TrainBpe { vocabulary_size: 300 }, ..options.clone() },
        test_folder.options(&["a.txt", "b.txt", "b.txt"]),
    ] {
        assert!(!is_up_to_date(&other).unwrap(), "{other:?}");
    }
    fs::write(test_folder.path("in").join("b.txt"), "longer").unwrap();
    assert!(!is_up_to_date(&options).unwrap());
    prepare(&options, &NoProgress).unwrap();
    fs::write(test_folder.path("out").join("prepare.json"), "{}").unwrap();
    assert!(!is_up_to_date(&options).unwrap());
    assert!(matches!(PrepareReport::read(&options.out), Err(DataError::Report { .. })));
    prepare(&options, &NoProgress).unwrap();
    fs::remove_file(test_folder.path("out").join("train.tokens")).unwrap();
    assert!(!is_up_to_date(&options).unwrap());
}

#[test]
fn invalid_inputs_are_refused() {
    let test_folder =
        TestFolder::new(&[("a.txt", b"text\0more"), ("none/empty.txt", b""), ("none/x.bin", b"\0")]);
    let refused = |inputs: &[&str]| failure(&test_folder.options(inputs));
    assert!(matches!(refused(&[]), DataError::NoInput));
    assert!(matches!(refused(&["nowhere"]), DataError::InputMissing { .. }));
    assert!(matches!(refused(&["a.txt"]), DataError::BinaryInput { offset: 4, .. }));
    let empty = refused(&["none"]).to_string();
    assert!(empty.contains("1 binary, 1 empty"), "{empty}");
    assert!(matches!(
        failure(&PrepareOptions::new(vec!["/dev/null".into()], test_folder.path("out"))),
        DataError::InputKind { .. }
    ));
    for fraction in [-0.1, 1.0, f64::NAN] {
        let options = PrepareOptions { validation_fraction: fraction, ..test_folder.options(&["."]) };
        assert!(matches!(failure(&options), DataError::ValidationFraction { .. }));
    }
    let bpe = TokenizerChoice::TrainBpe { vocabulary_size: 256 };
    let options = PrepareOptions { tokenizer: bpe, ..test_folder.options(&["."]) };
    assert!(matches!(failure(&options), DataError::BpeVocabulary { .. }));
    let file = TokenizerChoice::File(test_folder.path("in").join("none/empty.txt"));
    let options = PrepareOptions { tokenizer: file, ..test_folder.options(&["."]) };
    assert!(matches!(failure(&options), DataError::LoadTokenizer { .. }));
}

#[test]
fn a_failure_leaves_the_old_corpus_as_it_was() {
    let test_folder = TestFolder::new(&[("a.txt", b"good text"), ("b.jsonl", b"{\"text\": \"x\"}\nbad\n")]);
    let options = test_folder.options(&["a.txt"]);
    prepare(&options, &NoProgress).unwrap();
    let before = files_in(&options.out);
    for tokenizer in [TokenizerChoice::Bytes, TokenizerChoice::TrainBpe { vocabulary_size: 300 }] {
        let error =
            prepare(&PrepareOptions { tokenizer, ..test_folder.options(&["."]) }, &NoProgress).unwrap_err();
        assert!(matches!(error, DataError::JsonLine { line: 2, .. }), "{error}");
        assert!(files_in(&options.out) == before);
    }
}

#[test]
fn files_that_prepare_did_not_write_are_not_overwritten() {
    let test_folder = TestFolder::new(&[("a.txt", b"good text")]);
    let options = test_folder.options(&["a.txt"]);
    fs::create_dir(&options.out).unwrap();
    fs::write(options.out.join("tokenizer.json"), "of a model").unwrap();
    let error = prepare(&options, &NoProgress).unwrap_err();
    assert!(matches!(error, DataError::Occupied { .. }), "{error}");
    assert_eq!(files_in(&options.out), [("tokenizer.json".to_owned(), b"of a model".to_vec())]);

    fs::remove_file(options.out.join("tokenizer.json")).unwrap();
    fs::remove_dir(&options.out).unwrap();
    fs::write(&options.out, "a file").unwrap();
    assert!(matches!(prepare(&options, &NoProgress), Err(DataError::OutputIsFile { .. })));
    assert_eq!(fs::read(&options.out).unwrap(), b"a file");
}

/// Tries to prepare a corpus in the same folder while the first preparation is running.
struct ConcurrentPreparation<'a> {
    options: &'a PrepareOptions,
    seen: Mutex<Vec<DataError>>,
}

impl Progress for ConcurrentPreparation<'_> {
    fn advance(&self, phase: Phase, done: u64, total: u64) {
        assert!(done <= total, "{phase:?}");
        self.seen.lock().unwrap().extend(prepare(self.options, &NoProgress).err());
    }
}

#[test]
fn a_corpus_that_is_to_be_kept_is_kept() {
    let test_folder = TestFolder::new(&[("a.txt", b"one text")]);
    let options = test_folder.options(&["a.txt"]);
    assert!(has_no_corpus(&options.out).unwrap());
    stage(&options, ExistingCorpus::Keep, &NoProgress).unwrap().commit().unwrap();
    let before = files_in(&options.out);
    assert!(!has_no_corpus(&options.out).unwrap());
    let refused = stage(&options, ExistingCorpus::Keep, &NoProgress).unwrap_err();
    assert!(matches!(refused, DataError::Occupied { .. }), "{refused}");
    assert_eq!(files_in(&options.out), before);
    fs::remove_file(options.out.join(REPORT_FILE)).unwrap();
    let before: Vec<_> = before.into_iter().filter(|(name, _)| name != REPORT_FILE).collect();
    assert!(!has_no_corpus(&options.out).unwrap(), "a corpus without its report may be all that is left");
    stage(&options, ExistingCorpus::Keep, &NoProgress).unwrap_err();
    assert_eq!(files_in(&options.out), before);
}

#[test]
fn two_preparations_do_not_mix() {
    let test_folder = TestFolder::new(&[("a.txt", b"good text")]);
    let options = test_folder.options(&["a.txt"]);
    let concurrent = ConcurrentPreparation { options: &options, seen: Mutex::default() };
    prepare(&options, &concurrent).unwrap();
    let seen = concurrent.seen.into_inner().unwrap();
    assert!(!seen.is_empty() && seen.iter().all(|error| matches!(error, DataError::Busy { .. })));
    assert_eq!(test_folder.documents(), ["good text"]);
}

#[test]
fn files_of_a_killed_preparation_are_removed() {
    let test_folder = TestFolder::new(&[("a.txt", b"good text")]);
    let options = test_folder.options(&["a.txt"]);
    prepare(&options, &NoProgress).unwrap();
    // As if killed after the marker file was removed and one new file was in place.
    fs::create_dir(options.out.join(".trireme-prepare")).unwrap();
    fs::write(options.out.join(".trireme-prepare/validation.tokens"), "half").unwrap();
    fs::remove_file(options.out.join("prepare.json")).unwrap();
    assert!(matches!(Corpus::open(&options.out), Err(DataError::NotPrepared { .. })));
    assert!(!is_up_to_date(&options).unwrap());
    prepare(&options, &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["good text"]);
    assert!(!options.out.join(".trireme-prepare").exists());
}

#[test]
fn progress_reaches_the_end_of_each_phase() {
    struct Last(Mutex<Vec<(Phase, u64, u64)>>);
    impl Progress for Last {
        fn advance(&self, phase: Phase, done: u64, total: u64) {
            self.0.lock().unwrap().push((phase, done, total));
        }
    }
    let text = long_text(9000);
    let test_folder = TestFolder::new(&[("a.txt", text.as_bytes())]);
    let options = PrepareOptions {
        tokenizer: TokenizerChoice::TrainBpe { vocabulary_size: 300 },
        validation_fraction: 0.1,
        ..test_folder.options(&["a.txt"])
    };
    let last = Last(Mutex::default());
    prepare(&options, &last).unwrap();
    let seen = last.0.into_inner().unwrap();
    for phase in [Phase::TrainTokenizer, Phase::Tokenize, Phase::Split] {
        let steps: Vec<_> = seen.iter().filter(|step| step.0 == phase).collect();
        assert!(steps.is_sorted_by_key(|step| step.1), "{phase:?}");
        let (_, done, total) = steps.last().unwrap();
        assert_eq!(done, total, "{phase:?}");
    }
}

#[test]
fn a_stored_tokenizer_that_has_changed_is_refused_and_rewritten() {
    let test_folder = TestFolder::new(&[("a.txt", long_text(30).as_bytes())]);
    let bytes = test_folder.options(&[""]);
    let tokenizer = TokenizerChoice::TrainBpe { vocabulary_size: 280 };
    let bpe = PrepareOptions { tokenizer, ..test_folder.options(&[""]) };
    for (options, name) in [(bytes, "tokenizer.bytes.json"), (bpe, "tokenizer.json")] {
        prepare(&options, &NoProgress).unwrap();
        let path = options.out.join(name);
        let good = fs::read(&path).unwrap();
        for index in (0..good.len()).step_by(good.len().div_ceil(100)) {
            let mut bad = good.clone();
            bad[index] ^= 1;
            fs::write(&path, &bad).unwrap();
            let error = Tokenizer::load(&options.out).unwrap_err();
            assert!(
                matches!(&error, DataError::TokenizerDamaged { path: named } if *named == path),
                "{error}"
            );
        }
        assert!(!is_up_to_date(&options).unwrap());
        prepare(&options, &NoProgress).unwrap();
        assert!(is_up_to_date(&options).unwrap() && fs::read(&path).unwrap() == good);
        Tokenizer::load(&options.out).unwrap();
    }
}

#[test]
fn a_corpus_of_an_earlier_version_without_the_tokenizers_checksum_opens() {
    let test_folder = TestFolder::new(&[("a.txt", b"some text")]);
    let options = test_folder.options(&[""]);
    prepare(&options, &NoProgress).unwrap();
    let path = options.out.join("prepare.json");
    let mut report: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    report.as_object_mut().unwrap().remove("tokenizer_crc32").unwrap();
    fs::write(&path, report.to_string()).unwrap();
    assert_eq!(test_folder.documents(), ["some text"]);
    assert!(is_up_to_date(&options).unwrap());
}

#[test]
fn a_report_that_is_too_long_is_refused_and_not_cut() {
    let test_folder = TestFolder::new(&[("a.txt", b"some text")]);
    let options = test_folder.options(&[""]);
    prepare(&options, &NoProgress).unwrap();
    let path = options.out.join(REPORT_FILE);
    let mut report = fs::read(&path).unwrap();
    report.resize(16 << 20, b' ');
    fs::write(&path, &report).unwrap();
    PrepareReport::read(&options.out).unwrap();
    report.push(b' ');
    fs::write(&path, &report).unwrap();
    let error = PrepareReport::read(&options.out).unwrap_err();
    let DataError::Read { source, .. } = error else { panic!("{error}") };
    assert_eq!(source.to_string(), "it has 16777217 bytes, more than 16777216");
}
