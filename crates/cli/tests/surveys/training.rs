//! Short trainings of a small model on the repository's own text.

use crate::command_folder::{CommandFolder, last_loss};
use crate::table::{Row, Section, list, short, within};
use serde_json::Value;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A decoder of 0.1 M parameters, which learns bytes.
const SMALL: &str = "model.hidden_size=64 model.num_layers=2 model.num_heads=4 training.seq_len=32 \
                     training.local_batch_size=4 training.global_batch_size=4 lr_scheduler.decay=linear";

/// A decoder of 3.2 M parameters, large enough to be bound by its matrix products.
const LARGER: &str = "model.hidden_size=256 model.num_layers=4 model.num_heads=4 training.seq_len=256 \
                      training.local_batch_size=8 training.steps=10";

/// Seeds of the initial weights and of the order of the data.
const SEEDS: [u64; 3] = [0, 1, 2];

/// Number of runs at a time, one on each of two cores.
const NUM_PARALLEL_RUNS: usize = 2;

pub(crate) fn section(commands: &CommandFolder) -> Section {
    // The first run prepares the text for all others.
    commands.train("first", &format!("{SMALL} training.steps=1"));
    let mut rows = vec![mixed_precision(commands), recomputation(commands), equal_losses(commands)];
    rows.extend(large_batches(commands));
    rows.push(one_bit(commands));
    Section { title: "Training", rows }
}

/// Trains several runs, each with a name and settings, and returns their records.
fn train_all(product: &CommandFolder, runs: &[(String, String)]) -> Vec<Vec<Value>> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(vec![Vec::new(); runs.len()]));
    let work = || {
        while let Some((index, (name, settings))) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            runs.get(index).map(|run| (index, run))
        } {
            let records = product.train(name, settings);
            found.lock().unwrap_or_else(PoisonError::into_inner)[index] = records;
        }
    };
    std::thread::scope(|scope| (0..NUM_PARALLEL_RUNS).for_each(|_| drop(scope.spawn(work))));
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Formats the mean of the numbers and the largest distance from it.
fn spread(numbers: &[f64]) -> String {
    let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
    let distance = numbers.iter().map(|number| (number - mean).abs()).fold(0.0, f64::max);
    format!("{mean:.2} ± {distance:.2}")
}

/// Trains the larger model with each of the settings in turns. Returns the median seconds of a step, the peak bytes of activations and the
/// last loss.
fn compare<const N: usize>(product: &CommandFolder, name: &str, settings: [&str; N]) -> [(f64, f64, f64); N] {
    const NUM_ROUNDS: usize = 3;
    let mut seconds = [const { Vec::new() }; N];
    let mut found = [(0.0, 0.0, 0.0); N];
    for round in 0..NUM_ROUNDS {
        for (index, settings) in settings.iter().enumerate() {
            let records = product.train(&format!("{name}-{round}-{index}"), &format!("{LARGER} {settings}"));
            seconds[index]
                .extend(records.iter().skip(3).map(|record| record["step_seconds"].as_f64().unwrap()));
            let bytes = records.last().unwrap()["memory_peak_bytes"]["activations"].as_f64().unwrap();
            found[index] = (0.0, bytes, last_loss(&records));
        }
    }
    for (found, seconds) in found.iter_mut().zip(seconds) {
        found.0 = median(seconds);
    }
    found
}

fn mixed_precision(product: &CommandFolder) -> Row {
    let [f32, bf16] = compare(product, "precision", ["training.dtype=f32", "training.dtype=bf16"]);
    within("loss in bf16 by that in f32", bf16.2 / f32.2, 0.98..=1.02);
    Row {
        claim: "Mixed precision computes 2 to 6 times faster on hardware with 16-bit units, halves activations, and ends at the same loss",
        source: "Micikevicius et al. 2018, sections 3 and 5",
        computed: format!(
            "a step in f32 takes {} times as long as in bf16, activations {} times smaller, losses {:.3} and {:.3} after 10 steps",
            short(f32.0 / bf16.0),
            short(f32.1 / bf16.1),
            f32.2,
            bf16.2
        ),
        why: "bf16 against f32, 3.2 M parameters, one thread, medians of three rounds. The factor is that of this processor's 16-bit products, for the part of a step that is products. \
              The residual stream stays f32."
            .to_owned(),
    }
}

fn recomputation(product: &CommandFolder) -> Row {
    let [all, block] = compare(
        product,
        "recomputation",
        ["activation_checkpoint.mode=none", "activation_checkpoint.mode=block"],
    );
    assert_eq!(all.2.to_bits(), block.2.to_bits(), "recomputation changes no loss");
    Row {
        claim: "Full recomputation makes steps 30 to 40 % longer",
        source: "Korthikanti et al. 2022, section 1",
        computed: format!(
            "{:.0} % longer, activations {} times smaller, the same loss in every bit",
            100.0 * (block.0 / all.0 - 1.0),
            short(all.1 / block.1)
        ),
        why: "f32, 3.2 M parameters, one thread, medians of three rounds. By the operations it is a third of the layers; embedding, head and updates are not repeated."
            .to_owned(),
    }
}

fn equal_losses(product: &CommandFolder) -> Row {
    let layouts = [
        "launch.workers=1",
        "launch.workers=2",
        "launch.workers=2 parallelism.zero_stage=1",
        "launch.workers=2 parallelism.zero_stage=2",
        "launch.workers=2 parallelism.zero_stage=3",
        "launch.workers=2 parallelism.pipeline_parallel_degree=2 parallelism.pipeline_parallel_schedule=gpipe",
        "launch.workers=2 parallelism.pipeline_parallel_degree=2 parallelism.pipeline_parallel_schedule=1f1b",
        "launch.workers=2 parallelism.pipeline_parallel_degree=2 parallelism.pipeline_parallel_schedule=zb-h1",
        "launch.workers=2 parallelism.pipeline_parallel_degree=2 parallelism.pipeline_parallel_schedule=interleaved-1f1b",
        "launch.workers=1 activation_checkpoint.mode=selective",
        "launch.workers=1 activation_checkpoint.mode=block",
        "launch.workers=1 parallelism.zero_stage=3 offload.optimizer=host offload.parameters=disk offload.gradients=host",
    ];
    let runs = layouts.iter().enumerate().map(|(index, layout)| {
        let settings = format!(
            "{SMALL} training.steps=100 training.global_batch_size=8 training.local_batch_size=2 {layout}"
        );
        (format!("layout-{index}"), settings)
    });
    let found = train_all(product, &Vec::from_iter(runs));
    let losses = |records: &Vec<Value>| -> Vec<u64> {
        records.iter().map(|record| record["loss"].as_f64().unwrap().to_bits()).collect()
    };
    let first = losses(&found[0]);
    let num_equal = found.iter().filter(|records| losses(records) == first).count();
    assert_eq!((num_equal, first.len()), (layouts.len(), 100), "runs with the losses of the first");
    Row {
        claim: "Data parallelism, ZeRO, GPipe, 1F1B, zero-bubble schedules, recomputation and offloading change no result",
        source: "the papers above: synchronous updates, the same mathematics",
        computed: format!(
            "all {num_equal} layouts have the same 100 losses in every bit, ending at {:.4}",
            found[0].last().unwrap()["loss"].as_f64().unwrap()
        ),
        why: "1 and 2 workers; ZeRO-1, 2 and 3; `gpipe`, `1f1b`, `interleaved-1f1b`, `zb-h1`; `selective` and `block`; state on host and disk. Elsewhere sums are taken in another order on each \
              layout, and losses agree to a few digits."
            .to_owned(),
    }
}

/// Optimizers, each with a learning rate for a batch of 4. Half and twice that rate are tried, too.
const OPTIMIZERS: [(&str, f64); 4] = [("adamw", 2e-3), ("lamb", 5e-3), ("sgd", 0.05), ("lars", 4.0)];

/// Returns the name and settings of a run on 8,192 samples with a batch of 4 times `factor`.
fn large_batch_run(name: &str, lr: f64, factor: usize, seed: u64) -> (String, String) {
    let (num_samples, num_steps) = (4 * factor, 2048 / factor);
    let settings = format!(
        "{SMALL} optimizer.name={name} optimizer.lr={lr} optimizer.weight_decay=0.01 training.steps={num_steps} \
         lr_scheduler.warmup_steps={} training.global_batch_size={num_samples} training.local_batch_size={} \
         training.seed={seed}",
        num_steps.div_ceil(10),
        num_samples.min(64),
    );
    (format!("{name}-{lr}-{factor}-{seed}"), settings)
}

/// Compares optimizers by their validation losses after the same number of samples, with larger and larger batches.
fn large_batches(product: &CommandFolder) -> [Row; 2] {
    const FACTORS: [usize; 4] = [1, 4, 16, 64];
    /// A seed that no compared run has.
    const TUNING_SEED: u64 = 3;
    let losses_of = |runs: &[(String, String)]| -> Vec<f64> {
        train_all(product, runs).iter().map(|records| last_loss(records)).collect()
    };
    let tried = OPTIMIZERS.map(|(name, lr)| [0.5 * lr, lr, 2.0 * lr].map(|lr| (name, lr)));
    let runs = tried.iter().flatten().map(|(name, lr)| large_batch_run(name, *lr, 1, TUNING_SEED));
    let found = losses_of(&Vec::from_iter(runs));
    let best = tried.iter().zip(found.chunks(3)).map(|(tried, losses)| {
        let by_loss = tried.iter().zip(losses).min_by(|(_, a), (_, b)| a.total_cmp(b));
        *by_loss.expect("several are tried").0
    });
    let best: Vec<(&str, f64)> = best.collect();
    let mut runs = Vec::new();
    for (name, lr) in &best {
        for factor in FACTORS {
            let lr = lr * (factor as f64).sqrt();
            runs.extend(SEEDS.map(|seed| large_batch_run(name, lr, factor, seed)));
        }
    }
    let losses = losses_of(&runs);
    let of_optimizer = |index: usize| {
        let losses = &losses[index * FACTORS.len() * SEEDS.len()..][..FACTORS.len() * SEEDS.len()];
        let shown = list(FACTORS.iter().zip(losses.chunks(SEEDS.len())), |(factor, losses)| {
            format!("{factor} ×: {}", spread(losses))
        });
        format!("lr = {}: {}", best[index].1, shown.replace("; ", ", "))
    };
    let why = "Validation loss after 8,192 samples, mean of three seeds and the largest distance from it. Learning rates are the best of three for the batch of 4, grow by the square root of the \
               factor, and warm up for a tenth of the steps. 64 × leaves 32 steps, too few for any optimizer: the claim is about runs whose steps suffice."
        .to_owned();
    [
        Row {
            claim: "LAMB keeps the loss at batches 64 times as large, where AdamW does not",
            source: "You et al. 2020 (LAMB), table 1",
            computed: format!("LAMB, {}. AdamW, {}", of_optimizer(1), of_optimizer(0)),
            why: why.clone(),
        },
        Row {
            claim: "LARS keeps the accuracy of ResNet-50 up to batches of 32 K, 128 times the usual one, where SGD with momentum does not",
            source: "You et al. 2017 (LARS), abstract",
            computed: format!("LARS, {}. SGD, {}", of_optimizer(3), of_optimizer(2)),
            why: format!(
                "{why} Neither suits a transformer at any batch; the claim is about convolutional networks."
            ),
        },
    ]
}

fn one_bit(product: &CommandFolder) -> Row {
    let names = ["adam", "one_bit_adam", "zero_one_adam"];
    let runs = names.iter().flat_map(|name| {
        SEEDS.map(|seed| {
            let settings = format!(
                "{SMALL} optimizer.name={name} optimizer.lr=2e-3 optimizer.weight_decay=0 training.max_norm=0 training.steps=512 \
                 lr_scheduler.warmup_steps=51 training.determinism=run launch.workers=2 training.local_batch_size=2 \
                 training.seed={seed}"
            );
            (format!("{name}-{seed}"), settings)
        })
    });
    let found = train_all(product, &Vec::from_iter(runs));
    let sent = |runs: &[Vec<Value>]| -> f64 {
        runs.iter().flatten().map(|record| record["comm_bytes"].as_f64().unwrap()).sum()
    };
    let found: Vec<(f64, String)> = found
        .chunks(SEEDS.len())
        .map(|runs| (sent(runs), spread(&runs.iter().map(|records| last_loss(records)).collect::<Vec<_>>())))
        .collect();
    let fewer = |index: usize| short(found[0].0 / found[index].0);
    Row {
        claim: "1-bit Adam and 0/1 Adam converge as Adam does, and send up to 5 and 26 times fewer bytes over a whole run",
        source: "Tang et al. 2021, abstract; the documentation of DeepSpeed",
        computed: format!(
            "Adam {}; 1-bit Adam {} with {} times fewer bytes; 0/1 Adam {} with {} times fewer",
            found[0].1,
            found[1].1,
            fewer(1),
            found[2].1,
            fewer(2)
        ),
        why: "Validation loss after 512 steps of two workers, three seeds. The first fifth of 1-bit Adam's run is uncompressed, so no more than 5 times fewer are possible. Momentum travels as 2 bits an element \
              (signs in blocks of 64 with two scales), gathered and not reduced; 0/1 Adam here exchanges momentum in every step."
            .to_owned(),
    }
}
