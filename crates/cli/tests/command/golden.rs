//! Golden values of PyTorch, transformers and lm-evaluation-harness, which `peers/fine_tuning_reference.py` computes.

use crate::common::{Fixture, Running, assert_contains};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Tolerance of losses, which torch computes in f32.
const LOSS_TOLERANCE: f64 = 1e-5;
/// Tolerance of log-likelihoods, which are sums over some tens of tokens.
const LIKELIHOOD_TOLERANCE: f64 = 1e-3;

/// Creates a fixture with the files of the golden values.
fn fixture() -> Fixture {
    let fixture = Fixture::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    fs::create_dir(fixture.path("chat_model")).unwrap();
    for folder in ["", "chat_model"] {
        for entry in fs::read_dir(golden.join(folder)).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_file() {
                fs::copy(entry.path(), fixture.path(folder).join(entry.file_name())).unwrap();
            }
        }
    }
    fixture
}

fn read(fixture: &Fixture, name: &str) -> Value {
    serde_json::from_str(&fixture.read(name)).unwrap()
}

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

#[track_caller]
fn assert_near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "{found} instead of {expected}");
}

#[test]
fn fine_tuning_has_the_losses_of_transformers() {
    let fixture = fixture();
    let golden = read(&fixture, "chat_losses.json");
    fixture.write(
        "chat.toml",
        "[model]\ninit_from = \"chat_model\"\n[data]\ninputs = [\"chat.jsonl\"]\nvalidation_fraction = 0.0\n[training]\n\
         local_batch_size = 1\nglobal_batch_size = 16\nseq_len = 128\nsteps = 10\nthreads = 1\n[optimizer]\nlr = 1e-3\n\
         [lr_scheduler]\ndecay = \"constant\"\n[generate]\nnum_tokens = 0\n",
    );
    for workers in [1, 2] {
        let name = format!("chat-{workers}");
        fixture.run(&format!("train chat.toml --workers {workers} --set run.name={name}")).succeeded();
        let records = fixture.records(&name);
        assert_eq!(records.len(), 10);
        for (record, (loss, norm)) in
            records.iter().zip(numbers(&golden["losses"]).into_iter().zip(numbers(&golden["grad_norms"])))
        {
            assert_near(record["loss"].as_f64().unwrap(), loss, LOSS_TOLERANCE);
            assert_near(record["grad_norm"].as_f64().unwrap(), norm, LOSS_TOLERANCE);
        }
    }
}

#[test]
fn questions_have_the_scores_of_the_harness() {
    let fixture = fixture();
    let golden = read(&fixture, "multiple_choice.json");
    let found = fixture.run("eval chat_model multiple_choice.jsonl --json").succeeded();
    let found: Value = serde_json::from_str(&found).unwrap();
    for name in ["acc", "acc_stderr", "acc_norm", "acc_norm_stderr"] {
        assert_near(found[name].as_f64().unwrap(), golden[name].as_f64().unwrap(), 1e-9);
    }
    let (all, expected) =
        (found["log_likelihoods"].as_array().unwrap(), golden["loglikelihoods"].as_array().unwrap());
    assert_eq!([all.len(), expected.len()], [20, 20]);
    for (found, expected) in all.iter().zip(expected) {
        let (found, expected) = (numbers(found), numbers(expected));
        assert_eq!(found.len(), expected.len());
        found
            .into_iter()
            .zip(expected)
            .for_each(|(found, expected)| assert_near(found, expected, LIKELIHOOD_TOLERANCE));
    }
}

#[test]
fn a_text_has_the_loss_of_torch() {
    let fixture = fixture();
    // Sequences of 64 tokens divide the text without a remainder.
    let golden = &read(&fixture, "eval_text.json")["seq_len_64"];
    let found = fixture.run("eval chat_model eval_text.txt --seq-len 64 --json").succeeded();
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found["num_tokens"], golden["num_tokens"]);
    assert_near(found["loss"].as_f64().unwrap(), golden["loss"].as_f64().unwrap(), LOSS_TOLERANCE);
    assert_near(
        found["bits_per_byte"].as_f64().unwrap(),
        golden["bits_per_byte"].as_f64().unwrap(),
        LOSS_TOLERANCE,
    );
    assert_near(found["perplexity"].as_f64().unwrap(), golden["perplexity"].as_f64().unwrap(), 1e-2);
}

/// Names of special tokens that a user types into a message stay text, unless a config says otherwise.
#[test]
fn names_of_special_tokens_in_messages_are_text() {
    let fixture = fixture();
    let answer = |text: &str| {
        let messages = json!([{ "role": "user", "content": "b" }, { "role": "assistant", "content": text }]);
        format!("{}\n", json!({ "messages": messages }))
    };
    fixture.write("typed.jsonl", answer("<|endoftext|>"));
    let found = fixture.run("eval chat_model typed.jsonl --json").succeeded();
    let found: Value = serde_json::from_str(&found).unwrap();
    // If the name were encoded as the special token, the answer would have two tokens: this one, and the end of the answer.
    assert!(found["num_tokens"].as_u64().unwrap() > 2, "{found}");
    let generated = |prompt: &[&str]| -> Value {
        let mut generate =
            fixture.command("generate chat_model --json --num-tokens 20 --seed 3 --ignore-end");
        generate.args(prompt);
        serde_json::from_str(&Running::start(generate).end().succeeded()).unwrap()
    };
    let typed = generated(&["--chat", "--prompt", "<|endoftext|>"]);
    let rendered = generated(&["--prompt", "user: <|endoftext|>\nbot: "]);
    assert_eq!(typed["prompt"], rendered["prompt"]);
    assert_ne!(typed["text"], rendered["text"], "a prompt that is no message may hold special tokens");
    fixture.write(
        "typed.toml",
        "[model]\ninit_from = \"chat_model\"\n[data]\ninputs = [\"typed.jsonl\"]\nvalidation_fraction = 0.0\n[training]\n\
         seq_len = 32\nsteps = 1\nthreads = 1\nlocal_batch_size = 1\nglobal_batch_size = 1\n[generate]\nnum_tokens = 0\n",
    );
    let note = "of special tokens in messages stayed text";
    for (parses_names, found) in [(false, 1), (true, 0)] {
        let set =
            format!("--set data.special_tokens_in_messages={parses_names} --set run.name={parses_names}");
        let outcome = fixture.run(&format!("train typed.toml {set}"));
        let is_noted = outcome.stdout.contains(&format!("1 name {note}"));
        assert_eq!(outcome.stdout.contains("[data] special_tokens_in_messages says"), is_noted);
        outcome.succeeded();
        let report = read(&fixture, &format!("runs/{parses_names}/data/prepare.json"));
        assert_eq!((report["num_literal_names"].as_u64(), is_noted), (Some(found), found == 1));
    }
    fixture.write("typed.jsonl", answer("<|endoftext|>").repeat(2));
    let prepared = fixture.run("prepare typed.jsonl --tokenizer chat_model --out corpus");
    assert_contains(&prepared.stdout, &[&format!("2 names {note}")]);
    // Like templates that drop the reasoning of earlier answers, this one formats earlier answers differently from the last one.
    let template = fixture.read("chat_model/chat_template.jinja");
    let rewriting = template
        .replace("'bot: ' }}\n        {%- gen", "'bot: ' if loop.last else 'ex-bot: ' }}\n        {%- gen");
    let rewriting = rewriting.replace("{%- generation %}", "").replace("{%- endgeneration %}", "");
    fixture.write("chat_model/chat_template.jinja", rewriting);
    let turns = json!([
        { "role": "user", "content": "b" }, { "role": "assistant", "content": "c" },
        { "role": "user", "content": "d" }, { "role": "assistant", "content": "e" },
    ]);
    fixture.write("turns.jsonl", format!("{}\n", json!({ "messages": turns })));
    let prepared = fixture.run("prepare turns.jsonl --tokenizer chat_model --out turns");
    assert_contains(&prepared.stdout, &["1 of the conversations became one document for each answer"]);
}
