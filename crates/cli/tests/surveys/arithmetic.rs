//! Floating-point operations, as counted in dry runs.

use crate::command_folder::{CommandFolder, Gpt, PlannedStep};
use crate::table::{Row, Section, list, short, within};

/// Peak of an A100 in 16 bits, in operations per second.
const A100: f64 = 312e12;

/// A layout in which a worker has a small shard of the state, so that a dry run is short. It computes as much as a single worker.
const SHARDED: &str = "training.dtype=bf16 launch.workers=1024 parallelism.zero_stage=3";

const SECONDS_A_DAY: f64 = 86_400.0;

pub(crate) fn section(commands: &CommandFolder) -> Section {
    let rows = vec![gpt3(commands), layer(commands), recomputation(commands), utilization(commands)];
    Section { title: "Arithmetic", rows }
}

fn operations_per_token(step: &PlannedStep, model: Gpt) -> f64 {
    step.all_operations() / model.seq_len as f64
}

fn gpt3(product: &CommandFolder) -> Row {
    const TOKENS: f64 = 300e9;
    let step = product.plan(Gpt::GPT3, SHARDED);
    let all = operations_per_token(&step, Gpt::GPT3) * TOKENS;
    let formula = 6.0 * step.num_parameters() * TOKENS;
    within("operations of GPT-3's training", all / 3.14e23, 0.98..=1.03);
    Row {
        claim: "GPT-3 took 314 ZFLOP for 300 B tokens, six operations for each parameter and token",
        source: "Brown et al. 2020, table D.1; Kaplan et al. 2020, section 2.1",
        computed: format!("{:.0} ZFLOP; 6 N D is {:.0}", all / 1e21, formula / 1e21),
        why: "Counted in all matrix products of a step. 6 N D lacks the scores of attention, of which a causal model \
              computes half, and recomputes them in backward."
            .to_owned(),
    }
}

fn layer(product: &CommandFolder) -> Row {
    let found =
        [(Gpt::GPT3, 2048), (Gpt::GPT3, 16_384), (Gpt::of(4096, 2, 32), 2048)].map(|(model, seq_len)| {
            let forward = |num_layers: usize| {
                let model = Gpt { num_layers, seq_len, ..model };
                product.plan(model, SHARDED).operations("forward")
            };
            let found = (forward(4) - forward(2)) / 2.0;
            let (n, d) = (seq_len as f64, model.hidden_size as f64);
            let (dense, scores) = (2.0 * n * 12.0 * d * d, 2.0 * n * 2.0 * n * d);
            within("operations of a layer", found / (dense + scores / 2.0), 0.999..=1.001);
            (model.hidden_size, seq_len, found, dense + scores)
        });
    Row {
        claim: "Forward of L layers takes 2 B n L (12 d² + 2 n d) operations for a batch of B sequences of n tokens",
        source: "Narayanan et al. 2021, appendix; surveys, with n for s and d for h",
        computed: list(found, |(width, seq_len, found, formula)| {
            format!(
                "d = {width}, n = {seq_len}: {} TFLOP a layer instead of {}, {:.3} of it",
                short(found / 1e12),
                short(formula / 1e12),
                found / formula
            )
        }),
        why: "12 d² is exact. 2 n d counts scores between all pairs of tokens; in a causal model, half of them are masked, and blocks of them are not computed: n d."
            .to_owned(),
    }
}

fn recomputation(product: &CommandFolder) -> Row {
    let step = product.plan(Gpt::GPT3, &format!("{SHARDED} activation_checkpoint.mode=block"));
    let plain = step.operations("forward") + step.operations("backward");
    let added =
        within("operations added by recomputation", step.operations("recomputation") / plain, 0.31..=0.34);
    Row {
        claim: "Full recomputation adds a third of the operations",
        source: "Chen et al. 2016, section 4; Korthikanti et al. 2022, section 5",
        computed: format!("{:.1} % more for GPT-3", 100.0 * added),
        why: "One more forward next to one forward and a backward of twice the work. The head is not recomputed as a layer is.".to_owned(),
    }
}

fn utilization(product: &CommandFolder) -> Row {
    let recomputed = |model: Gpt| {
        let step = product.plan(model, &format!("{SHARDED} activation_checkpoint.mode=block"));
        operations_per_token(&step, model)
    };
    let (gpt3, trillion) = (recomputed(Gpt::GPT3) * 300e9, recomputed(Gpt::TRILLION) * 450e9);
    let share =
        |operations: f64, num_gpus: f64, days: f64| operations / (num_gpus * days * SECONDS_A_DAY * A100);
    let of_gpt3 = within("utilization for GPT-3", share(gpt3, 1024.0, 34.0), 0.43..=0.47);
    let of_trillion = within("utilization for 1 T", share(trillion, 3072.0, 84.0), 0.50..=0.54);
    let days = |operations: f64| operations / (1024.0 * 0.52 * A100 * SECONDS_A_DAY);
    Row {
        claim: "52 % of peak on 1,024 A100s, both for 175 B and for 1 T parameters; 34 days for 300 B tokens of GPT-3",
        source: "surveys, after Narayanan et al. 2021, table 1 and section 5.1",
        computed: format!(
            "34 days on 1,024 GPUs are {:.1} % of peak for GPT-3; 84 days on 3,072 GPUs are {:.1} % for 1 T parameters and 450 B tokens. 52 % on 1,024 GPUs would be \
             {:.1} days for GPT-3, and {:.0} for 1 T",
            100.0 * of_gpt3,
            100.0 * of_trillion,
            days(gpt3),
            days(trillion)
        ),
        why: format!(
            "**Both cannot be true**: 52 % for 34 days is {:.0} % more than the operations of GPT-3. The paper has 52 % for 1 T parameters on 3,072 GPUs, and 140 TFLOP/s, 45 %, \
             for GPT-3 on 1,024. Computed from the operations of a step with full recomputation, which the paper counts, too, and 312 TFLOP/s.",
            100.0 * (0.52 / of_gpt3 - 1.0)
        ),
    }
}
