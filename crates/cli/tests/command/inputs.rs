//! Data in the forms that people have, and the display of the samples that are made of them.

use crate::common::{Fixture, Running, assert_contains};
use serde_json::Value;
use std::fs::File;
use std::process::Stdio;

const SHARE_GPT: &str =
    r#"{"conversations": [{"from": "human", "value": "after one"}, {"from": "gpt", "value": "two"}]}"#;
const ALPACA: &str = r#"{"instruction": "Add.", "input": "1 and 2", "output": "3"}"#;

#[test]
fn records_of_other_programs_are_trained_on_and_named() {
    let fixture = Fixture::new();
    fixture.write("chat.jsonl", format!("{SHARE_GPT}\n").repeat(40));
    fixture.write("alpaca.json", format!("[{}]", vec![ALPACA; 40].join(", ")));
    let template = "--chat-template chatml";
    let printed = fixture.run(&format!("prepare alpaca.json {template} --out alpaca")).succeeded();
    assert_contains(
        &printed,
        &["read 40 Alpaca records, 1 file as a JSON array of records", "loss on answers only"],
    );
    let error = fixture.refused_without_changes("prepare alpaca.json --out c");
    assert_contains(
        &error,
        &["alpaca.json, record 1, line 1 is a conversation, but there is no chat template"],
    );
    let train = "train tiny.toml --set data.chat_template=chatml --set training.seq_len=64 --set data.inputs=[\"chat.jsonl\"]";
    let outcome = fixture.run(train);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_contains(&outcome.stdout, &["read 40 ShareGPT conversations"]);
}

#[test]
fn a_dry_run_refuses_a_vocabulary_before_the_text_is_prepared() {
    let fixture = Fixture::new();
    let dry = "train tiny.toml --dry-run --set model.vocab_size=";
    let facts = ["has 257 tokens, but the model's vocab_size is 100"];
    assert_contains(&fixture.refused_without_changes(&format!("{dry}100")), &facts);
    assert_contains(&fixture.refused_without_changes(&format!("{dry}100 --set data.train_bpe=300")), &facts);
    fixture.run(&format!("{dry}257")).succeeded();
}

#[test]
fn mistakes_of_prepare_are_named() {
    let fixture = Fixture::with_corpus();
    std::fs::create_dir(fixture.path("texts")).unwrap();
    fixture.write("texts/a.txt", "a text");
    fixture.write("b.txt", "another text");
    for (arguments, fact) in [
        ("prepare texts --out texts", "input texts is also the output folder"),
        ("prepare b.txt --out b.txt", "the output b.txt is a file"),
        ("prepare text.txt --out b.txt", "the output b.txt is a file"),
        ("prepare text.txt b.txt --weights 1,0 --out c", "the weight of b.txt is 0; expected a number"),
        ("prepare text.txt b.txt --weights 1,-1 --out c", "the weight of b.txt is -1; expected a number"),
    ] {
        assert_contains(&fixture.refused_without_changes(arguments), &[fact]);
    }
}

#[test]
fn the_standard_input_has_no_path() {
    let fixture = Fixture::new();
    let prepare = |text: &str| {
        fixture.write("piped", text);
        let mut command = fixture.command("prepare - --out out");
        command.stdin(Stdio::from(File::open(fixture.path("piped")).unwrap()));
        Running::start(command).end()
    };
    prepare("\u{feff}[\n{\"text\": \"one two three four five six seven eight nine\"}, {\"text\": \"two\"}]")
        .succeeded();
    let report: Value = serde_json::from_str(&fixture.read("out/prepare.json")).unwrap();
    assert_eq!((&report["inputs"][0], &report["foreign_forms"]["num_arrays"]), (&"-".into(), &1.into()));
    let error = prepare("{\"text\": 3}").refused();
    assert!(error.starts_with("error: standard input, line 1: field 'text' is a number"), "{error}");
    assert!(!error.contains(".trireme-prepare"), "{error}");
}

#[test]
fn questions_and_texts_in_one_file_are_distinguished() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    let (question, text) =
        (r#"{"context": "a", "choices": ["b", "c"], "answer": 0}"#, r#"{"text": "one two"}"#);
    let refused = |lines: &[&str]| {
        fixture.write("mixed.jsonl", lines.join("\n"));
        fixture.run("eval runs/tiny mixed.jsonl").refused()
    };
    assert_contains(
        &refused(&[question, text]),
        &["mixed.jsonl, line 2: it has no `choices`, but the file begins with a question"],
    );
    assert_contains(
        &refused(&[text, question]),
        &["mixed.jsonl, line 2 is a question with `choices`", "separate file"],
    );
    assert_contains(&refused(&[&question.replace(", \"c\"", "")]), &["line 1: it has 1 of the two choices"]);
}

#[test]
fn contents_in_parts_are_prompts() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    fixture.write("plain.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}");
    let prompt = |content: &str| {
        fixture.write(
            "p.jsonl",
            format!("\u{feff}{{\"messages\": [{{\"role\": \"user\", \"content\": {content}}}]}}\n"),
        );
        fixture.run(
            "generate runs/tiny --chat-template plain.jinja --prompt-file p.jsonl --json --num-tokens 1 --seed 3",
        )
    };
    let parts = r#"[{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]"#;
    assert_eq!(prompt(parts).succeeded(), prompt("\"a b\"").succeeded());
    let error = prompt(r#"[{"type": "image_url", "image_url": {"url": "x"}}]"#).refused();
    assert_contains(&error, &["line 1 of p.jsonl", "message 1 has a part of type \"image_url\""]);
}

#[test]
fn samples_are_shown_as_they_are_trained_on() {
    let fixture = Fixture::new();
    fixture.write("chat.jsonl", format!("{SHARE_GPT}\n").repeat(200));
    let config = fixture
        .read("tiny.toml")
        .replace("inputs = [\"text.txt\"]", "inputs = [\"chat.jsonl\"]\nchat_template = \"chatml\"");
    fixture.write("chat.toml", config);
    let show = "data show chat.toml --set training.seq_len=200 --num-samples 1";
    let shown = fixture.run(&format!("{show} --sample 2")).succeeded();
    assert_contains(
        &shown,
        &[
            "runs/chat/data, train: 95 samples of 200 tokens, loss on answers, attention within documents",
            "sample 2: tokens ",
            ", in 2 documents; 26 learned, ",
            "<|im_start|>assistant\u{21b5}\n\u{27e6}two<|im_end|>\u{27e7}\u{21b5}\n",
            "\n--- next document ---\n<|im_start|>user\u{21b5}\nafter one",
            " of padding ---\n",
            "learned tokens per sample: least 26, mean 26.0, most 26",
            "every sample has something to learn",
        ],
    );
    // The config's corpus is the one on which the run trains, and can be shown by its folder.
    fixture.run("train chat.toml --set training.seq_len=200").succeeded();
    let (_, of_config) = shown.split_once('\n').unwrap();
    let of_folder = fixture.run("data show runs/chat/data --sample 2 --set training.seq_len=200").succeeded();
    assert_eq!(of_folder.split_once('\n').unwrap().1, of_config);
    // Sequences that are shorter than a question have nothing to learn.
    let short = "data show runs/chat/data --set training.seq_len=16 --tokens";
    let shown = fixture.run(short).succeeded();
    assert_contains(&shown, &["nothing to learn in ", "position       id  learned  token\n       0 "]);
    let held_out = fixture.run("data show runs/chat/data --validation --set training.seq_len=16").succeeded();
    assert_contains(&held_out, &["runs/chat/data, validation: "]);
    assert_contains(
        &fixture.run("data show runs").refused(),
        &["runs contains no prepared corpus; give the folder of one"],
    );
    fixture.run("prepare text.txt --out text").succeeded();
    assert_contains(
        &fixture.run("data show text").succeeded(),
        &["loss on all tokens, attention across documents"],
    );
    let long = fixture.run("data show text --set training.seq_len=100000").refused();
    assert_contains(&long, &["too few for one sequence of 100000", "seq_len"]);
}
