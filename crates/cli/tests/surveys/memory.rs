//! Memory of training states, activations and whole models, by dry runs.

use crate::Effort;
use crate::command_folder::{CommandFolder, Gpt, PlannedStep};
use crate::table::{Row, Section, billions, gigabytes, list, short, within};

/// 16-bit parameters and gradients, as in the papers on ZeRO.
const MIXED: &str = "training.dtype=bf16 training.reduce_dtype=bf16";

/// 7.5 billion parameters.
const BILLIONS_7: Gpt = Gpt::of(4096, 36, 32);

pub(crate) fn section(commands: &CommandFolder, effort: Effort) -> Section {
    let rows = vec![
        states(commands),
        zero_stages(commands),
        shards(commands),
        largest_on_one_device(commands),
        largest_on_a_pipeline(commands, effort),
        offload(commands),
        infinity(commands, effort),
        activations_of_a_layer(commands),
        share_of_activations(commands),
        sequence_length(commands),
    ];
    Section { title: "Memory", rows }
}

/// Returns the bytes of parameters, gradients and optimizer state for each parameter.
fn state_bytes_per_parameter(step: &PlannedStep) -> f64 {
    step.states() / step.num_parameters()
}

fn states(commands: &CommandFolder) -> Row {
    let models = [Gpt::of(2048, 24, 16), Gpt::of(4096, 36, 32), Gpt::of(5120, 40, 40), Gpt::GPT3];
    let found = models.map(|model| {
        let step = commands.plan(model, "launch.workers=1");
        let bytes = within("bytes of state for a parameter", state_bytes_per_parameter(&step), 15.9..=16.1);
        (step.num_parameters(), bytes, step.states())
    });
    let step = commands.plan(BILLIONS_7, &format!("launch.workers=64 {MIXED}"));
    let mixed =
        within("bytes of state for a parameter in bf16", state_bytes_per_parameter(&step), 13.9..=14.1);
    Row {
        claim: "Training with Adam in mixed precision takes 16 bytes of state for each parameter",
        source: "Rajbhandari et al. 2020 (ZeRO), section 3.1",
        computed: format!(
            "{}; with 16-bit gradients {} bytes a parameter",
            list(found, |(parameters, bytes, states)| format!(
                "{}: {bytes:.2} bytes a parameter, {}",
                billions(parameters),
                gigabytes(states)
            )),
            short(mixed)
        ),
        why: "In f32 it is 4 for the parameter, 4 for its gradient and 8 for Adam's moments. The paper has 2 + 2 + 12 \
              in 16 bits. Data-parallel workers here keep no 16-bit copy next to the f32 weights, so 16-bit gradients make it 14."
            .to_owned(),
    }
}

fn zero_stages(commands: &CommandFolder) -> Row {
    let degrees = [4, 8, 64, 1024];
    let found = [1, 2, 3].map(|stage| {
        degrees.map(|num_workers| {
            let settings = format!("launch.workers={num_workers} parallelism.zero_stage={stage} {MIXED}");
            let step = commands.plan(BILLIONS_7, &settings);
            let shard = |bytes: f64| bytes / num_workers as f64;
            let formula = match stage {
                1 => 4.0 + shard(12.0),
                2 => 2.0 + shard(14.0),
                _ => shard(14.0),
            };
            within("states by their formula", state_bytes_per_parameter(&step) / formula, 0.97..=1.03);
            step.states()
        })
    });
    Row {
        claim: "7.5 B parameters take 120 GB of state; on 4, 64 and 1024 workers 52.5, 31.4 and 30.1 GB with ZeRO-1, 41.3, 16.6 and 15.1 GB with \
                ZeRO-2, 30, 1.88 and 0.12 GB with ZeRO-3",
        source: "Rajbhandari et al. 2020 (ZeRO), table 1",
        computed: found
            .iter()
            .zip(1..)
            .map(|(bytes, stage)| {
                let workers = list(degrees.iter().zip(bytes), |(workers, bytes)| {
                    format!("{} on {workers}", gigabytes(*bytes))
                });
                format!("ZeRO-{stage}: {workers}")
            })
            .collect::<Vec<_>>()
            .join("; "),
        why: "4 + 12 / N, 2 + 14 / N and 16 / N bytes a parameter. With stage 3, Trireme gathers 16-bit values from the f32 weights and keeps no 16-bit \
              shard: 14 / N."
            .to_owned(),
    }
}

fn shards(commands: &CommandFolder) -> Row {
    let degrees = [1, 4, 16, 64, 256, 1024];
    let found = degrees.map(|num_shards| {
        // With shared memory, a worker also maps memory of other workers, which is not its own.
        let settings = format!("launch.workers={num_shards} parallelism.zero_stage=3 comm.transport=tcp");
        commands.plan(BILLIONS_7, &settings)
    });
    let whole = found[0].states();
    let found = found.iter().zip(degrees).map(|(step, num_shards)| {
        let factor = whole / step.states();
        within("states divided by shards", factor / num_shards as f64, 0.97..=1.01);
        (num_shards, factor, within("bytes of gathered units", step.peak("communication"), 4e9..=5.1e9))
    });
    Row {
        claim: "Fully sharded data parallelism needs O(n / k) for n parameters on k workers, and the largest gathered unit",
        source: "Zhao et al. 2023 (PyTorch FSDP), section 3.2.1",
        computed: list(found, |(num_shards, factor, gathered)| {
            format!("k = {num_shards}: states divided by {}, {} gathered", short(factor), gigabytes(gathered))
        }),
        why: "ZeRO-3 in f32 with 7.5 B parameters, 0.2 B of them in the embedding and in each block. Gathered units do not shrink with k: the embedding, \
              which the head shares, and a block with their gradients, the next block, which is gathered ahead of its use, and a gradient that is being reduced."
            .to_owned(),
    }
}

/// Returns the model of GPipe's table 1 with this number of layers.
const fn gpipe(num_layers: usize) -> Gpt {
    Gpt { hidden_size: 2048, num_layers, num_heads: 32, vocab_size: 32_000, seq_len: 1024, is_tied: false }
}

/// Memory of GPipe's accelerators, in bytes.
const GPIPE_MEMORY: f64 = 16e9;
/// Settings of GPipe's runs. The optimizer has one state value per parameter, as in the paper.
const GPIPE: &str = "optimizer.name=sgd training.determinism=run";

/// Returns the parameters of the model with the most layers, from 1 to 511, whose step takes at most `bytes`.
fn largest(commands: &CommandFolder, bytes: f64, settings: &str) -> f64 {
    let plan = |num_layers: usize| commands.plan(gpipe(num_layers), &format!("{GPIPE} {settings}"));
    let (mut fits, mut exceeds) = (1, 512);
    while exceeds - fits > 1 {
        let middle = (fits + exceeds) / 2;
        if plan(middle).peak("total") <= bytes { fits = middle } else { exceeds = middle }
    }
    plan(fits).num_parameters()
}

fn largest_on_one_device(commands: &CommandFolder) -> Row {
    let on = |bytes: f64| {
        let naive = largest(commands, bytes, "training.local_batch_size=32");
        let recomputed = |num_samples: usize| {
            let settings = format!(
                "training.global_batch_size=32 training.local_batch_size={num_samples} activation_checkpoint.mode=block"
            );
            largest(commands, bytes, &settings)
        };
        [naive, recomputed(32), recomputed(8)]
    };
    let (small, large) = (on(GPIPE_MEMORY), on(80e9));
    within("parameters without recomputation", small[0], 280e6..=286e6);
    for [naive, at_once, in_parts] in [small, large] {
        within("factor of recomputation", at_once / naive, 2.0..=4.0);
        within("factor of recomputation and microbatches", in_parts / at_once, 1.0..=2.0);
    }
    let show = |[naive, at_once, in_parts]: [f64; 3]| {
        format!(
            "{} without recomputation; with it {}, {} times as large; in 4 microbatches {}, {} times",
            billions(naive),
            billions(at_once),
            short(at_once / naive),
            billions(in_parts),
            short(in_parts / naive)
        )
    };
    Row {
        claim: "Recomputation fits a 2.7 times larger model on one device of 16 GB: 785.8 M instead of 282.2 M parameters",
        source: "Huang et al. 2019 (GPipe), table 1",
        computed: format!("{}. On 80 GB: {}", show(small), show(large)),
        why: "The same model: width 2048, 1024 tokens, batch 32, 12 bytes of state for each parameter, f32. On 16 GB without recomputation exactly the same three layers fit. \
              The factor depends on the microbatch in which activations are made again, and 2.7 lies between the two; it grows with the device, for what does not depend on the number of layers then weighs \
              less."
            .to_owned(),
    }
}

fn largest_on_a_pipeline(commands: &CommandFolder, effort: Effort) -> Row {
    let on = |(num_ranks, num_layers): (usize, usize)| {
        let settings = format!(
            "{GPIPE} training.local_batch_size=1 training.global_batch_size=32 launch.workers={num_ranks} \
             parallelism.pipeline_parallel_degree={num_ranks} parallelism.pipeline_parallel_schedule=gpipe \
             activation_checkpoint.mode=block"
        );
        let step = commands.plan(gpipe(num_layers), &settings);
        let peak = within("bytes of a pipeline's rank", step.peak("total"), 8e9..=GPIPE_MEMORY);
        (num_ranks, num_layers, step.num_parameters(), peak)
    };
    let mut pipelines = vec![(8, 103), (32, 415)];
    if effort == Effort::All {
        pipelines.push((128, 1663));
    }
    let found: Vec<_> = pipelines.into_iter().map(on).collect();
    Row {
        claim: "Pipelines of 8, 32 and 128 such devices train 103, 415 and 1663 layers: 5.3 B, 21.0 B and 83.9 B parameters, 298 times as many as one device",
        source: "Huang et al. 2019 (GPipe), table 1",
        computed: list(found, |(num_ranks, num_layers, parameters, peak)| {
            format!(
                "{num_ranks} ranks, {num_layers} layers: {}, {} times, at most {} on a rank",
                billions(parameters),
                short(parameters / ONE_DEVICE),
                gigabytes(peak)
            )
        }),
        why: "The same models fit. The batch of 32 travels in microbatches of one sample by the `gpipe` schedule with recomputation; memory would suffice for a few \
              more layers."
            .to_owned(),
    }
}

/// Parameters of the largest model that fits one device without recomputation, according to GPipe's table 1.
const ONE_DEVICE: f64 = 282.2e6;

fn offload(commands: &CommandFolder) -> Row {
    let model = Gpt { seq_len: 1024, ..Gpt::of(5120, 40, 40) };
    let base = "parallelism.zero_stage=3 activation_checkpoint.mode=block offload.optimizer=host offload.gradients=host";
    let [all, kept] = ["host", "device"]
        .map(|place| commands.plan(model, &format!("{MIXED} {base} offload.parameters={place}")));
    within("device memory of 13 B parameters", all.peak("total"), 4e9..=32e9);
    Row {
        claim: "ZeRO-Offload trains 13 B parameters on one GPU of 32 GB, with optimizer and gradients on the host",
        source: "Ren et al. 2021 (ZeRO-Offload), section 1",
        computed: format!(
            "{} take {} of the device and {} of the host with parameters on the host, too; {} and {} with parameters on the device",
            billions(all.num_parameters()),
            gigabytes(all.peak("total")),
            gigabytes(all.host_bytes()),
            gigabytes(kept.peak("total")),
            gigabytes(kept.host_bytes())
        ),
        why: "True with parameters on the host. ZeRO-Offload keeps 16-bit parameters on the GPU, 26 GB. A single worker here keeps no 16-bit copy, so \
              parameters that stay take 4 bytes each."
            .to_owned(),
    }
}

fn infinity(commands: &CommandFolder, effort: Effort) -> Row {
    // As many layers of GPT-3's width as 10^12 parameters need. The device's share does not depend on the depth.
    let num_layers = if effort == Effort::All { 552 } else { 56 };
    let model = Gpt { seq_len: 1024, ..Gpt::of(12_288, num_layers, 96) };
    let settings = format!(
        "{MIXED} parallelism.zero_stage=3 parallelism.zero_prefetch=0 activation_checkpoint.mode=block offload.prefetch=0 \
         offload.optimizer=disk offload.parameters=disk offload.gradients=disk offload.activations=host"
    );
    let step = commands.plan(model, &settings);
    within("device memory of 10^12 parameters", step.peak("total"), 10e9..=32e9);
    Row {
        claim: "ZeRO-Infinity trains more than 1 T parameters on a single GPU (surveys), on one node of 16 GPUs of 32 GB (the paper), with state on NVMe disks",
        source: "surveys; Rajbhandari et al. 2021 (ZeRO-Infinity), abstract",
        computed: format!(
            "{} take {} of one device and {} of the host",
            billions(step.num_parameters()),
            gigabytes(step.peak("total")),
            gigabytes(step.host_bytes())
        ),
        why: "552 layers of GPT-3's width, one sequence of 1024 tokens, everything on disk but the layers' inputs, which are on the host. The device needs a gathered \
              layer and its gradient, so its need follows from the width of a layer and not from the depth of the model. Parameters, gradients and moments on disk take 16 bytes a parameter."
            .to_owned(),
    }
}

/// Returns the bytes of activations of a layer, divided by the tokens and the hidden size.
fn activation_bytes_per_layer(commands: &CommandFolder, model: Gpt, settings: &str) -> f64 {
    let peak = |num_layers: usize| {
        let settings = format!("training.dtype=bf16 {settings}");
        commands.plan(Gpt { num_layers, ..model }, &settings).peak("activations")
    };
    (peak(10) - peak(6)) / 4.0 / (model.seq_len * model.hidden_size) as f64
}

fn activations_of_a_layer(commands: &CommandFolder) -> Row {
    let [all, selective, full] = ["none", "selective", "block"].map(|mode| {
        activation_bytes_per_layer(commands, Gpt::GPT3, &format!("activation_checkpoint.mode={mode}"))
    });
    within("activations of a layer, in sbh", all, 26.0..=34.0);
    within("activations of a layer with selective recomputation, in sbh", selective, 20.0..=all);
    within("activations of a layer with full recomputation, in sbh", full, 2.0..=4.1);
    Row {
        claim: "A layer keeps sbh (34 + 5 a s / h) bytes of activations in 16 bits, 34 sbh with selective recomputation, and 2 sbh if only its input is kept. With GPT-3's \
                80 for 5 a s / h, selective recomputation saves 70 %",
        source: "Korthikanti et al. 2022, sections 4.1 and 5",
        computed: format!(
            "{} sbh with everything kept, {} sbh with `selective`, {} sbh with `block`",
            short(all),
            short(selective),
            short(full)
        ),
        why: "Attention here never stores its s × s scores, the term that selective recomputation removes there; and without dropout there are no masks. What is left for `selective` to save are results \
              of elementwise operations. The residual stream is f32, so an input takes 4 bytes."
            .to_owned(),
    }
}

fn share_of_activations(commands: &CommandFolder) -> Row {
    let model = Gpt { vocab_size: 50_257, seq_len: 1024, ..Gpt::of(1600, 48, 25) };
    let [all, recomputed] = ["none", "block"].map(|mode| {
        let settings =
            format!("training.dtype=bf16 training.local_batch_size=32 activation_checkpoint.mode={mode}");
        commands.plan(model, &settings)
    });
    let share = |step: &PlannedStep| step.peak("activations") / step.peak("total");
    within("share of activations", share(&all), 0.6..=0.85);
    within("share of activations with recomputation", share(&recomputed), 0.2..=0.45);
    let show = |step: &PlannedStep| {
        format!("{} ({:.0} % of all memory)", gigabytes(step.peak("activations")), 100.0 * share(step))
    };
    Row {
        claim: "GPT-2 with 1.5 B parameters, 1024 tokens and a batch of 32 takes about 60 GB of activations, and 8 GB with recomputation",
        source: "Rajbhandari et al. 2020 (ZeRO), section 3.2",
        computed: format!("{}; with recomputation {}", show(&all), show(&recomputed)),
        why: "The estimate there is 12 times width, batch, length and layers, in 16 bits. Here a layer keeps 28 bytes for each of these products, and 4 with recomputation; the \
              rest are the scratch memory of kernels and chunks of logits."
            .to_owned(),
    }
}

fn sequence_length(commands: &CommandFolder) -> Row {
    let found = [2048, 8192, 32_768].map(|seq_len| {
        let model = Gpt { seq_len, ..Gpt::of(4096, 1, 32) };
        let bytes = activation_bytes_per_layer(commands, model, "");
        let stored = 5.0 * (model.num_heads * seq_len) as f64 / model.hidden_size as f64;
        (seq_len, bytes, 34.0 + stored)
    });
    let growth = found[2].1 / found[0].1;
    within("growth of activations a token from 2048 to 32768 tokens", growth, 0.99..=1.01);
    Row {
        claim: "Attention's memory grows with the square of the sequence length; computed in blocks, linearly",
        source: "Korthikanti et al. 2022, equation 1; Dao et al. 2022 (FlashAttention), theorem 1",
        computed: list(found, |(seq_len, bytes, formula)| {
            format!("s = {seq_len}: {} bytes of activations for each token and element, instead of {}", short(bytes), short(formula))
        }),
        why: "Width 4096, 32 heads, 16 bits; the second figure is 34 + 5 a s / h. Attention is computed in blocks, and backward makes the scores again, so a token \
              keeps the same at any length."
            .to_owned(),
    }
}
