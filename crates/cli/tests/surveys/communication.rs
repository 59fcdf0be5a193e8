//! Messages of collective algorithms, tensor parallelism, ZeRO and compression.

use crate::command_folder::{CommandFolder, Exchange, Gpt, PlannedStep};
use crate::table::{Row, Section, list, short, within};
use trireme_base::Rank;
use trireme_codec::{Bucket, CodecName, Compression, CompressionOptions};
use trireme_schedule::collective::{Algorithm, CollectiveKind, Hosts, Step as CollectiveStep, steps};

pub(crate) fn section(commands: &CommandFolder) -> Section {
    let rows = vec![
        ring(),
        hierarchy(),
        tensor_parallelism(commands),
        volumes(commands),
        zero_plus_plus(commands),
        one_bit(),
        top_k(),
        fp8(),
    ];
    Section { title: "Communication", rows }
}

/// Returns the steps and the sent elements of the rank that sends the most in an all-reduce of `len` elements.
fn all_reduce(algorithm: &str, hosts: &Hosts, len: usize) -> (usize, usize) {
    let algorithm: Algorithm = algorithm.parse().unwrap();
    let of_rank = |rank: usize| {
        let mut program = Vec::new();
        steps(CollectiveKind::AllReduce.with_len(len), algorithm, hosts, Rank(rank), &mut program);
        let sent = program.iter().map(|step| match step {
            CollectiveStep::Exchange { send: Some(message), .. } => message.span.range.len(),
            _ => 0,
        });
        let num_exchanges = program.iter().filter(|step| matches!(step, CollectiveStep::Exchange { .. }));
        (num_exchanges.count(), sent.sum())
    };
    (0..hosts.world_size()).map(of_rank).max_by_key(|(_, sent)| *sent).unwrap()
}

fn ring() -> Row {
    const LEN: usize = 1 << 20;
    let found = [4, 16, 64, 256].map(|num_ranks| {
        let (num_steps, sent) = all_reduce("ring", &Hosts::single(num_ranks), LEN);
        let others = num_ranks - 1;
        within("ring steps", num_steps as f64, 2.0 * others as f64..=2.0 * others as f64);
        let formula = 2.0 * others as f64 / num_ranks as f64;
        let sent =
            within("ring volume by its formula", sent as f64 / LEN as f64 / formula, 0.999..=1.001) * formula;
        (num_ranks, num_steps, sent)
    });
    Row {
        claim: "A ring all-reduce of D bytes takes 2 (N − 1) steps, in which each rank sends 2 D (N − 1) / N",
        source: "Patarasuk, Yuan 2009; Sergeev, Del Balso 2018, section 3",
        computed: list(found, |(num_ranks, num_steps, sent)| {
            format!("N = {num_ranks}: {num_steps} steps, {sent:.3} D")
        }),
        why: "Counted in the messages of the algorithm. The formulas are exact; the volume does not grow with N, the \
              number of steps does."
            .to_owned(),
    }
}

fn hierarchy() -> Row {
    const LEN: usize = 1 << 20;
    const RANKS_PER_HOST: usize = 8;
    let found = [64, 256].map(|num_ranks| {
        let hosts: Vec<usize> = (0..num_ranks).map(|rank| rank / RANKS_PER_HOST).collect();
        let hosts = Hosts::new(&hosts);
        let (flat, _) = all_reduce("ring", &hosts, LEN);
        let (two_levels, sent) = all_reduce("hierarchical:all:ring:ring", &hosts, LEN);
        let claimed = 4 * (RANKS_PER_HOST - 1) + 2 * (num_ranks / RANKS_PER_HOST - 1);
        let expected = (2 * (RANKS_PER_HOST - 1) + 2 * (num_ranks / RANKS_PER_HOST - 1)) as f64;
        within("steps of two levels", two_levels as f64, expected..=expected);
        (num_ranks, flat, two_levels, claimed, sent as f64 / LEN as f64)
    });
    Row {
        claim: "With hosts of k ranks, a hierarchical all-reduce takes 4 (k − 1) + 2 (N / k − 1) steps instead of 2 (N − 1)",
        source: "Jia et al. 2018, section 3.3",
        computed: list(found, |(num_ranks, flat, two_levels, claimed, sent)| {
            format!("N = {num_ranks}, k = 8: {two_levels} steps instead of {flat} (the claim: {claimed}), {sent:.2} D sent")
        }),
        why: "The paper reduces to one leader of each host and broadcasts from it. Here every rank leads for its \
              own block: a reduce-scatter within the host, a ring across hosts, an all-gather within the host, which is \
              2 (k − 1) + 2 (N / k − 1) steps."
            .to_owned(),
    }
}

/// Returns the number of exchanges that satisfy `matches`, and the bytes of their vectors, for each layer.
fn exchanges_per_layer(
    product: &CommandFolder,
    settings: &str,
    matches: impl Fn(&Exchange<'_>) -> bool,
) -> (f64, f64) {
    let sum = |num_layers: usize| {
        let step = product.plan(Gpt { num_layers, ..Gpt::GPT3 }, settings);
        let exchanges = step.exchanges().filter(|exchange| matches(exchange));
        exchanges
            .fold((0.0, 0.0), |(count, bytes), exchange| (count + exchange.count, bytes + exchange.bytes))
    };
    let (two, four) = (sum(2), sum(4));
    ((four.0 - two.0) / 2.0, (four.1 - two.1) / 2.0)
}

fn tensor_parallelism(product: &CommandFolder) -> Row {
    let settings = "launch.workers=8 parallelism.tensor_parallel_degree=8 training.dtype=bf16";
    let plain = format!("{settings} parallelism.sequence_parallel=false");
    let (num_sums, sum_bytes) =
        exchanges_per_layer(product, &plain, |exchange| exchange.operation == "all_reduce");
    let (num_parts, part_bytes) = exchanges_per_layer(product, settings, |exchange| {
        ["all_gather", "reduce_scatter"].contains(&exchange.operation)
    });
    within("all-reduces of a layer", num_sums, 4.0..=4.0);
    let per_layer = (Gpt::GPT3.seq_len * Gpt::GPT3.hidden_size) as f64;
    Row {
        claim: "Tensor parallelism has two all-reduces of bsh elements per layer in forward and two in backward; with sequence \
                parallelism, all-gathers and reduce-scatters of the same volume replace them",
        source: "Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2",
        computed: format!(
            "{num_sums} all-reduces of {} bytes an element; with sequence parallelism {num_parts} all-gathers and reduce-scatters, \
             of {} bytes an element",
            short(sum_bytes / num_sums / per_layer),
            short(part_bytes / num_parts / per_layer),
        ),
        why: "Counted in a dry run of GPT-3's layers on 8 workers. An all-reduce is a reduce-scatter and an \
              all-gather, so 8 of them are the same volume; the two further gathers of backward are those of inputs, of which a rank keeps its rows only."
            .to_owned(),
    }
}

/// Returns the bytes that one of many ranks sends, by the algorithms that move the fewest: twice the vector for an all-reduce.
fn volume(step: &PlannedStep) -> f64 {
    let sent = |exchange: Exchange<'_>| match exchange.operation {
        "all_reduce" => 2.0 * exchange.bytes,
        _ => exchange.bytes,
    };
    step.exchanges().map(sent).sum()
}

fn volumes(product: &CommandFolder) -> Row {
    let model = Gpt::of(4096, 16, 32);
    let settings = "launch.workers=64 comm.fusion_bytes=0 parallelism.zero_stage";
    let [plain, one, two, three] =
        [0, 1, 2, 3].map(|stage| volume(&product.plan(model, &format!("{settings}={stage}"))));
    for stage in [one, two] {
        within("volume of ZeRO-1 and 2", stage / plain, 0.99..=1.01);
    }
    within("volume of ZeRO-3", three / plain, 1.49..=1.51);
    Row {
        claim: "ZeRO-1 and ZeRO-2 send as much as data parallelism, ZeRO-3 1.5 times as much",
        source: "Rajbhandari et al. 2020, section 7",
        computed: format!(
            "ZeRO-1 {}, ZeRO-2 {}, ZeRO-3 {} times as much",
            short(one / plain),
            short(two / plain),
            short(three / plain)
        ),
        why: "Counted in a dry run of 3.4 B parameters on 64 workers: a reduce-scatter and an all-gather are an all-reduce, and ZeRO-3 \
              gathers parameters for forward and again for backward."
            .to_owned(),
    }
}

/// Returns the bytes that each host sends to the others, if two-level collectives send nothing twice.
fn across_hosts(step: &PlannedStep, ranks_per_host: f64) -> f64 {
    let crossing = step.exchanges().filter(|exchange| exchange.num_hosts > 1.0);
    crossing
        .map(|exchange| {
            // If a group includes only some of a host's ranks, the host takes part in several such groups.
            let num_groups = ranks_per_host * exchange.num_hosts / exchange.num_ranks;
            let passes = if exchange.operation == "all_reduce" { 2.0 } else { 1.0 };
            passes * num_groups * exchange.bytes * (exchange.num_hosts - 1.0) / exchange.num_hosts
        })
        .sum()
}

fn zero_plus_plus(product: &CommandFolder) -> Row {
    let model = Gpt::of(4096, 16, 32);
    let base = "launch.workers=64 training.dtype=bf16 parallelism.zero_stage=3";
    let measure = |settings: &str| {
        let step = product.plan_on_hosts(model, &format!("{base} {settings}"), Some(8));
        across_hosts(&step, 8.0)
    };
    let plain = measure("training.reduce_dtype=bf16");
    let integers = "parallelism.zero_quantized_weights=true parallelism.zero_hpz=true parallelism.zero_quantized_gradients";
    let [int4, int8] = ["int4", "int8"].map(|format| plain / measure(&format!("{integers}={format}")));
    within("reduction by ZeRO++ with int4", int4, 3.85..=4.0);
    within("reduction by ZeRO++ with int8", int8, 2.9..=3.0);
    Row {
        claim: "ZeRO++ sends a quarter of ZeRO-3's bytes between hosts: 0.75 M instead of 3 M",
        source: "Wang et al. 2023 (ZeRO++), abstract",
        computed: format!("{} times fewer with 4-bit gradients, {} with 8-bit", short(int4), short(int8)),
        why: "Counted in a dry run of 3.4 B parameters on 8 hosts of 8 workers, against 16-bit parameters and gradients. \
              Integers have an f32 scale for each 256 of them, which makes it \
              0.766 M instead of 0.75 M. With 8-bit gradients it is 1.016 M."
            .to_owned(),
    }
}

/// Returns how many times shorter a rank's message for the gradients of a layer of GPT-3 is with compression than with `bytes` bytes per
/// element.
fn compression_ratio(options: CompressionOptions, bytes: f64) -> f64 {
    const LEN: usize = 12 * 12_288 * 12_288;
    let compression = Compression::new(&options).unwrap();
    let encoded = compression.encoded_bytes(&Bucket::flat(LEN), 2, 0);
    LEN as f64 * bytes / encoded as f64
}

fn one_bit() -> Row {
    let of_blocks = |block_len| {
        compression_ratio(
            CompressionOptions { codec: CodecName::OneBit, block_len: Some(block_len), ..Default::default() },
            4.0,
        )
    };
    let (default, long, short_blocks) = (of_blocks(1024), of_blocks(1 << 20), of_blocks(320));
    within("one-bit messages", default, 30.0..=30.3);
    within("one-bit messages in long blocks", long, 31.9..=32.0);
    within("one-bit messages in blocks of 320", short_blocks, 26.0..=27.0);
    Row {
        claim: "1-bit messages are 32 times shorter than f32 and 16 times shorter than 16 bits (1-bit Adam); elsewhere \
                the same method reduces communication up to 26 times",
        source: "Tang et al. 2021: 97 % and 94 % less; the documentation of DeepSpeed: 26 times",
        computed: format!(
            "{} times shorter than f32 and {} than 16 bits with the default blocks of 1024; {} with blocks of 2^20, {} with blocks \
             of 320",
            short(default),
            short(default / 2.0),
            short(long),
            short(short_blocks)
        ),
        why: "**The two figures contradict each other** if both are about messages. 32 is the limit of one sign per element without \
              scales: two f32 scales per block of n elements make it 32 / (1 + 64 / n), which is 26 for n ≈ 280. DeepSpeed's 26 is \
              about the whole of a BERT run in 16 bits, where 0/1 Adam also skips rounds."
            .to_owned(),
    }
}

fn top_k() -> Row {
    let of_ratio = |ratio| {
        compression_ratio(
            CompressionOptions { codec: CodecName::TopK, ratio: Some(ratio), ..Default::default() },
            4.0,
        )
    };
    let (tenth, percent, thousandth) = (of_ratio(0.1), of_ratio(0.01), of_ratio(0.001));
    within("top-k of 1 %", percent, 49.0..=51.0);
    within("top-k of 0.1 %", thousandth, 490.0..=510.0);
    Row {
        claim: "Sparse gradients are 10 to 100 times shorter; deep gradient compression with 0.1 % of the elements reaches 270 to 600",
        source: "Aji, Heafield 2017; Lin et al. 2018, abstract",
        computed: format!(
            "top 10 %: {} times shorter; 1 %: {}; 0.1 %: {}",
            short(tenth),
            short(percent),
            short(thousandth)
        ),
        why: "A sent element has a value and a position, so a ratio r saves less than 1 / r. The messages of all ranks are \
              gathered, so this is the saving of two ranks; with more, the volume grows by N − 1, and sparse messages pay as long as \
              that is below 2 / r."
            .to_owned(),
    }
}

fn fp8() -> Row {
    let saving =
        compression_ratio(CompressionOptions { codec: CodecName::Fp8E4m3, ..Default::default() }, 2.0);
    within("fp8 messages", saving, 1.9..=2.0);
    Row {
        claim: "FP8 halves the bytes of gradients against 16 bits",
        source: "Peng et al. 2023 (FP8-LM), section 2.1",
        computed: format!("{saving:.3} times shorter than bf16"),
        why: "One byte per element, and scales.".to_owned(),
    }
}
