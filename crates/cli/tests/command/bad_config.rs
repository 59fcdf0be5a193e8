//! Configs and arguments with mistakes.

use crate::common::{Fixture, assert_contains};

const MISTAKEN: &str = "\
[model]
architecture = \"gpt3\"
hiden_size = 32
num_layers = \"one\"
[data]
inputs = \"text.txt\"
[training]
seq_len = 16.5
stesp = 4
local_batch_size = 0
[optimiser]
lr = 1
[checkpoint]
interval =
";

#[test]
fn all_mistakes_are_reported_at_once_with_their_lines() {
    let fixture = Fixture::new();
    fixture.write("mistaken.toml", MISTAKEN);
    for command in ["train mistaken.toml", "config mistaken.toml"] {
        let error = fixture.refused_without_changes(command);
        assert_contains(
            &error,
            &[
                "9 mistakes",
                "mistaken.toml:2: architecture = \"gpt3\": expected \"gpt2\" or \"llama\"; did you mean \"gpt2\"?",
                "mistaken.toml:3: hiden_size = 32: unknown key in [model]; did you mean 'hidden_size'?",
                "mistaken.toml:4: num_layers = \"one\": expected a whole number",
                "mistaken.toml:6: inputs = \"text.txt\": expected a list",
                "mistaken.toml:8: seq_len = 16.5: expected a whole number",
                "mistaken.toml:9: stesp = 4: unknown key in [training]; did you mean 'steps'?",
                "mistaken.toml:10: local_batch_size = 0: expected a whole number from 1",
                "mistaken.toml:11: [optimiser]: unknown section; did you mean [optimizer]?",
                "mistaken.toml:14: interval =:",
            ],
        );
        assert_eq!(error.lines().count(), 10, "{error}");
    }
}

#[test]
fn values_that_cannot_be() {
    let fixture = Fixture::with_corpus();
    for (setting, facts) in [
        (
            "training.global_batch_size=7",
            &["--set training.global_batch_size=7", "not a multiple", "2 x 2 workers = 4"] as &[&str],
        ),
        ("training.global_batch_size=4611686018427387904", &["microbatches", "more than 65536"]),
        ("training.local_batch_size=-1", &["expected a whole number from 1"]),
        ("training.steps=many", &["expected a whole number, 0 or more"]),
        ("training.dtype=int8", &["expected \"f32\", \"bf16\" or \"f16\""]),
        (
            "training.fp8=hybrid",
            &["fp8 requires bf16 for everything that is not rounded to fp8", "set dtype = \"bf16\""],
        ),
        ("launch.workers=-1", &["expected a whole number from 0"]),
        ("model.num_heads=5", &["num_heads 5 does not divide hidden_size 32"]),
        ("comm.bind_address=::1", &["unknown key in [comm]"]),
        ("run.name=../elsewhere", &["expected the name of a single folder"]),
        ("checkpoint.resume=atuo", &["expected \"auto\", \"never\" or the path"]),
        ("nonsense", &["--set nonsense: expected section.key=value"]),
        ("model.hidden_size=1048576 --set model.vocab_size=16777216", &["out of memory", "for parameters"]),
    ] {
        let error = fixture.run(&format!("train tiny.toml --workers 2 --set {setting}")).refused();
        assert_contains(&error, facts);
        assert!(!fixture.path("runs/tiny/checkpoints").exists(), "{setting}");
    }
}

#[test]
fn files_that_are_no_config() {
    let fixture = Fixture::new();
    fixture.write("latin.toml", b"[run]\nname = \"caf\xe9\"\n");
    fixture.write("binary.toml", b"\x1b[31m\0".repeat(9));
    assert_contains(
        &fixture.refused_without_changes("train nowhere.toml"),
        &["the config nowhere.toml does not exist; its folder has binary.toml, latin.toml"],
    );
    assert_contains(&fixture.refused_without_changes("train ."), &[". is a folder; expected a config"]);
    assert_contains(&fixture.refused_without_changes("train latin.toml"), &["latin.toml", "UTF-8"]);
    let error = fixture.refused_without_changes("train binary.toml");
    assert_contains(&error, &["binary.toml:1"]);
    assert!(!error.contains(['\0', '\x1b']), "what is in a file does not reach the terminal: {error:?}");
}

#[test]
fn checkpoints_that_this_run_cannot_resume_from() {
    let fixture = Fixture::with_corpus();
    let error = fixture.run("train tiny.toml --workers 1 --set checkpoint.resume=./nowhere").refused();
    assert_contains(&error, &["./nowhere does not exist"]);
    std::fs::create_dir_all(fixture.path("empty/checkpoints")).unwrap();
    let error = fixture.run("train tiny.toml --workers 1 --set checkpoint.resume=./empty").refused();
    assert_contains(
        &error,
        &["./empty contains no checkpoint; expected a checkpoint, or the folder of a run"],
    );
    fixture.run("train tiny.toml --workers 1").succeeded();
    let before = fixture.read("runs/tiny/metrics.jsonl");
    for workers in [1, 2] {
        let command =
            format!("train tiny.toml --workers {workers} --set training.steps=6 --set training.seed=9");
        assert_contains(
            &fixture.run(&command).refused(),
            &["runs/tiny/checkpoints/step-4", "seed 0", "has 9"],
        );
        for (key, value, old) in
            [("num_layers", "2", "1"), ("num_heads", "4", "2"), ("norm_eps", "0.125", "0.00001")]
        {
            let command = format!(
                "train tiny.toml --workers {workers} --set training.steps=6 --set model.{key}={value}"
            );
            let difference = format!("contains another model: {key} {old} instead of {value}");
            assert_contains(
                &fixture.run(&command).refused(),
                &["runs/tiny/checkpoints/step-4", &difference, "[run] name"],
            );
        }
    }
    assert_eq!(fixture.read("runs/tiny/metrics.jsonl"), before);
    assert_eq!(fixture.complete_checkpoints("tiny"), 2);
}

#[test]
fn folders_that_are_not_there_or_are_something_else() {
    let fixture = Fixture::with_corpus();
    assert_contains(
        &fixture.run("generate nowhere").refused(),
        &["nowhere does not exist; expected the folder of a run"],
    );
    std::fs::create_dir(fixture.path("empty")).unwrap();
    assert_contains(&fixture.run("generate empty").refused(), &["empty contains no checkpoint and no model"]);
    for folder in ["nowhere", "empty"] {
        let error = fixture.run(&format!("report run {folder}")).refused();
        assert_contains(&error, &[&format!("{folder} has no metrics.jsonl"), "expected the folder of a run"]);
    }
}

#[test]
fn settings_of_text_for_a_folder_that_is_prepared() {
    let fixture = Fixture::with_corpus();
    fixture.run("prepare text.txt --out prepared").succeeded();
    let prepared = "train tiny.toml --workers 1 --set data.inputs=[] --set data.folder=prepared";
    let error = fixture.refused_without_changes(&format!("{prepared} --set data.tokenizer=tokenizer.json"));
    assert_contains(&error, &["data.tokenizer", "only applies to `inputs`"]);
    // Settings that change no token ids are no mistake: one config works before and after its text is prepared.
    let printed =
        fixture.run(&format!("{prepared} --set data.extensions=['md'] --set data.field=body")).succeeded();
    assert_contains(
        &printed,
        &["note: without effect in [data]: extensions, field; the tokens in prepared are used"],
    );
}

#[test]
fn arguments_that_cannot_be() {
    let fixture = Fixture::new();
    assert_contains(&fixture.refused_without_changes("generate nowhere"), &["nowhere"]);
    assert_contains(
        &fixture.refused_without_changes("generate . --temperature -1 "),
        &["--temperature is -1"],
    );
    assert_contains(&fixture.refused_without_changes("generate . --top-p 2"), &["--top-p is 2"]);
    assert_contains(&fixture.refused_without_changes("generate . --min-p=-1"), &["--min-p is -1"]);
    assert_contains(&fixture.refused_without_changes("checkpoint list ."), &["contains no checkpoints"]);
    assert_contains(&fixture.refused_without_changes("checkpoint export nowhere out"), &["nowhere"]);
    assert_contains(
        &fixture.refused_without_changes("config --explain optimiser"),
        &["did you mean [optimizer]?"],
    );
    assert_contains(
        &fixture.refused_without_changes("bench step --model nowhere --workers 2"),
        &["nowhere/config.json"],
    );
    let outcome = fixture.run("trian tiny.toml");
    assert_eq!(outcome.code, Some(2));
    assert_contains(&outcome.stderr, &["unrecognized subcommand 'trian'", "'train'"]);
}

#[test]
fn more_threads_and_workers_than_there_can_be() {
    let fixture = Fixture::with_corpus();
    for (command, fact) in [
        ("generate . --threads 99999", "99999 threads exceed the maximum of 4096"),
        ("prepare text.txt --out other --threads 99999", "99999 tokenizer threads exceed the maximum of 256"),
        ("train tiny.toml --set training.threads=99999", "from 0 to 4096"),
        ("train tiny.toml --set launch.workers=99999", "from 0 to 4096"),
        ("train tiny.toml --workers 99999", "from 0 to 4096"),
    ] {
        assert_contains(&fixture.refused_without_changes(command), &[fact]);
    }
}
