//! Preparation of conversations and completions, of weighted sources, and of compressed files.

use crate::common::{Room, decoded};
use std::fs;
use std::path::Path;
use trireme_data::{
    ChatTemplate, Corpus, DataError, InvalidUtf8, MaskedTokens, PrepareOptions, Silent, TokenFile, Tokenizer,
    is_current, prepare,
};

/// Returns for each document of the training file the text that counts in the loss.
fn counted(room: &Room) -> Vec<String> {
    let corpus = Corpus::open(&room.path("out")).unwrap();
    let (tokenizer, mask) = (Tokenizer::load(&room.path("out")).unwrap(), corpus.train.loss_mask.unwrap());
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
    let room = Room::new(&[("chat.jsonl", chat.as_bytes()), ("more.txt", b"of it")]);
    let options = room.options(&["chat.jsonl", "more.txt"]);
    let error = prepare(&options, &Silent).unwrap_err().to_string();
    assert!(error.contains("line 1 is a conversation, but there is no chat template"), "{error}");
    let options = PrepareOptions { chat_template: Some(ChatTemplate::chatml()), ..options };
    assert!(prepare(&options, &Silent).unwrap().has_loss_mask);
    assert_eq!(counted(&room), ["2<|im_end|>", "3#", "all#", "of it#"]);
    assert!(room.documents()[0].starts_with("<|im_start|>user\n1+1?<|im_end|>"));
    assert!(room.path("out/chat_template.jinja").exists());
    // A preparation without answers removes the masks and the template.
    prepare(&room.options(&["more.txt"]), &Silent).unwrap();
    assert!(!room.path("out/train.mask.tokens").exists() && !room.path("out/chat_template.jinja").exists());
    assert!(Corpus::open(&room.path("out")).unwrap().train.loss_mask.is_none());
}

#[test]
fn documents_without_tokens_are_of_no_source() {
    let empty = "{\"prompt\": \"\", \"completion\": \"\"}\n{\"prompt\": \"abc\", \"completion\": \"de\"}\n";
    let room = Room::new(&[("a.jsonl", empty.repeat(30).as_bytes()), ("b.txt", &[b'b'; 200])]);
    for validation_fraction in [0.0, 0.2] {
        let options = PrepareOptions {
            weights: vec![1.0, 1.0],
            validation_fraction,
            ..room.options(&["a.jsonl", "b.txt"])
        };
        let report = prepare(&options, &Silent).unwrap();
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
    let room = Room::new(&[("chat.jsonl", record)]);
    let with_end = |end: &str| {
        let source = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}";
        let tokens = [("eos_token".to_owned(), end.to_owned())].into();
        let template = ChatTemplate::new(source, tokens, Path::new("a")).unwrap();
        PrepareOptions { chat_template: Some(template), ..room.options(&["chat.jsonl"]) }
    };
    let options = with_end("</s>");
    prepare(&options, &Silent).unwrap();
    assert!(is_current(&options).unwrap() && !is_current(&with_end("<end>")).unwrap());
    fs::remove_file(room.path("out/train.mask.tokens")).unwrap();
    assert!(!is_current(&options).unwrap());
}

#[test]
fn a_mask_is_split_as_its_tokens_are() {
    let record =
        |index: usize| format!("{{\"prompt\": \"question {index} \", \"completion\": \"answer {index}\"}}\n");
    let lines: String = (0..40).map(record).collect();
    let room = Room::new(&[("qa.jsonl", lines.as_bytes())]);
    let options = PrepareOptions { validation_fraction: 0.25, ..room.options(&["qa.jsonl"]) };
    prepare(&options, &Silent).unwrap();
    let corpus = Corpus::open(&room.path("out")).unwrap();
    assert!(counted(&room).iter().all(|answer| answer.starts_with("answer ") && answer.ends_with('#')));
    let MaskedTokens { tokens, loss_mask } = corpus.validation.unwrap();
    let mask = loss_mask.unwrap();
    assert_eq!((tokens.num_tokens(), tokens.num_documents()), (mask.num_tokens(), mask.num_documents()));
    // If a file begins with plain text, later records must not have answers.
    let mixed = format!("{{\"text\": \"a\"}}\n{}", record(1));
    let room = Room::new(&[("mixed.jsonl", mixed.as_bytes())]);
    let error = prepare(&room.options(&["mixed.jsonl"]), &Silent).unwrap_err().to_string();
    assert!(error.contains("line 2 has an answer"), "{error}");
}

#[test]
fn compressed_files_are_read_as_what_they_hold() {
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
    let room = Room::new(&[
        ("a.txt.gz", &both(&gzip)),
        ("b.jsonl.zst", &zstandard("{\"text\": \"three\"}\n")),
        ("c.txt.zst", &both(&zstandard)),
        ("d.md.gz", &gzip("other")),
        ("e.txt.zst", &[&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 9, 9, 9][..], &zstandard("skipped")].concat()),
    ]);
    let options = PrepareOptions { extensions: vec!["txt".into(), "jsonl".into()], ..room.options(&[""]) };
    prepare(&options, &Silent).unwrap();
    assert_eq!(room.documents(), ["one two", "three", "one two", "skipped"]);
    let damaged = Room::new(&[("a.gz", &gzip(&"text".repeat(999))[..30])]);
    assert!(matches!(prepare(&damaged.options(&["a.gz"]), &Silent), Err(DataError::Read { .. })));
}

#[test]
fn data_of_other_programs_is_read_and_named() {
    let share_gpt = r#"{"id": "1", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}"#;
    let alpaca = r#"{"instruction": "Add.", "input": "1 and 2", "output": "3"}"#;
    let array = format!("\u{feff} [{share_gpt},\n  {alpaca}\n, {share_gpt}]\n");
    let lines = format!("{alpaca}\n\u{feff}{share_gpt}\n");
    let room = Room::new(&[
        ("a.json", array.as_bytes()),
        ("b.jsonl", lines.as_bytes()),
        ("c.json", b"[ {\"text\": \"all [\\\"] of it\"} ]"),
        ("none.json", b"[]"),
    ]);
    let options = PrepareOptions {
        chat_template: Some(ChatTemplate::chatml()),
        ..room.options(&["a.json", "b.jsonl", "c.json", "none.json"])
    };
    let report = prepare(&options, &Silent).unwrap();
    let expected =
        "read 3 ShareGPT conversations, 2 Alpaca records, 3 files as JSON arrays of records".to_owned();
    assert_eq!(report.foreign_forms.to_string(), expected);
    assert_eq!(
        counted(&room),
        ["2<|im_end|>", "3<|im_end|>", "2<|im_end|>", "3<|im_end|>", "2<|im_end|>", "all [\"] of it#"]
    );
    assert!(room.documents()[1].starts_with("<|im_start|>user\nAdd.\n\n1 and 2<|im_end|>"));
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
        let room = Room::new(&[("a.json", text.as_bytes())]);
        let error = prepare(&room.options(&["a.json"]), &Silent).unwrap_err().to_string();
        assert!(error.contains(fact), "{error}");
    }
}

#[test]
fn the_system_text_of_a_conversation_is_its_first_message() {
    let record = r#"{"system": "Be brief.", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}"#;
    let room = Room::new(&[("a.jsonl", record.as_bytes())]);
    let options =
        PrepareOptions { chat_template: Some(ChatTemplate::chatml()), ..room.options(&["a.jsonl"]) };
    prepare(&options, &Silent).unwrap();
    assert!(
        room.documents()[0].starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?")
    );
}

#[test]
fn lone_surrogates_are_replaced_and_counted_or_refused() {
    let line = r#"{"text": "a\ud83d", "id": "\ude00"}"#;
    let pair = r#"{"text": "\ud83d\ude00"}"#;
    let room =
        Room::new(&[("a.jsonl", format!("{line}\n{pair}\n").as_bytes()), ("b.jsonl", line.as_bytes())]);
    let options =
        PrepareOptions { validation_inputs: vec![room.path("in/b.jsonl")], ..room.options(&["a.jsonl"]) };
    assert_eq!(prepare(&options, &Silent).unwrap().num_invalid_utf8_replaced, 4);
    assert_eq!(room.documents(), ["a\u{fffd}", "😀"]);
    let options = PrepareOptions { invalid_utf8: InvalidUtf8::Refuse, ..options };
    let error = prepare(&options, &Silent).unwrap_err().to_string();
    assert!(error.contains("a.jsonl, line 1, column ") && error.contains("hex escape"), "{error}");
}

#[test]
fn padded_gzip_is_read_and_what_cannot_be_is_named_with_a_command_that_can() {
    let member = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let (one, two, zeros) = (member("one "), member("two"), [0; 20_000]);
    let appended = [&one[..], b"junk"].concat();
    // A frame whose header requests a window of 2 GiB, with one empty last block.
    let large_window = [0x28, 0xb5, 0x2f, 0xfd, 0, 21 << 3, 1, 0, 0];
    let room = Room::new(&[
        ("padded.txt.gz", &[&one[..], &zeros, &two, &zeros].concat()),
        ("appended.txt.gz", &appended),
        ("window.txt.zst", &large_window),
    ]);
    prepare(&room.options(&["padded.txt.gz"]), &Silent).unwrap();
    assert_eq!(room.documents(), ["one two"]);
    let position = format!("the bytes from {} on are not gzip", one.len());
    for (name, facts) in [
        ("appended.txt.gz", [&position[..], "gzip -dc ", "| trireme prepare -"]),
        ("window.txt.zst", ["a window of 2.00GiB", "zstd -dc --long=31 ", "| trireme prepare -"]),
    ] {
        let error = prepare(&room.options(&[name]), &Silent).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(facts.iter().all(|fact| source.contains(fact)), "{error}: {source}");
    }
}

#[test]
fn a_wrong_weight_is_named() {
    let room = Room::new(&[("a.txt", b"a"), ("b.txt", b"b")]);
    let options = PrepareOptions { weights: vec![1.0, -3.0], ..room.options(&["a.txt", "b.txt"]) };
    let error = prepare(&options, &Silent).unwrap_err().to_string();
    assert!(error.contains("b.txt is -3; expected a number from 1e-6"), "{error}");
}

#[test]
fn sources_have_weights_and_tokens_of_their_own() {
    let lines = |text: &str, count: usize| format!("{{\"text\": \"{text}\"}}\n").repeat(count);
    let files = [("a.jsonl", lines("aaaa", 60)), ("b.jsonl", lines("bb", 40))];
    let room = Room::new(&files.each_ref().map(|(name, text)| (*name, text.as_bytes())));
    let options = PrepareOptions {
        weights: vec![1.0, 3.0],
        validation_fraction: 0.1,
        ..room.options(&["a.jsonl", "b.jsonl"])
    };
    let report = prepare(&options, &Silent).unwrap();
    let documents = room.documents();
    let tokens =
        |text: &str| documents.iter().filter(|own| *own == text).count() as u64 * (text.len() as u64 + 1);
    assert_eq!(
        report.sources.iter().map(|source| source.num_tokens).collect::<Vec<_>>(),
        [tokens("aaaa"), tokens("bb")]
    );
    assert_eq!(report.train.num_tokens, tokens("aaaa") + tokens("bb"));
    for weights in [vec![1.0], vec![1.0, 0.0]] {
        let options = PrepareOptions { weights, ..options.clone() };
        assert!(matches!(prepare(&options, &Silent), Err(DataError::Weights { .. })));
    }
}

#[test]
fn texts_to_validate_on_may_be_others() {
    let room = Room::new(&[("train.txt", b"to train on"), ("own.txt", b"to validate on")]);
    let options = room.options(&["train.txt"]);
    let own = PrepareOptions { validation_inputs: vec![room.path("in/own.txt")], ..options.clone() };
    prepare(&own, &Silent).unwrap();
    let corpus = Corpus::open(&room.path("out")).unwrap();
    assert_eq!(decoded(&corpus.validation.unwrap().tokens, &Tokenizer::bytes()), ["to validate on"]);
    assert_eq!(room.documents(), ["to train on"]);
    assert!(is_current(&own).unwrap() && !is_current(&options).unwrap());
    fs::write(room.path("in/own.txt"), "another").unwrap();
    assert!(!is_current(&own).unwrap());
    let both = PrepareOptions { validation_fraction: 0.1, ..own };
    assert!(matches!(prepare(&both, &Silent), Err(DataError::TwoValidations { .. })));
}

#[cfg(feature = "parquet")]
#[test]
fn rows_of_parquet_are_read_as_lines_of_json() {
    // Files written by PyArrow 26, with lists of structs and with two row groups.
    let (messages, text) = (include_bytes!("../messages.parquet"), include_bytes!("../text.parquet"));
    let room = Room::new(&[("text.parquet", text), ("messages.parquet", messages)]);
    prepare(&room.options(&["text.parquet"]), &Silent).unwrap();
    assert_eq!(room.documents(), ["one", "two", "three"]);
    let chatml =
        PrepareOptions { chat_template: Some(ChatTemplate::chatml()), ..room.options(&["messages.parquet"]) };
    prepare(&chatml, &Silent).unwrap();
    assert_eq!(counted(&room), ["2<|im_end|>", "1<|im_end|>"]);
    let damaged = Room::new(&[("a.parquet", &messages[..999])]);
    assert!(matches!(prepare(&damaged.options(&["a.parquet"]), &Silent), Err(DataError::Read { .. })));
}

#[cfg(not(feature = "parquet"))]
#[test]
fn parquet_is_refused_with_the_feature_that_reads_it() {
    let room = Room::new(&[("text.parquet", b"PAR1")]);
    let error = prepare(&room.options(&["text.parquet"]), &Silent).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("--features parquet"), "{source}");
}
