mod compression;
mod hostile;
mod optimizer;

use super::*;
use trireme_base::{Random, RandomKey};

const SMALLEST: &str = "[model]\narchitecture = \"gpt2\"\n[data]\ninputs = [\"text.txt\"]\n";

fn parse(text: &str, overrides: &[&str]) -> Result<Config, ConfigError> {
    let overrides: Vec<String> = overrides.iter().map(|option| option.to_string()).collect();
    Config::parse(text, Path::new("configs/try.toml"), &overrides, None)
}

fn good(text: &str, overrides: &[&str]) -> Config {
    parse(text, overrides).unwrap_or_else(|error| panic!("{error}"))
}

fn mistakes(text: &str, overrides: &[&str]) -> Vec<String> {
    match parse(text, overrides) {
        Err(ConfigError::Invalid { mistakes }) => mistakes.iter().map(Mistake::to_string).collect(),
        other => panic!("expected mistakes, found {other:?}"),
    }
}

/// Returns the only mistake of the smallest config with this override.
fn mistake_of(option: &str) -> String {
    let found = mistakes(SMALLEST, &[option]);
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().unwrap()
}

#[test]
fn reports_every_mistake_with_its_line() {
    let text = "\
[modle]
architecture = \"gpt2\"
[training]
local_batch_size = \"eight\"
seq_length = 4
steps = -1
lr = 0.1
[optimizer]
name = \"adamm\"
beta1 = 1.0
[parallelism]
sequence_paralel = true
[activation_checkpoint]
mode = \"full\"
[data]
inputs = [\"a\", 7]
";
    let expected = "\
configs/try.toml:1: [modle]: unknown section; did you mean [model]?
configs/try.toml:4: local_batch_size = \"eight\": expected a whole number from 1 to 1048576
configs/try.toml:5: seq_length = 4: unknown key; it is called 'seq_len' here, in [training]
configs/try.toml:6: steps = -1: expected a whole number, 0 or more
configs/try.toml:7: lr = 0.1: unknown key in [training]; it belongs in [optimizer]
configs/try.toml:9: name = \"adamm\": expected \"adamw\", \"adam\", \"sgd\", \"lion\", \"adafactor\", \"lamb\", \"lars\", \"muon\", \"one_bit_adam\" or \"zero_one_adam\"; did you mean \"adam\"?
configs/try.toml:10: beta1 = 1.0: expected a number from 0 to below 1
configs/try.toml:12: sequence_paralel = true: unknown key in [parallelism]; did you mean 'sequence_parallel'?
configs/try.toml:14: mode = \"full\": expected \"none\", \"selective\", \"block\", \"every-k\" or \"auto\"
configs/try.toml:16: inputs = [\"a\", 7]: expected a list, each element a path
--set training.stps=3: unknown key in [training]; did you mean 'steps'?
--set run: expected section.key=value";
    assert_eq!(mistakes(text, &["training.stps=3", "run"]).join("\n"), expected);
}

#[test]
fn broken_toml_is_reported_with_other_mistakes_and_causes_none() {
    let text = "[training]\nseq_len = \nsteps = -1\n[optimizer\nlr = 1e-3\n";
    let found = mistakes(text, &[]);
    assert!(found[0].starts_with("configs/try.toml:2: seq_len =: "), "{found:?}");
    assert!(
        found[1].starts_with("configs/try.toml:3: steps = -1: expected a whole number, 0 or more"),
        "{found:?}"
    );
    assert!(found[2].starts_with("configs/try.toml:4: [optimizer: "), "{found:?}");
    assert!(!found.concat().contains("no model"), "{found:?}");
}

#[test]
fn hostile_texts_end_in_mistakes() {
    let long = mistake_of(&format!("training.dtype=\"{}\"", "ä".repeat(5000)));
    assert!(long.chars().count() < 400 && long.contains("ä…: "), "{long}");
    for text in [
        "\u{feff}[model",
        "=",
        "training = 3",
        "[[training]]\nsteps = 1",
        "x = \"\u{1f600}",
        "[training]\n\"",
        "a.b.c.d = 1",
        "training.steps.x = 1",
        "[training]\nsteps = 99999999999999999999",
        "[training]\nsteps = 1\nsteps = 2",
        "[optimizer]\nlr = nan",
        "[run]\nname = \"..\"",
        "[run]\nname = \"a/b\"",
        "\0",
        "[model]\nconfig = 'x\u{e9}\n",
    ] {
        assert!(!mistakes(text, &[]).is_empty(), "{text:?}");
    }
    let deep = format!("a = {}", "[".repeat(100_000));
    assert!(!mistakes(&deep, &[]).is_empty());
}

#[test]
fn reports_missing_sections() {
    let found = mistakes("", &[]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("configs/try.toml:1: [model]: no model; set `config`"), "{found:?}");
    assert!(found[1].starts_with("configs/try.toml:1: [data]: no data; set `inputs`"), "{found:?}");
}

#[test]
fn checks_batch_sizes_against_the_world_size() {
    let text = format!("{SMALLEST}[training]\nlocal_batch_size = 4\nglobal_batch_size = 24\n");
    assert_eq!(good(&text, &["launch.workers=2"]).num_microbatches(), 3);
    assert_eq!(
        mistakes(&text, &["launch.workers=4"]),
        [
            "configs/try.toml:7: global_batch_size = 24: not a multiple of local_batch_size 4 x 4 workers = 16; \
          the nearest multiples are 16 and 32"
        ]
    );
    let tensor = mistakes(&text, &["launch.workers=8", "parallelism.tensor_parallel_degree=2"]);
    assert!(tensor[0].contains("local_batch_size 4 x 4 data-parallel workers = 16"), "{tensor:?}");
    // The world size of the environment takes precedence over the config's.
    let config = Config::parse(&text, Path::new("try.toml"), &["launch.workers=5".into()], Some(3)).unwrap();
    assert_eq!((config.world_size(), config.num_microbatches()), (3, 2));
}

#[test]
fn checks_shards_and_replicas_against_the_world_size() {
    let degrees = |options: &[&str]| {
        let config = good(SMALLEST, &[options, &["launch.workers=4"]].concat());
        let parallelism = config.parallelism();
        (parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree)
    };
    assert_eq!(degrees(&[]), (4, 1));
    assert_eq!(degrees(&["parallelism.zero_stage=2"]), (1, 4));
    assert_eq!(degrees(&["parallelism.zero_stage=3", "parallelism.data_parallel_shard_degree=2"]), (2, 2));
    assert_eq!(
        degrees(&["parallelism.zero_stage=1", "parallelism.data_parallel_replicate_degree=4"]),
        (4, 1)
    );
    assert!(
        mistake_of("parallelism.data_parallel_replicate_degree=2")
            .contains("2 replicas of 1 shards take 2 workers, but there are 1")
    );
    assert!(
        mistake_of("parallelism.reshard_after_forward=false").contains("only applies with zero_stage = 3")
    );
    for key in ["zero_hpz=true", "zero_quantized_weights=true", "zero_quantized_gradients=int4"] {
        let key = format!("parallelism.{key}");
        assert!(mistake_of(&key).contains("only applies with zero_stage = 3"));
        good(SMALLEST, &["launch.workers=4", "parallelism.zero_stage=3", &key]);
    }
    let stage_3 = ["launch.workers=4", "parallelism.zero_stage=3", "training.dtype=bf16"];
    let found = [&stage_3[..], &["parallelism.zero_quantized_weights=true", "training.fp8=hybrid"]].concat();
    assert!(mistakes(SMALLEST, &found)[0].contains("fp8 would round values again"));
    let found =
        [&stage_3[..], &["parallelism.zero_quantized_gradients=int8", "training.reduce_dtype=bf16"]].concat();
    assert!(mistakes(SMALLEST, &found)[0].contains("so reduce_dtype has no effect"));
    assert!(mistake_of("training.clip_by_previous_norm=true").contains("only applies with"));
    assert!(mistake_of("memory.free_gradients=true").contains("clip_by_previous_norm = true"));
    assert!(mistake_of("memory.bf16_parameters=true").contains("set [training] dtype = \"bf16\""));
    let stored = ["launch.workers=4", "training.dtype=bf16", "memory.bf16_parameters=true"];
    good(SMALLEST, &stored);
    for (keys, reason) in [
        (&["training.fp8=hybrid"][..], "fp8 rounds f32 parameters"),
        (
            &["parallelism.zero_stage=3", "parallelism.zero_quantized_weights=true"],
            "zero_quantized_weights rounds f32 parameters",
        ),
    ] {
        let found = mistakes(SMALLEST, &[&stored[..], keys].concat());
        assert!(found[0].contains(reason), "{found:?}");
    }
    let freed = ["memory.free_gradients=true", "training.max_norm=0", "launch.workers=2"];
    good(SMALLEST, &freed);
    for (key, reason) in [
        ("parallelism.zero_stage=2", "a sharded gradient is freed"),
        ("training.dtype=f16", "f16 skips a step"),
        ("comm.compression=int8", "compression keeps a gradient"),
        ("optimizer.name=one_bit_adam", "this optimizer compresses momentum"),
    ] {
        let found = mistakes(SMALLEST, &[&freed[..], &[key]].concat());
        assert!(found[0].contains(reason), "{found:?}");
    }
    assert!(mistake_of("activation_checkpoint.every_k=3").contains("only applies with mode = \"every-k\""));
    let found = mistakes(SMALLEST, &["launch.workers=2", "parallelism.data_parallel_shard_degree=2"]);
    assert!(found[0].contains("has no effect with zero_stage = 0"), "{found:?}");
    let found =
        mistakes(SMALLEST, &["launch.workers=2", "parallelism.zero_stage=1", "comm.compression=int8"]);
    assert!(found[0].contains("compression needs the whole sum of gradients on every worker"), "{found:?}");
}

#[test]
fn refuses_contradictions() {
    for (option, part) in [
        ("model.config=gpt2/config.json", "`config` already describes the model"),
        ("model.num_heads=5", "num_heads 5 does not divide hidden_size 384"),
        ("model.num_kv_heads=2", "gpt2 has as many key-value heads as heads"),
        ("model.num_kv_heads=4", "num_kv_heads 4 does not divide num_heads 6"),
        ("model.max_position_embeddings=255", "seq_len 256 is longer"),
        ("data.train_bpe=256", "a number above 256"),
        ("training.dtype=fp16", "expected \"f32\", \"bf16\" or \"f16\"; did you mean \"f16\"?"),
        ("training.reduce_dtype=f16", "only dtype = \"f16\" scales the loss"),
        ("checkpoint.resume=atuo", "with a '/' in it"),
        ("data.tokenizer=byte", "or the path of a tokenizer.json"),
        ("run.name=../elsewhere", "expected the name of a single folder"),
        ("generate.top_p=0", "expected a number above 0 and up to 1"),
        ("optimizer.lr=inf", "expected a number, 0 or more"),
        ("training.global_batch_size=1048576", "131072 microbatches"),
    ] {
        let found = mistakes(SMALLEST, &[option]).concat();
        assert!(found.contains(part), "{option}: {found}");
    }
    let detached = mistakes(SMALLEST, &["training.device=detached", "memory.huge_pages=reserved"]).concat();
    assert!(detached.contains("only the CPU's memory can lie in reserved huge pages"), "{detached}");
    let odd = mistakes(SMALLEST, &["model.architecture=llama", "model.hidden_size=30"]);
    assert!(odd[0].contains("an even head width"), "{odd:?}");
    let no_family = "[model]\nconfig = \"c.json\"\nnum_layers = 3\n[data]\nfolder = \"d\"\n";
    assert_eq!(
        mistakes(no_family, &[]),
        [
            "configs/try.toml:3: num_layers = 3: only applies with `architecture`; set that, or remove this key"
        ]
    );
}

#[test]
fn loss_scales_count_only_in_f16_and_are_powers_of_two() {
    let text = format!("{SMALLEST}[training]\ndtype = \"bf16\"\nloss_scale_growth_interval = 100\n");
    assert_eq!(
        mistakes(&text, &["training.loss_scale=1024"]),
        [
            "configs/try.toml:7: loss_scale_growth_interval = 100: only applies with dtype = \"f16\"; set that, or remove \
             this key",
            "--set training.loss_scale=1024: only applies with dtype = \"f16\"; set that, or remove this key",
        ]
    );
    for (options, part) in [
        (["training.loss_scale=1000", ""], "expected a power of two, such as 512 or 1024"),
        (["training.loss_scale=33554432", ""], "expected a whole number from 0 to 16777216"),
        (["training.loss_scale=-1", ""], "expected a whole number from 0 to 16777216"),
        (["training.loss_scale_initial=0", ""], "expected a whole number from 1 to 16777216"),
        (["training.loss_scale_initial=3", ""], "expected a power of two, such as 2 or 4"),
        (["training.loss_scale_growth_interval=0", ""], "expected a whole number, 1 or more"),
        (
            ["training.loss_scale_initial=2", "training.loss_scale=8"],
            "only applies with loss_scale = 0, but it is 8",
        ),
    ] {
        let options: Vec<&str> = options.into_iter().filter(|option| !option.is_empty()).collect();
        let found = mistakes(SMALLEST, &[&["training.dtype=f16"], &options[..]].concat());
        assert!(found.len() == 1 && found[0].contains(part), "{options:?}: {found:?}");
        assert!(found[0].starts_with(&format!("--set {}: ", options[0])), "{found:?}");
    }
    // A misspelt dtype is one mistake. Keys that depend on the dtype add none.
    let found = mistakes(SMALLEST, &["training.dtype=half", "training.loss_scale=8"]);
    assert_eq!(found.len(), 1, "{found:?}");
    let options = ["training.dtype=f16", "training.loss_scale_initial=1024", "training.reduce_dtype=f16"];
    let training = good(SMALLEST, &options).training().clone();
    assert_eq!((training.loss_scale, training.loss_scale_initial), (0, 1024));
    assert!(!good(SMALLEST, &[]).to_toml().contains("loss_scale"));
}

#[test]
fn fp8_needs_bf16_and_its_keys_need_fp8() {
    let text = format!("{SMALLEST}[training]\nfp8 = \"hybrid\"\nfp8_margin = 1\n");
    assert_eq!(
        mistakes(&text, &[]),
        [
            "configs/try.toml:6: fp8 = \"hybrid\": fp8 requires bf16 for everything that is not rounded to fp8; set dtype = \"bf16\", or remove this key"
        ]
    );
    assert_eq!(mistakes(&text, &["training.dtype=f16"]).len(), 1);
    let training = good(&text, &["training.dtype=bf16"]).training().clone();
    assert_eq!((training.fp8, training.fp8_amax_history_len, training.fp8_margin), (Fp8::Hybrid, 16, 1));
    assert_eq!(
        mistakes(&text, &["training.dtype=bf16", "training.fp8=off", "training.fp8_amax_history_len=4"]),
        [
            "configs/try.toml:7: fp8_margin = 1: only applies with fp8 = \"e4m3\" or \"hybrid\"; set that, or remove this key",
            "--set training.fp8_amax_history_len=4: only applies with fp8 = \"e4m3\" or \"hybrid\"; set that, or remove this key",
        ]
    );
    for (option, part) in [
        ("training.fp8=e4m4", "expected \"off\", \"e4m3\" or \"hybrid\"; did you mean \"e4m3\"?"),
        ("training.fp8_amax_history_len=0", "expected a whole number from 1 to 4096"),
        ("training.fp8_amax_history_len=4097", "expected a whole number from 1 to 4096"),
        ("training.fp8_margin=17", "expected a whole number from 0 to 16"),
    ] {
        let found = mistakes(&text, &["training.dtype=bf16", option]);
        assert!(found.len() == 1 && found[0].contains(part), "{option}: {found:?}");
    }
    assert!(!good(SMALLEST, &[]).to_toml().contains("fp8_"));
}

#[test]
fn overrides_take_toml_and_bare_strings_and_the_last_one_wins() {
    let config = good(
        SMALLEST,
        &[
            "run.name = 7",
            "optimizer.lr=1",
            "training.steps=5",
            "training.steps=0x10",
            "data.inputs=['a b', \"c\"]",
            "generate.prompt=To be, or",
            "model.init_from=here",
            "model.init_from=",
        ],
    );
    assert_eq!(config.run_folder(), Path::new("runs/7"));
    assert_eq!(config.optimizer().lr, 1.0);
    assert_eq!(config.training().steps, 16);
    assert_eq!(config.data().inputs, [Path::new("a b"), Path::new("c")]);
    assert_eq!(config.generate().prompt, "To be, or");
    assert_eq!(config.model().init_from, None);
}

#[test]
fn a_peak_is_in_operations_a_second() {
    for unfit in ["312", "-1.0", "inf"] {
        let mistake = mistake_of(&format!("metrics.peak_flops={unfit}"));
        assert!(mistake.contains("peak_flops"), "{mistake}");
    }
    assert!(mistake_of("metrics.peak_flops=312").contains("such as 312e12 for 312 TFLOP/s"));
    assert_eq!(good(SMALLEST, &["metrics.peak_flops=312e12"]).metrics().peak_flops, 312e12);
}

#[test]
fn resolves_values_that_refer_to_other_keys() {
    let config = good(SMALLEST, &["launch.workers=2", "lr_scheduler.warmup_steps=100"]);
    assert_eq!(config.run_folder(), Path::new("runs/try"));
    assert_eq!(config.data().folder, Path::new("runs/try/data"));
    assert_eq!(config.training().global_batch_size, 16);
    assert_eq!(config.lr_scheduler().decay_steps, 900);
    assert_eq!(config.model_source(), ModelSource::Inline(Architecture::Gpt2));
    let model = config.model();
    assert_eq!((model.num_kv_heads, model.intermediate_size, model.max_position_embeddings), (6, 1536, 256));
    let llama = good(SMALLEST, &["model.architecture=llama", "lr_scheduler.decay=wsd"]);
    assert_eq!((llama.model().intermediate_size, llama.lr_scheduler().decay_steps), (1024, 200));
}

#[test]
fn the_written_config_reads_as_the_same_config() {
    let elsewhere = "[model]\nconfig = \"a/config.json\"\ninit_from = \"a\"\n[data]\nfolder = \"d\"\n";
    let prompt = "generate.prompt=\"quote \\\" line\\n tab\\t backslash \\\\ nul\\u0000 é\"";
    for (text, overrides) in [
        (SMALLEST, vec![]),
        (SMALLEST, vec![prompt, "data.extensions=['.txt', 'md']", "training.seed=0x7fffffffffffffff"]),
        (SMALLEST, vec!["data.tokenizer=a/tokenizer.json", "checkpoint.resume=runs/a/checkpoints/step-3"]),
        (
            SMALLEST,
            vec![
                "model.architecture=llama",
                "launch.workers=3",
                "lr_scheduler.decay=wsd",
                "training.steps=3",
            ],
        ),
        (elsewhere, vec!["data.inputs=['''it's''']"]),
        (SMALLEST, vec!["training.dtype=f16", "training.loss_scale_growth_interval=7"]),
        (SMALLEST, vec!["training.dtype=bf16", "training.fp8=e4m3", "training.fp8_amax_history_len=7"]),
        (SMALLEST, vec!["training.dtype=f16", "training.loss_scale=64", "training.reduce_dtype=bf16"]),
        (
            SMALLEST,
            vec![
                "training.determinism=run",
                "comm.compression=one_bit",
                "comm.compression_block_len=128",
                "comm.compression_error_feedback=false",
            ],
        ),
        (
            SMALLEST,
            vec!["training.determinism=run", "comm.compression=top_k", "comm.compression_warmup_steps=7"],
        ),
    ] {
        let config = good(text, &overrides);
        assert_eq!(good(&config.to_toml(), &[]), config, "{}", config.to_toml());
    }
    let mut random = Random::new(RandomKey::new(1, "config"), 0);
    for _ in 0..200 {
        // A positive, finite, normal number of any size.
        let lr = f64::from_bits((random.next_u64() >> 2).max(1 << 52));
        let config = good(SMALLEST, &[&format!("optimizer.lr={lr:e}")]);
        assert_eq!(config.optimizer().lr, lr);
        assert_eq!(good(&config.to_toml(), &[]), config);
    }
}

#[test]
fn tls_needs_all_of_its_files() {
    let text = format!("{SMALLEST}[comm]\ntls_certificate = \"worker.pem\"\ntls_key = \"worker.key\"\n");
    assert_eq!(
        mistakes(&text, &[]),
        [
            "configs/try.toml:6: tls_certificate = \"worker.pem\": TLS needs all of `tls_certificate`, `tls_key` and `tls_ca`"
        ]
    );
    let whole = good(&text, &["comm.tls_ca=authority.pem"]);
    assert_eq!(whole.comm().tls_name, "trireme");
    assert_eq!(good(&whole.to_toml(), &[]), whole);
}

#[test]
fn explains_every_key_in_a_form_that_reads_as_the_defaults() {
    let explained = Config::explain(None).unwrap();
    let (model, data) = ("model.architecture=gpt2", "data.inputs=[\"text.txt\"]");
    assert_eq!(good(&explained, &[model, data]), good(SMALLEST, &[]));
    for (_, section) in Sections::default().all() {
        for key in section.keys() {
            assert!(explained.contains(&format!("{} =", key.name)), "{}", key.name);
        }
        for (list, tables) in section.lists() {
            assert!(explained.contains(&format!(".{list}]]")), "{list}");
            for key in tables.default_table().keys() {
                assert!(explained.contains(&format!("# {} =", key.name)), "{}", key.name);
            }
        }
    }
    let comm = Config::explain(Some("comm")).unwrap();
    assert!(comm.starts_with("# Communication between workers.\n[comm]\n\n# `shm` (shared memory"), "{comm}");
    assert!(
        comm.contains("# Expected: \"auto\", \"shm\", \"tcp\" or \"mpi\".\ntransport = \"auto\"\n"),
        "{comm}"
    );
    let model = Config::explain(Some("model")).unwrap();
    assert!(model.contains("Not set by default.\n# config =\n"), "{model}");
    for (word, key) in
        [("lamb", "name"), ("dualpipe", "pipeline_parallel_schedule"), ("powersgd", "compression")]
    {
        let found = Config::explain(Some(word)).unwrap();
        assert!(found.contains(&format!("\n{key} =")), "{word}: {found}");
    }
    let error = Config::explain(Some("optimiser")).unwrap_err().to_string();
    assert_eq!(error, "no section is named 'optimiser', and no key mentions it; did you mean [optimizer]?");
}

#[test]
fn an_algorithm_that_changes_bits_needs_determinism_run() {
    let ring = "comm.algorithm=ring";
    assert!(mistakes(SMALLEST, &[ring])[0].contains("would depend on the layout"));
    assert!(mistakes(SMALLEST, &["comm.algorithm=rings"])[0].contains("algorithm"));
    for kept in ["halving_doubling", "direct", "pairwise", "hierarchical:one:direct:ring"] {
        good(SMALLEST, &[&format!("comm.algorithm={kept}")]);
    }
    good(SMALLEST, &[ring, "training.determinism=run"]);
}

#[test]
fn refuses_files_that_are_no_config() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("try.toml");
    let load = || Config::load(&path, &[], None).unwrap_err();
    assert!(matches!(load(), ConfigError::Read { .. }));
    std::fs::write(&path, b"\xff\xfe").unwrap();
    assert!(matches!(load(), ConfigError::Read { .. }));
    std::fs::write(&path, vec![b'\n'; mistake::FILE_BYTES_MAX as usize + 1]).unwrap();
    assert!(matches!(load(), ConfigError::TooLarge { .. }));
    std::fs::write(&path, SMALLEST).unwrap();
    assert_eq!(Config::load(&path, &[], None).unwrap(), good(SMALLEST, &[]));
}

#[test]
fn a_task_of_its_own_has_no_keys_of_language_models() {
    let parse = |text: &str, overrides: &[String]| {
        Config::parse_for_task(TaskKind::CustomTask, text, Path::new("shapes.toml"), overrides, None)
    };
    for key in ["model.architecture=gpt2", "data.folder=corpus", "training.seq_len=8", "generate.prompt=x"] {
        let error = parse("", &[key.to_owned()]).unwrap_err().to_string();
        assert!(error.contains("only applies to language models"), "{error}");
    }
    let text = parse("model = { init_from = \"weights\" }", &[]).unwrap().to_toml();
    assert!(
        text.contains("init_from") && !text.contains("seq_len") && !text.contains("vocab_size"),
        "{text}"
    );
    assert_eq!(parse(&text, &[]).unwrap().to_toml(), text);
}
