//! Weights that are not the model's.

use crate::common::{Scene, Weights, tells};

/// A scene with a trained model exported to `model`.
fn scene_with_model() -> Scene {
    let scene = Scene::with_corpus();
    scene.run("train tiny.toml --workers 1 --set training.steps=1").succeeded();
    scene.run("checkpoint export runs/tiny model").succeeded();
    std::fs::remove_dir_all(scene.path("runs")).unwrap();
    let config = scene.read("tiny.toml");
    let (_, sections) = config.split_once("[data]").unwrap();
    scene.write("from_model.toml", format!("[model]\ninit_from = \"model\"\n[data]{sections}"));
    scene
}

/// Asserts that neither a run nor `generate` takes the model, and that each says why.
fn assert_refused(scene: &Scene, facts: &[&str]) {
    for command in
        ["train from_model.toml --workers 1", "train from_model.toml --workers 2", "generate model"]
    {
        tells(&scene.run(command).refused(), facts);
        assert!(!scene.path("runs/from_model/metrics.jsonl").exists());
        assert!(!scene.path("runs/from_model/checkpoints").exists());
    }
}

#[test]
fn missing_extra_and_mis_shaped_tensors() {
    let scene = scene_with_model();
    let file = scene.path("model/model.safetensors");
    let weights = || Weights::read(&file);
    let original = std::fs::read(&file).unwrap();
    let changed = [
        (
            weights().filtered(|name| !name.contains("ln_")),
            &[
                "missing: 'transformer.h.0.ln_1.weight' of shape [32]",
                "missing: 'transformer.h.0.ln_1.bias' of shape [32]",
                "missing: 'transformer.h.0.ln_2.weight' of shape [32]",
                "missing: 'transformer.h.0.ln_2.bias' of shape [32]",
                "missing: 'transformer.ln_f.weight' of shape [32]",
                "missing: 'transformer.ln_f.bias' of shape [32]",
            ] as &[&str],
        ),
        (weights().with("transformer.h.7.extra"), &["not expected: 'transformer.h.7.extra' of shape [2]"]),
        (
            weights().transposed("transformer.h.0.attn.c_attn.weight"),
            &["'transformer.h.0.attn.c_attn.weight' has shape [96, 32], expected [32, 96]"],
        ),
    ];
    for (weights, facts) in changed {
        weights.write(&file);
        assert_refused(&scene, facts);
    }
    std::fs::write(&file, original).unwrap();
    scene.run("train from_model.toml").succeeded();
}

#[test]
fn a_file_of_weights_cut_off_or_gone() {
    let scene = scene_with_model();
    scene.cut("model/model.safetensors", 1000);
    assert_refused(&scene, &["model/model.safetensors is damaged", "86016 bytes"]);
    std::fs::remove_file(scene.path("model/model.safetensors")).unwrap();
    assert_refused(&scene, &["model holds no model; expected model.safetensors"]);
}

#[test]
fn a_model_without_description_or_tokenizer() {
    let scene = scene_with_model();
    std::fs::remove_file(scene.path("model/tokenizer.bytes.json")).unwrap();
    tells(&scene.refused_without_trace("generate model"), &["--tokenizer", "model holds no tokenizer"]);
    scene.run("generate model --tokenizer bytes --num-tokens 1").succeeded();
    scene.write("model/config.json", "{\"model_type\": \"other\"}");
    assert_refused(&scene, &["model/config.json", "other"]);
    std::fs::remove_file(scene.path("model/config.json")).unwrap();
    assert_refused(&scene, &["model", "config.json"]);
}
