//! The first steps of a new user: `init`, words of other systems, models by name, and generated texts.

use crate::common::{Fixture, Running, assert_contains, free_port};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn a_first_run_needs_nothing_else() {
    let fixture = Fixture::new();
    assert_contains(
        &fixture.run("init first").succeeded(),
        &["first/train.toml", "cd first && trireme train"],
    );
    assert_contains(&fixture.refused_without_changes("init first"), &["first/train.toml exists"]);
    let config = fixture.read("first/train.toml");
    assert!(config.lines().filter(|line| line.starts_with('#')).count() > 8, "{config}");
    let mut command = fixture.command(
        "train --set training.steps=3 --set training.validation_interval=0 --set data.train_bpe=300",
    );
    command.current_dir(fixture.path("first"));
    let printed = Running::start(command).end();
    assert_contains(&printed.stdout, &["step: 3 ", "--- sample ---", "runs/train"]);
    assert_contains(&fixture.refused_without_changes("train"), &["the config train.toml does not exist"]);
    assert_contains(
        &fixture.refused_without_changes("train empty/train.toml"),
        &["begin with `trireme init DIR`"],
    );
    fixture.write("chat.jsonl", "{}\n");
    assert_contains(
        &fixture.refused_without_changes("train chat.jsonl"),
        &["chat.jsonl looks like data", "[data] inputs = [\"chat.jsonl\"]"],
    );
}

#[test]
fn words_of_other_systems_lead_to_keys() {
    let fixture = Fixture::with_corpus();
    for (set, key) in [
        ("training.learning_rate=1", "it is called 'lr' here, in [optimizer]"),
        ("training.per_device_train_batch_size=1", "it is called 'local_batch_size' here, in [training]"),
        ("training.gradient_accumulation_steps=1", "it is called 'global_batch_size' here, in [training]"),
        ("training.bf16=true", "it is called 'dtype' here, in [training] (dtype = \"bf16\")"),
        ("parallelism.fsdp=true", "it is called 'zero_stage' here"),
        ("data.train_file=a", "it is called 'inputs' here, in [data]"),
        ("lr=1", "expected section.key=value; did you mean optimizer.lr?"),
        ("train_file=a", "did you mean data.inputs?"),
    ] {
        assert_contains(&fixture.refused_without_changes(&format!("train tiny.toml --set {set}")), &[key]);
    }
    assert_contains(
        &fixture.run("config --explain learning_rate").succeeded(),
        &["`learning_rate` in other systems is optimizer.lr here", "[optimizer]", "\nlr = 3e-4"],
    );
    assert_contains(
        &fixture.run("config --explain optimizer.lr").succeeded(),
        &["[optimizer]", "\nlr = 3e-4"],
    );
    // The key with exactly this name precedes keys that only mention it.
    assert!(fixture.run("config --explain workers").succeeded().trim_start().starts_with("[launch]"));
    for (command, hint) in [
        ("train tiny.toml --lr 1", "`--set optimizer.lr=VALUE`"),
        ("train tiny.toml --per-device-train-batch-size 1", "`--set training.local_batch_size=VALUE`"),
        ("train --config tiny.toml", "`trireme train my.toml`"),
        ("export runs/tiny", "`trireme checkpoint export`"),
        ("finetune", "`trireme train, with [model] init_from`"),
    ] {
        let outcome = fixture.run(command);
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert_contains(&outcome.stderr, &[hint]);
    }
    assert_contains(&fixture.run("config --explain dropout").succeeded(), &["[model]", "\ndropout = 0.0"]);
    assert_contains(
        &fixture.run("config --explain metrics").succeeded(),
        &["[metrics]\n", "\nlog_interval = 10"],
    );
    assert_contains(
        &fixture.run("config --explain zebra").refused(),
        &["no section is named 'zebra', and no key mentions it"],
    );
    assert_contains(&fixture.run("train tiny.toml --nproc 1").succeeded(), &["1 worker x 1 thread"]);
}

#[test]
fn shells_and_manuals_know_the_commands() {
    let fixture = Fixture::new();
    for shell in ["bash", "zsh", "fish"] {
        assert_contains(
            &fixture.run(&format!("completions {shell}")).succeeded(),
            &["prepare", "chat-template"],
        );
    }
    fixture.run("man pages").succeeded();
    assert!(
        fixture.names("pages").iter().any(|name| name == "trireme-train.1"),
        "{:?}",
        fixture.names("pages")
    );
    assert_contains(&fixture.read("pages/trireme-train.1"), &["config"]);
}

#[test]
fn models_have_names_in_the_cache_of_the_hub() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml").succeeded();
    let snapshot = fixture.path("hub/models--me--tiny/snapshots/0a1b");
    fs::create_dir_all(snapshot.parent().unwrap()).unwrap();
    fixture.run("checkpoint export runs/tiny exported").succeeded();
    fs::rename(fixture.path("exported"), &snapshot).unwrap();
    let with_cache = |arguments: &str| {
        let mut command = fixture.command(arguments);
        command.env("HF_HUB_CACHE", fixture.path("hub"));
        Running::start(command).end()
    };
    assert_contains(&with_cache("generate me/tiny --num-tokens 2 --prompt one").succeeded(), &["one"]);
    assert_contains(&with_cache("checkpoint inspect me/tiny").succeeded(), &["hugging_face"]);
    let config = fixture.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    fixture.write("named.toml", format!("[model]\ninit_from = \"me/tiny\"\n[data]{sections}"));
    assert_contains(&with_cache("train named.toml").succeeded(), &["step: 4 "]);
    let refused = with_cache("generate me/other").refused();
    assert_contains(
        &refused,
        &["me/other does not exist", "hub has no model of that name", "snapshot_download"],
    );
}

#[test]
fn texts_end_as_asked_and_come_from_several_prompts() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set training.steps=60 --set optimizer.lr=1e-2").succeeded();
    let json = |arguments: &str| -> Vec<Value> {
        let printed =
            fixture.run(&format!("generate runs/tiny --json --temperature 0 {arguments}")).succeeded();
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let whole = json("--prompt o --num-tokens 8");
    assert_eq!(whole[0]["ended"], "num_tokens");
    let text = whole[0]["text"].as_str().unwrap();
    assert_eq!(text.len(), 8);
    let stop = &text[3..5];
    let mut command =
        fixture.command("generate runs/tiny --json --temperature 0 --prompt o --num-tokens 8 --stop");
    command.arg(stop);
    let stopped: Value = serde_json::from_str(&Running::start(command).end().succeeded()).unwrap();
    let end = text.find(stop).unwrap();
    assert_eq!((&stopped["ended"], stopped["text"].as_str().unwrap()), (&"stop".into(), &text[..end]));
    let mut command = fixture.command("generate runs/tiny --prompt o --stop");
    command.arg("");
    assert_contains(&Running::start(command).end().refused(), &["--stop is empty"]);
    // The model has 16 positions.
    let long = fixture.run("generate runs/tiny --prompt o --num-tokens 99 --ignore-end");
    assert_eq!(long.code, Some(0));
    assert_contains(&long.stderr, &["the text ends because the model has 16 positions"]);
    fixture.write("prompts.jsonl", "{\"prompt\": \"one\"}\n{\"prompt\": \"two\"}\n");
    let several = json("--prompt a --prompt-file prompts.jsonl --num-tokens 2");
    let prompts: Vec<&str> = several.iter().map(|found| found["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["a", "one", "two"]);
    assert_contains(
        &fixture.run("generate runs/tiny --prompt a --prompt b --num-tokens 1").succeeded(),
        &["--- 2 of 2 ---"],
    );
    fixture.write("wrong.jsonl", "{\"text\": \"one\"}\n");
    let refused = fixture.run("generate runs/tiny --prompt-file wrong.jsonl").refused();
    assert_contains(&refused, &["line 1 of wrong.jsonl has neither a `prompt` nor `messages`"]);
    assert_contains(
        &fixture.run("generate runs/tiny --chat --prompt a").refused(),
        &["runs/tiny has no chat template"],
    );
}

#[test]
fn frozen_parameters_do_not_change() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --set training.steps=0 --set run.name=before").succeeded();
    let frozen = "[[optimizer.groups]]\nmatch = \"transformer.w*\"\nfrozen = true\n[lr_scheduler]\n";
    fixture.write("frozen.toml", fixture.read("tiny.toml") + frozen);
    fixture.run("train frozen.toml --set run.name=frozen").succeeded();
    for run in ["before", "frozen"] {
        fixture.run(&format!("checkpoint export runs/{run} {run}-model")).succeeded();
    }
    let tensor = |model: &str, name: &str| {
        let content = fs::read(fixture.path(&format!("{model}-model/model.safetensors"))).unwrap();
        let length = u64::from_le_bytes(content[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&content[8..8 + length]).unwrap();
        let [start, end] =
            [0, 1].map(|index| header[name]["data_offsets"][index].as_u64().unwrap() as usize + 8 + length);
        content[start..end].to_vec()
    };
    for name in ["transformer.wte.weight", "transformer.wpe.weight"] {
        assert!(tensor("before", name) == tensor("frozen", name), "{name}");
    }
    let moved = "transformer.h.0.attn.c_attn.weight";
    assert!(tensor("before", moved) != tensor("frozen", moved));
    // Gradients of frozen parameters do not count in the norm.
    let norm = |run: &str| fixture.records(run)[0]["grad_norm"].as_f64().unwrap();
    fixture.run("train tiny.toml --set run.name=all").succeeded();
    assert!(norm("frozen") < norm("all"));
    // Parameters that are trained again begin without optimizer state.
    let more = fixture.run("train tiny.toml --set training.steps=8 --set run.name=frozen");
    assert_contains(&more.succeeded(), &["optimizer.groups"]);
    assert_eq!(fixture.records("frozen").last().unwrap()["step"], 8);
}

#[test]
fn dropout_is_the_same_on_every_layout() {
    let fixture = Fixture::with_corpus();
    let tiny = "train tiny.toml --set model.tie_word_embeddings=false";
    for (index, layout) in [
        "--workers 1",
        "--workers 2 --set parallelism.pipeline_parallel_degree=2",
        "--workers 4 --set training.local_batch_size=2",
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("{tiny} --set model.dropout=0.2 {layout} --set run.name=layout-{index}");
        fixture.run(&run).succeeded();
        assert_eq!(fixture.losses(&format!("layout-{index}")), fixture.losses("layout-0"), "{layout}");
    }
    fixture.run(&format!("{tiny} --set run.name=without")).succeeded();
    assert_ne!(fixture.losses("without"), fixture.losses("layout-0"));
}

#[test]
fn prometheus_reads_the_last_record() {
    let fixture = Fixture::with_corpus();
    let port = free_port();
    let train = format!("train tiny.toml --set training.steps=100000 --set metrics.prometheus_port={port}");
    let mut run = Running::start(fixture.command(&train));
    run.until("step: 2 ");
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_contains(&answer, &["HTTP/1.1 200", "trireme_loss ", "trireme_tokens_per_second "]);
    let taken = fixture.run(&format!(
        "train tiny.toml --workers 1 --set run.name=other --set metrics.prometheus_port={port}"
    ));
    assert_contains(&taken.refused(), &["cannot serve metrics on 127.0.0.1", "prometheus_port"]);
    run.interrupt();
    assert_eq!(run.end().code, Some(130));
}
