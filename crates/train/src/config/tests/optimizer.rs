//! The keys of `[optimizer]`, and its groups of parameters.

use super::*;

const GROUPS: &str = "\
[model]
architecture = \"gpt2\"
[data]
inputs = [\"text.txt\"]
[optimizer]
weight_decay = 0.2
[[optimizer.groups]]
match = \"*.wte.weight\"
lr_scale = 0.5
weight_decay = 0
[[optimizer.groups]]
match = \"*.bias\"
beta1 = 0.8
beta2 = 0.9
";

const ONE_BIT_ADAM: [&str; 3] =
    ["optimizer.name=one_bit_adam", "training.max_norm=0", "training.determinism=run"];

#[test]
fn keys_count_for_their_optimizers_only() {
    for (options, part) in [
        (&["optimizer.nesterov=true"][..], "only applies with name = \"sgd\"; set that"),
        (
            &["optimizer.name=sgd", "optimizer.beta1=0.8"],
            "only applies with name = \"adamw\", \"adam\", \"lion\"",
        ),
        (&["optimizer.muon_scale=original"], "only applies with name = \"muon\""),
        (&[&ONE_BIT_ADAM[..], &["optimizer.var_update_scaler=3"]].concat(), "\"zero_one_adam\""),
        (&["optimizer.name=adafactor", "optimizer.beta2_decay=0.5"], "expected a number from -1 to below 0"),
        (&["optimizer.state_dtype=i8"], "expected \"f32\", \"bf16\" or \"int8\""),
    ] {
        let found = mistakes(SMALLEST, options);
        assert!(found.len() == 1 && found[0].contains(part), "{options:?}: {found:?}");
    }
    let toml = good(SMALLEST, &["optimizer.name=lars"]).to_toml();
    assert!(
        toml.contains("trust_coefficient = ") && !toml.contains("beta") && !toml.contains("muon"),
        "{toml}"
    );
    let one_bit = good(SMALLEST, &[&ONE_BIT_ADAM[..], &["training.steps=50"]].concat());
    assert_eq!(one_bit.optimizer().settings.freeze_step, 10);
    assert_eq!(good(&one_bit.to_toml(), &[]), one_bit);
}

#[test]
fn conflicts_with_exchanged_momentum_are_refused() {
    for (options, parts) in [
        (&["training.max_norm=1"][..], &["max_norm=1", "set max_norm = 0 in [training]"][..]),
        (&["parallelism.zero_stage=1"], &["zero_stage=1", "set zero_stage = 0"]),
        (&["training.determinism=layout"], &["set determinism = \"run\""]),
        (&["training.reduce_dtype=bf16"], &["sends gradients in full precision"]),
        (&["comm.compression=int4", "comm.compression_normalize=true"], &["normalizes it itself"]),
        (&["comm.compression=top_k", "training.determinism=layout"], &["set determinism = \"run\""]),
    ] {
        let found = mistakes(SMALLEST, &[&ONE_BIT_ADAM[..], options].concat());
        assert!(
            found.len() == 1 && parts.iter().all(|part| found[0].contains(part)),
            "{options:?}: {found:?}"
        );
    }
    let found = mistakes(SMALLEST, &["optimizer.name=zero_one_adam"]);
    assert_eq!(found.len(), 2, "clipping and determinism have other defaults: {found:?}");
    let codec = |options: &[&str]| good(SMALLEST, options).compression().to_string();
    assert!(
        codec(&ONE_BIT_ADAM).starts_with("one_bit (block_len = 64, warmup_steps = 0, error_feedback = true")
    );
    assert!(codec(&[&ONE_BIT_ADAM[..], &["comm.compression=top_k"]].concat()).starts_with("top_k"));
    assert_eq!(codec(&[]), "none");
}

#[test]
fn groups_are_read_and_written_in_order() {
    let config = good(GROUPS, &[]);
    let groups = &config.optimizer().groups;
    assert_eq!((groups[0].pattern.as_str(), groups[0].lr_scale), ("*.wte.weight", 0.5));
    assert_eq!((groups[0].weight_decay, groups[0].beta1), (Some(0.0), None));
    assert_eq!((groups[1].lr_scale, groups[1].weight_decay), (1.0, None));
    assert_eq!((groups[1].beta1, groups[1].beta2), (Some(0.8), Some(0.9)));
    assert_eq!(good(&config.to_toml(), &[]), config, "{}", config.to_toml());
    assert!(config != good(SMALLEST, &["optimizer.weight_decay=0.2"]));
    // An option replaces all groups.
    let option = "optimizer.groups=[{match = \"h.*\", lr_scale = 3}]";
    let replaced = good(GROUPS, &[option]);
    assert_eq!(replaced.optimizer().groups.len(), 1);
    assert_eq!(replaced.optimizer().groups[0].lr_scale, 3.0);
    assert_eq!(good(GROUPS, &["optimizer.groups=[]"]).optimizer().groups, []);
}

#[test]
fn mistakes_in_groups_have_their_lines() {
    let text = "\
[model]
architecture = \"gpt2\"
[data]
inputs = [\"text.txt\"]
[[optimizer.groups]]
match = 7
lr_scal = 2
[[optimizer.groups]]
lr_scale = -1
[[optimizer.groups]]
weight_decay = 0.5
[[optimizer.groups]]
match = \"*\"
beta1 = 1.0
weight_decay = -1
";
    let expected = "\
configs/try.toml:6: match = 7: expected a string
configs/try.toml:7: lr_scal = 2: unknown key in [[optimizer.groups]]; did you mean 'lr_scale'?
configs/try.toml:9: lr_scale = -1: expected a number, 0 or more
configs/try.toml:11: weight_decay = 0.5: a group needs `match`, a pattern of parameter names such as \"*.bias\"
configs/try.toml:14: beta1 = 1.0: expected a number from 0 to below 1
configs/try.toml:15: weight_decay = -1: expected a number, 0 or more";
    assert_eq!(mistakes(text, &[]).join("\n"), expected);
    for value in ["3", "[1]", "{match = \"a\"}", "[", "oops"] {
        let option = format!("optimizer.groups={value}");
        let found = mistakes(SMALLEST, &[&option]);
        assert!(found.len() == 1 && found[0].contains("a line [[optimizer.groups]]"), "{value}: {found:?}");
    }
    let found = mistakes(GROUPS, &["optimizer.name=adafactor"]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].starts_with("configs/try.toml:13: beta1 = 0.8: adafactor does not use this key"),
        "{found:?}"
    );
    assert!(mistakes("[[optimizer.groups]]\n[optimizer]\n", &[]).len() > 2);
}

#[test]
fn a_group_without_a_parameter_is_a_mistake() {
    let config = good(GROUPS, &[]);
    let names = ["transformer.wte.weight", "transformer.h.0.mlp.bias"];
    let groups = config.parameter_groups(&names).unwrap();
    assert_eq!((groups[0].lr_scale, groups[0].weight_decay), (0.5, Some(0.0)));
    let refused = |config: &Config, names: &[&str]| config.parameter_groups(names).unwrap_err().to_string();
    let found = refused(&config, &names[..1]);
    assert!(
        found.contains(
            "configs/try.toml:12: match = \"*.bias\": matches none of the model's parameters, such as transformer.wte.weight"
        ),
        "{found}"
    );
    let shadowed = good(SMALLEST, &["optimizer.groups=[{match = \"*\"}, {match = \"*.bias\"}]"]);
    assert!(
        refused(&shadowed, &names).contains("transformer.h.0.mlp.bias, already belong to earlier groups")
    );
}
