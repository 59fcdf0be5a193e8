//! Preparation of conversations and completions, of weighted sources, and of compressed files.

use crate::common::{TestFolder, counted, decoded};
use std::fs;
use std::path::Path;
use trireme_data::{
    ChatTemplate, Corpus, DataError, InvalidUtf8, MaskedTokens, NoProgress, PrepareOptions, Tokenizer,
    is_up_to_date, prepare,
};

#[test]
fn only_answers_count() {
    let chat = concat!(
        r#"{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}"#,
        "\n",
        r#"{"prompt": "1+2=", "completion": "3"}"#,
        "\n",
        r#"{"text": "all"}"#,
        "\n"
    );
    let test_folder = TestFolder::new(&[("chat.jsonl", chat.as_bytes()), ("more.txt", b"of it")]);
    let options = test_folder.options(&["chat.jsonl", "more.txt"]);
    let error = prepare(&options, &NoProgress).unwrap_err().to_string();
    assert!(error.contains("line 1 is a conversation, but there is no chat template"), "{error}");
    let options = PrepareOptions { chat_template: Some(ChatTemplate::chatml()), ..options };
    assert!(prepare(&options, &NoProgress).unwrap().has_loss_mask);
    assert_eq!(counted(&test_folder), ["2<|im_end|>", "3#", "all#", "of it#"]);
    assert!(test_folder.documents()[0].starts_with("<|im_start|>user\n1+1?<|im_end|>"));
    assert!(test_folder.path("out/chat_template.jinja").exists());
    // A preparation without answers removes the masks and the template.
    prepare(&test_folder.options(&["more.txt"]), &NoProgress).unwrap();
    assert!(
        !test_folder.path("out/train.mask.tokens").exists()
            && !test_folder.path("out/chat_template.jinja").exists()
    );
    assert!(Corpus::open(&test_folder.path("out")).unwrap().train.loss_mask.is_none());
}

#[test]
fn documents_without_tokens_count_for_no_source() {
    let empty = "{\"prompt\": \"\", \"completion\": \"\"}\n{\"prompt\": \"abc\", \"completion\": \"de\"}\n";
    let test_folder = TestFolder::new(&[("a.jsonl", empty.repeat(30).as_bytes()), ("b.txt", &[b'b'; 200])]);
    for validation_fraction in [0.0, 0.2] {
        let options = PrepareOptions {
            weights: vec![1.0, 1.0],
            validation_fraction,
            ..test_folder.options(&["a.jsonl", "b.txt"])
        };
        let report = prepare(&options, &NoProgress).unwrap();
        let tokens = report.sources.iter().map(|source| source.num_tokens);
        assert_eq!(tokens.clone().sum::<u64>(), report.train.num_tokens);
        if validation_fraction == 0.0 {
            assert_eq!(tokens.collect::<Vec<_>>(), [30 * 6, 201]);
            assert_eq!(report.skipped.empty, 30);
        }
    }
}

#[test]
fn a_corpus_without_its_mask_or_of_other_special_tokens_is_not_current() {
    let record =
        br#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let test_folder = TestFolder::new(&[("chat.jsonl", record)]);
    let with_end = |end: &str| {
        let source = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}";
        let tokens = [("eos_token".to_owned(), end.to_owned())].into();
        let template = ChatTemplate::new(source, tokens, Path::new("a")).unwrap();
        PrepareOptions { chat_template: Some(template), ..test_folder.options(&["chat.jsonl"]) }
    };
    let options = with_end("</s>");
    prepare(&options, &NoProgress).unwrap();
    assert!(is_up_to_date(&options).unwrap() && !is_up_to_date(&with_end("<end>")).unwrap());
    fs::remove_file(test_folder.path("out/train.mask.tokens")).unwrap();
    assert!(!is_up_to_date(&options).unwrap());
}

#[test]
fn a_mask_is_split_as_its_tokens_are() {
    let record =
        |index: usize| format!("{{\"prompt\": \"question {index} \", \"completion\": \"answer {index}\"}}\n");
    let lines: String = (0..40).map(record).collect();
    let test_folder = TestFolder::new(&[("qa.jsonl", lines.as_bytes())]);
    let options = PrepareOptions { validation_fraction: 0.25, ..test_folder.options(&["qa.jsonl"]) };
    prepare(&options, &NoProgress).unwrap();
    let corpus = Corpus::open(&test_folder.path("out")).unwrap();
    assert!(
        counted(&test_folder).iter().all(|answer| answer.starts_with("answer ") && answer.ends_with('#'))
    );
    let MaskedTokens { tokens, loss_mask } = corpus.validation.unwrap();
    let mask = loss_mask.unwrap();
    assert_eq!((tokens.num_tokens(), tokens.num_documents()), (mask.num_tokens(), mask.num_documents()));
    // If a file begins with plain text, later records must not have answers.
    let mixed = format!("{{\"text\": \"a\"}}\n{}", record(1));
    let test_folder = TestFolder::new(&[("mixed.jsonl", mixed.as_bytes())]);
    let error = prepare(&test_folder.options(&["mixed.jsonl"]), &NoProgress).unwrap_err().to_string();
    assert!(error.contains("line 2 has an answer"), "{error}");
}

#[test]
fn compressed_files_are_read_in_the_format_of_their_content() {
    let gzip = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let zstandard = |text: &str| {
        ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
    };
    // Concatenations of compressed files.
    let both = |compress: &dyn Fn(&str) -> Vec<u8>| [compress("one "), compress("two")].concat();
    let test_folder = TestFolder::new(&[
        ("a.txt.gz", &both(&gzip)),
        ("b.jsonl.zst", &zstandard("{\"text\": \"three\"}\n")),
        ("c.txt.zst", &both(&zstandard)),
        ("d.md.gz", &gzip("other")),
        ("e.txt.zst", &[&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 9, 9, 9][..], &zstandard("skipped")].concat()),
    ]);
    let options =
        PrepareOptions { extensions: vec!["txt".into(), "jsonl".into()], ..test_folder.options(&[""]) };
    prepare(&options, &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["one two", "three", "one two", "skipped"]);
    let damaged = TestFolder::new(&[("a.gz", &gzip(&"text".repeat(999))[..30])]);
    assert!(matches!(prepare(&damaged.options(&["a.gz"]), &NoProgress), Err(DataError::Read { .. })));
}

#[test]
fn data_of_other_programs_is_read_and_named() {
    let share_gpt = r#"{"id": "1", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}"#;
    let alpaca = r#"{"instruction": "Add.", "input": "1 and 2", "output": "3"}"#;
    let array = format!("\u{feff} [{share_gpt},\n  {alpaca}\n, {share_gpt}]\n");
    let lines = format!("{alpaca}\n\u{feff}{share_gpt}\n");
    let test_folder = TestFolder::new(&[
        ("a.json", array.as_bytes()),
        ("b.jsonl", lines.as_bytes()),
        ("c.json", b"[ {\"text\": \"all [\\\"] of it\"} ]"),
        ("none.json", b"[]"),
    ]);
    let options = PrepareOptions {
        chat_template: Some(ChatTemplate::chatml()),
        ..test_folder.options(&["a.json", "b.jsonl", "c.json", "none.json"])
    };
    let report = prepare(&options, &NoProgress).unwrap();
    let expected =
        "read 3 ShareGPT conversations, 2 Alpaca records, 3 files as JSON arrays of records".to_owned();
    assert_eq!(report.foreign_forms.to_string(), expected);
    assert_eq!(
        counted(&test_folder),
        ["2<|im_end|>", "3<|im_end|>", "2<|im_end|>", "3<|im_end|>", "2<|im_end|>", "all [\"] of it#"]
    );
    assert!(test_folder.documents()[1].starts_with("<|im_start|>user\nAdd.\n\n1 and 2<|im_end|>"));
    for (text, fact) in [
        ("[\n {\"text\": \"a\"},\n\n {\"text\":\n 3}]", "a.json, record 2, line 4: field 'text' is a number"),
        ("[\n {\"text\": \"a\"},\n {\"text\":\n x}]", "a.json, record 2, line 4, column 2: expected value"),
        (
            "[{\"text\": \"a\"}\n",
            "record 1, line 2: the array is not closed by `]`; the file begins with `[`",
        ),
        (
            "[1]",
            "record 1, line 1, column 2: invalid type: integer `1`, expected a JSON object; records are JSON objects, one per line",
        ),
        ("[{\"text\": \"a\"},\n {\"text\": x}]", "record 2, line 2, column 11: expected value"),
        ("[{\"text\": \"a\"}, {\"text\": x}]", "record 2, line 1, column 26: expected value"),
        ("[]", "no text"),
    ] {
        let test_folder = TestFolder::new(&[("a.json", text.as_bytes())]);
        let error = prepare(&test_folder.options(&["a.json"]), &NoProgress).unwrap_err().to_string();
        assert!(error.contains(fact), "{error}");
    }
}

#[test]
fn the_system_text_of_a_conversation_is_its_first_message() {
    let record = r#"{"system": "Be brief.", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}"#;
    let test_folder = TestFolder::new(&[("a.jsonl", record.as_bytes())]);
    let options =
        PrepareOptions { chat_template: Some(ChatTemplate::chatml()), ..test_folder.options(&["a.jsonl"]) };
    prepare(&options, &NoProgress).unwrap();
    assert!(
        test_folder.documents()[0]
            .starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?")
    );
}

#[test]
fn lone_surrogates_are_replaced_and_counted_or_refused() {
    let line = r#"{"text": "a\ud83d", "id": "\ude00"}"#;
    let pair = r#"{"text": "\ud83d\ude00"}"#;
    let test_folder =
        TestFolder::new(&[("a.jsonl", format!("{line}\n{pair}\n").as_bytes()), ("b.jsonl", line.as_bytes())]);
    let options = PrepareOptions {
        validation_inputs: vec![test_folder.path("in/b.jsonl")],
        ..test_folder.options(&["a.jsonl"])
    };
    assert_eq!(prepare(&options, &NoProgress).unwrap().num_invalid_utf8_replaced, 4);
    assert_eq!(test_folder.documents(), ["a\u{fffd}", "😀"]);
    let options = PrepareOptions { invalid_utf8: InvalidUtf8::Refuse, ..options };
    let error = prepare(&options, &NoProgress).unwrap_err().to_string();
    assert!(error.contains("a.jsonl, line 1, column ") && error.contains("hex escape"), "{error}");
}

#[test]
fn padded_gzip_is_read_and_unreadable_files_are_refused_with_a_command_that_reads_them() {
    let member = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let (one, two, zeros) = (member("one "), member("two"), [0; 20_000]);
    let appended = [&one[..], b"junk"].concat();
    // A frame whose header requests a window of 2 GiB, with one empty last block.
    let large_window = [0x28, 0xb5, 0x2f, 0xfd, 0, 21 << 3, 1, 0, 0];
    let test_folder = TestFolder::new(&[
        ("padded.txt.gz", &[&one[..], &zeros, &two, &zeros].concat()),
        ("appended.txt.gz", &appended),
        ("window.txt.zst", &large_window),
    ]);
    prepare(&test_folder.options(&["padded.txt.gz"]), &NoProgress).unwrap();
    assert_eq!(test_folder.documents(), ["one two"]);
    let position = format!("the bytes from {} on are not gzip", one.len());
    for (name, facts) in [
        ("appended.txt.gz", [&position[..], "gzip -dc ", "| trireme prepare -"]),
        ("window.txt.zst", ["a window of 2.00GiB", "zstd -dc --long=31 ", "| trireme prepare -"]),
    ] {
        let error = prepare(&test_folder.options(&[name]), &NoProgress).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(facts.iter().all(|fact| source.contains(fact)), "{error}: {source}");
    }
}

#[test]
fn a_wrong_weight_is_named() {
    let test_folder = TestFolder::new(&[("a.txt", b"a"), ("b.txt", b"b")]);
    let options = PrepareOptions { weights: vec![1.0, -3.0], ..test_folder.options(&["a.txt", "b.txt"]) };
    let error = prepare(&options, &NoProgress).unwrap_err().to_string();
    assert!(error.contains("b.txt is -3; expected a number from 1e-6"), "{error}");
}

#[test]
fn sources_have_weights_and_tokens_of_their_own() {
    let lines = |text: &str, count: usize| format!("{{\"text\": \"{text}\"}}\n").repeat(count);
    let files = [("a.jsonl", lines("aaaa", 60)), ("b.jsonl", lines("bb", 40))];
    let test_folder = TestFolder::new(&files.each_ref().map(|(name, text)| (*name, text.as_bytes())));
    let options = PrepareOptions {
        weights: vec![1.0, 3.0],
        validation_fraction: 0.1,
        ..test_folder.options(&["a.jsonl", "b.jsonl"])
    };
    let report = prepare(&options, &NoProgress).unwrap();
    let documents = test_folder.documents();
    let tokens =
        |text: &str| documents.iter().filter(|own| *own == text).count() as u64 * (text.len() as u64 + 1);
    assert_eq!(
        report.sources.iter().map(|source| source.num_tokens).collect::<Vec<_>>(),
        [tokens("aaaa"), tokens("bb")]
    );
    assert_eq!(report.train.num_tokens, tokens("aaaa") + tokens("bb"));
    for weights in [vec![1.0], vec![1.0, 0.0]] {
        let options = PrepareOptions { weights, ..options.clone() };
        assert!(matches!(prepare(&options, &NoProgress), Err(DataError::Weights { .. })));
    }
}

#[test]
fn validation_inputs_may_be_separate() {
    let test_folder = TestFolder::new(&[("train.txt", b"to train on"), ("own.txt", b"to validate on")]);
    let options = test_folder.options(&["train.txt"]);
    let own = PrepareOptions { validation_inputs: vec![test_folder.path("in/own.txt")], ..options.clone() };
    prepare(&own, &NoProgress).unwrap();
    let corpus = Corpus::open(&test_folder.path("out")).unwrap();
    assert_eq!(decoded(&corpus.validation.unwrap().tokens, &Tokenizer::bytes()), ["to validate on"]);
    assert_eq!(test_folder.documents(), ["to train on"]);
    assert!(is_up_to_date(&own).unwrap() && !is_up_to_date(&options).unwrap());
    fs::write(test_folder.path("in/own.txt"), "another").unwrap();
    assert!(!is_up_to_date(&own).unwrap());
    let both = PrepareOptions { validation_fraction: 0.1, ..own };
    assert!(matches!(prepare(&both, &NoProgress), Err(DataError::ConflictingValidation { .. })));
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_is_refused_with_the_feature_that_reads_it() {
    let test_folder = TestFolder::new(&[("text.parquet", b"PAR1")]);
    let error = prepare(&test_folder.options(&["text.parquet"]), &NoProgress).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("--features parquet"), "{source}");
}
