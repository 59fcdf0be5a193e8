//! Text and token files that cannot be trained on.

use crate::common::{Fixture, assert_contains};

#[test]
fn inputs_that_are_no_text() {
    let fixture = Fixture::new();
    fixture.write("empty.txt", "");
    fixture.write("binary.dat", b"some\0thing".repeat(50));
    fixture.write("latin.txt", [b"caf\xe9 ".repeat(9).as_slice(), b"more".as_slice()].concat());
    fixture.write("broken.jsonl", "{\"text\": \"fine\"}\n{\"text\": \n");
    fixture.write("fields.jsonl", "{\"text\": \"fine\"}\n{\"body\": \"what?\"}\n");
    for (arguments, facts) in [
        ("nowhere.txt", &["input nowhere.txt does not exist"] as &[&str]),
        ("empty.txt", &["no text", "1 empty"]),
        ("binary.dat", &["binary.dat is binary", "offset 4"]),
        ("latin.txt --invalid-utf8 refuse", &["latin.txt is not valid UTF-8", "byte 3"]),
        ("broken.jsonl", &["broken.jsonl, line 2"]),
        ("fields.jsonl", &["fields.jsonl, line 2", "field 'text'"]),
        ("text.txt --tokenizer none.json", &["the tokenizer none.json does not exist"]),
        ("text.txt --tokenizer tiny.toml", &["cannot load the tokenizer tiny.toml"]),
        ("text.txt --train-bpe 100", &["vocabulary of 100", "257"]),
        ("text.txt --validation-fraction 2", &["validation fraction 2"]),
    ] {
        assert_contains(
            &fixture.refused_without_changes(&format!("prepare {arguments} --out corpus")),
            facts,
        );
    }
    for (input, fact) in [("nowhere.txt", "nowhere.txt"), ("empty.txt", "no text"), ("binary.dat", "binary")]
    {
        let error =
            fixture.refused_without_changes(&format!("train tiny.toml --set data.inputs=['{input}']"));
        assert_contains(&error, &[fact]);
    }
}

#[test]
fn a_failed_preparation_leaves_the_earlier_corpus() {
    let fixture = Fixture::with_corpus();
    fixture.write("binary.dat", [0; 9]);
    fixture.refused_without_changes("prepare text.txt binary.dat --out corpus");
    fixture.run("train tiny.toml --workers 1").succeeded();
}

#[test]
fn invalid_utf8_is_replaced_and_counted() {
    let fixture = Fixture::new();
    fixture.write("latin.txt", b"caf\xe9 au lait, ".repeat(60));
    let printed = fixture.run("prepare latin.txt --out corpus").succeeded();
    assert_contains(&printed, &["replaced 60 invalid UTF-8 sequences with U+FFFD"]);
}

#[test]
fn a_tokenizer_larger_than_the_vocabulary_of_the_model() {
    let fixture = Fixture::with_corpus();
    for workers in [1, 2] {
        let command = format!("train tiny.toml --set model.vocab_size=100 --workers {workers}");
        assert_contains(
            &fixture.refused_without_changes(&command),
            &["257 tokens", "vocab_size is 100", "corpus"],
        );
    }
}

#[test]
fn token_files_that_are_not_what_was_written() {
    let assert_refused = |damage: fn(&Fixture), facts: &[&str]| {
        let fixture = Fixture::with_corpus();
        damage(&fixture);
        for workers in [1, 2] {
            assert_contains(
                &fixture.refused_without_changes(&format!("train tiny.toml --workers {workers}")),
                facts,
            );
        }
    };
    assert_refused(|fixture| fixture.cut("corpus/train.tokens", 10), &["corpus/train.tokens", "truncated"]);
    assert_refused(
        |fixture| fixture.flip_bit("corpus/train.tokens"),
        &["corpus/train.tokens is damaged", "checksum"],
    );
    assert_refused(
        |fixture| fixture.write("corpus/train.tokens", "text"),
        &["corpus/train.tokens is not a token file"],
    );
    assert_refused(|fixture| fixture.write("corpus/prepare.json", "{"), &["corpus/prepare.json is damaged"]);
    assert_refused(
        |fixture| std::fs::remove_dir_all(fixture.path("corpus")).unwrap(),
        &["corpus contains no prepared corpus"],
    );
}

#[test]
fn a_stored_tokenizer_that_has_changed() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --workers 1").succeeded();
    fixture.flip_bit("corpus/tokenizer.bytes.json");
    for workers in [1, 2] {
        let command = format!("train tiny.toml --workers {workers} --set run.name=again");
        assert_contains(&fixture.run(&command).refused(), &["corpus/tokenizer.bytes.json is damaged"]);
    }
    fixture.flip_bit("runs/tiny/checkpoints/step-4/tokenizer.bytes.json");
    assert_contains(
        &fixture.run("generate runs/tiny").refused(),
        &["step-4/tokenizer.bytes.json is damaged", "checksum"],
    );
    fixture.run("generate runs/tiny --tokenizer bytes --num-tokens 1").succeeded();
}

#[test]
fn a_tokenizer_that_the_library_cannot_take() {
    let fixture = Fixture::new();
    for (normalizer, fact) in [
        (
            r#"{"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}"#,
            "damaged precompiled_charsmap",
        ),
        (r#"{"type": "Replace", "pattern": {"String": ""}, "content": "x"}"#, "an empty pattern"),
    ] {
        fixture.write("tokenizer.json", format!("{{\"normalizer\": {normalizer}}}"));
        let error =
            fixture.refused_without_changes("prepare text.txt --tokenizer tokenizer.json --out corpus");
        assert_contains(&error, &["cannot load the tokenizer tokenizer.json", fact]);
    }
}

#[test]
fn a_tokenizer_without_a_token_for_the_text() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    let tokenizer = |vocabulary: &str| {
        format!(
            r#"{{"added_tokens": [{{"id": 1, "content": "</s>", "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false}}], "model": {{"type": "BPE", "vocab": {vocabulary}, "merges": []}}}}"#
        )
    };
    fixture.write("empty.json", tokenizer("{}"));
    fixture.write("x.json", tokenizer(r#"{"x": 0}"#));
    fixture.write("y.txt", "yy yy\n");
    let prepare = "prepare y.txt --out y --tokenizer";
    assert_contains(
        &fixture.refused_without_changes(&format!("{prepare} empty.json")),
        &["model.vocab is empty"],
    );
    assert_contains(
        &fixture.refused_without_changes(&format!("{prepare} x.json")),
        &["has no token for any of the text"],
    );
    let error = fixture.run("generate runs/tiny --tokenizer x.json --prompt yy").refused();
    assert_contains(&error, &["no token for any character of the prompt \"yy\""]);
}

#[test]
fn ends_of_texts_that_are_no_tokens_are_named() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture.run("checkpoint export runs/tiny model").succeeded();
    let warned = |config: &str| {
        fixture.write("model/generation_config.json", config);
        let outcome = fixture.run("generate model --num-tokens 1");
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        outcome.stderr
    };
    assert_eq!(warned(r#"{"eos_token_id": [256, 10]}"#), "");
    assert_contains(
        &warned("{\"eos"),
        &["warning: model/generation_config.json is not read: ", "its eos_token_id is missing"],
    );
    for (ids, shown) in
        [("[256, -1, 4000000000]", "-1"), ("257", "257"), ("\"</s>\"", "\"</s>\""), ("[[1]]", "[1]")]
    {
        let fact = format!(
            "warning: model/generation_config.json: eos_token_id has {shown}, which is not one of the 257 tokens"
        );
        assert_contains(&warned(&format!("{{\"eos_token_id\": {ids}}}")), &[&fact]);
    }
}

#[test]
fn a_text_shorter_than_one_sequence() {
    let fixture = Fixture::with_corpus();
    let error = fixture.refused_without_changes("train tiny.toml --set training.seq_len=100000");
    assert_contains(&error, &["too few for one sequence of 100000"]);
}
