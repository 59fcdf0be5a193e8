//! Training that begins with a model from elsewhere, and exports for other programs.

use crate::common::{Scene, tells};
use serde_json::{Value, json};
use std::fs;

/// Creates a scene with a model of a trained tokenizer in `model`, and a config that begins with it.
fn with_model() -> Scene {
    let scene = Scene::new();
    scene.run("train tiny.toml --set run.name=base --set data.train_bpe=300").succeeded();
    scene.run("checkpoint export runs/base model").succeeded();
    let config = scene.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    scene.write("more.toml", format!("[model]\ninit_from = \"model\"\n[data]{sections}"));
    scene
}

#[test]
fn a_model_is_trained_on_with_its_own_tokenizer() {
    let scene = with_model();
    for (name, model) in [("more", "model"), ("run", "runs/base")] {
        let train = format!("train more.toml --set run.name={name} --set model.init_from={model}");
        scene.run(&train).succeeded();
        let folder = format!("runs/{name}");
        assert_eq!(scene.read(&format!("{folder}/data/tokenizer.json")), scene.read("model/tokenizer.json"));
        let report: Value =
            serde_json::from_str(&scene.read(&format!("{folder}/data/prepare.json"))).unwrap();
        let state = scene.run(&format!("checkpoint inspect {folder} --json")).succeeded();
        let state: Value = serde_json::from_str(&state).unwrap();
        assert!(report["tokenizer_sha256"].is_string());
        assert_eq!(state["state"]["samples"]["tokenizer"], report["tokenizer_sha256"]);
    }
    for model in ["model", "runs/base"] {
        scene.run(&format!("prepare text.txt --out by-hand-{} --tokenizer {model}", model.len())).succeeded();
        assert_eq!(
            scene.read(&format!("by-hand-{}/tokenizer.json", model.len())),
            scene.read("model/tokenizer.json")
        );
        let train = format!(
            "train more.toml --set data.inputs=[] --set data.folder=by-hand-{} --set run.name=x-{}",
            model.len(),
            model.len()
        );
        scene.run(&train).succeeded();
    }
}

#[test]
fn tokens_of_another_tokenizer_are_refused() {
    let scene = with_model();
    fs::rename(scene.path("model"), scene.path("my model")).unwrap();
    let config = scene.read("more.toml");
    scene.write("more.toml", config.replace("\"model\"", "\"my model\""));
    scene.run("prepare text.txt --out corpus").succeeded();
    let other = "--set data.inputs=[] --set data.folder=corpus";
    for (set, what) in [
        (other, "corpus"),
        ("--set data.tokenizer=bytes", "runs/more/data"),
        ("--set data.train_bpe=280", "runs/more/data"),
    ] {
        let refused = scene.refused_without_trace(&format!("train more.toml {set}"));
        tells(
            &refused,
            &[
                what,
                "does not have the tokenizer of the model in my model",
                "--tokenizer 'my model'",
                "allow_other_tokenizer",
            ],
        );
    }
    let allowed = format!("train more.toml {other} --set model.allow_other_tokenizer=true");
    scene.run(&allowed).succeeded();
    assert!(scene.path("runs/more/checkpoints/step-4/tokenizer.bytes.json").exists());
    let alone = scene.refused_without_trace("train tiny.toml --set model.allow_other_tokenizer=true");
    tells(&alone, &["only applies with `init_from`"]);
}

#[test]
fn a_model_without_its_tokenizer_or_with_a_foreign_one_is_refused() {
    let scene = with_model();
    let mut tokenizer: Value = serde_json::from_str(&scene.read("model/tokenizer.json")).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocabulary["a"].clone(), vocabulary["b"].clone());
    vocabulary.extend([("a".to_owned(), b), ("b".to_owned(), a)]);
    scene.write("model/tokenizer.json", tokenizer.to_string());
    for command in ["train more.toml", "generate model --num-tokens 1"] {
        let refused = scene.refused_without_trace(command);
        tells(&refused, &["the tokenizer in model is not the one that the model was trained with"]);
    }
    fs::remove_file(scene.path("model/tokenizer.json")).unwrap();
    let refused = scene.refused_without_trace("train more.toml");
    tells(&refused, &["the model in model has no tokenizer.json", "save_pretrained"]);
    tells(
        &scene.refused_without_trace("generate model"),
        &["model has no tokenizer; pass one with --tokenizer"],
    );
}

#[test]
fn an_export_after_no_step_is_what_was_imported() {
    let scene = with_model();
    let mut config: Value = serde_json::from_str(&scene.read("model/config.json")).unwrap();
    config["resid_pdrop"] = json!(0.1);
    config["pad_token_id"] = json!(3);
    config["task_specific_params"] = json!({ "text-generation": { "max_length": 50 } });
    scene.write("model/config.json", format!("{config:#}"));
    scene.write("model/generation_config.json", "{\"eos_token_id\": 0, \"top_k\": 5}");
    scene
        .write("model/chat_template.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}");
    scene.write("model/special_tokens_map.json", "{}");
    scene.run("train more.toml --set training.steps=0").succeeded();
    scene.run("checkpoint export runs/more again").succeeded();
    let (names, again) = (scene.names("model"), scene.names("again"));
    assert_eq!(names, again);
    for name in names {
        let read = |folder: &str| fs::read(scene.path(folder).join(&name)).unwrap();
        assert!(read("model") == read("again"), "{name} differs");
    }
}

#[test]
fn a_model_whose_template_is_not_valid_works_without_conversations() {
    let scene = with_model();
    scene.write("model/chat_template.jinja", "{% if %}");
    scene.run("generate model --num-tokens 1").succeeded();
    scene.run("eval model text.txt").succeeded();
    scene.run("train more.toml --set training.steps=1").succeeded();
    tells(
        &scene.run("generate model --chat --prompt a").refused(),
        &["the chat template of model: syntax error"],
    );
}

/// A template is untrusted code.
#[test]
fn a_template_that_takes_too_much_memory_is_refused() {
    let scene = with_model();
    let doubling = "{% set big = namespace(text='0123456789') %}{% for _ in range(28) %}\
        {% set big.text = big.text ~ big.text %}{% endfor %}{{ messages[0].content }}";
    scene.write("model/chat_template.jinja", doubling);
    tells(
        &scene.run("generate model --chat --prompt a --num-tokens 1").refused(),
        &["the chat template of model", "it takes more than 1.00GiB of memory"],
    );
}

#[test]
fn a_model_of_bytes_is_exported_with_a_tokenizer_that_others_read() {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml").succeeded();
    scene.run("checkpoint export runs/tiny model").succeeded();
    assert_eq!(
        scene.names("model"),
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    );
    let read = |name: &str| -> Value { serde_json::from_str(&scene.read(name)).unwrap() };
    assert_eq!(read("model/tokenizer_config.json")["eos_token"], "<|endoftext|>");
    for key in ["bos_token_id", "eos_token_id"] {
        assert_eq!(read("model/config.json")[key], 256, "{key}");
    }
    // The exported model can be trained on with the corpus of bytes.
    let config = scene.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    scene.write("more.toml", format!("[model]\ninit_from = \"model\"\n[data]{sections}"));
    scene.run("train more.toml").succeeded();
}
