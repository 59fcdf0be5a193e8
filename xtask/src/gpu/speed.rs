//! Parts that measure speed.

use super::programs::Programs;
use super::row::Row;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

/// A model whose steps in bf16 are compared with PyTorch.
pub(super) struct StepModel {
    pub(super) name: &'static str,
    /// Its config.json.
    config: fn() -> Value,
    layers: usize,
    hidden: usize,
    batch: usize,
    seq: usize,
}

/// The models of docs/gpu.md.
pub(super) const MODELS: [StepModel; 4] = [
    StepModel {
        name: "gpt2-124m",
        config: || gpt2(12, 12, 768),
        layers: 12,
        hidden: 768,
        batch: 64,
        seq: 1024,
    },
    StepModel {
        name: "gpt2-350m",
        config: || gpt2(24, 16, 1024),
        layers: 24,
        hidden: 1024,
        batch: 32,
        seq: 1024,
    },
    StepModel {
        name: "gpt2-1.5b",
        config: || gpt2(48, 25, 1600),
        layers: 48,
        hidden: 1600,
        batch: 16,
        seq: 1024,
    },
    StepModel { name: "llama-1b", config: llama_1b, layers: 16, hidden: 2048, batch: 8, seq: 2048 },
];

/// Peak FLOP/s of matmuls in bf16, without sparsity, by a part of the GPU's name (NVIDIA's data sheets).
const BF16_PEAKS: [(&str, f64); 8] = [
    ("A100", 312e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
];

/// Number of times that each side runs.
const NUM_ROUNDS: usize = 3;

fn gpt2(layers: usize, heads: usize, hidden: usize) -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": hidden, "n_layer": layers, "n_head": heads,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "tie_word_embeddings": true,
    })
}

/// The sizes of Llama 3.2 1B.
fn llama_1b() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": true, "hidden_act": "silu",
    })
}

impl StepModel {
    /// Returns the floating-point operations per token, `6N + 12 L d T` for `params` parameters.
    fn flops_per_token(&self, params: f64) -> f64 {
        6.0 * params + 12.0 * (self.layers * self.hidden * self.seq) as f64
    }
}

/// The median of one side's rounds.
struct Speed {
    tokens_per_second: f64,
    params: f64,
    memory_bytes: f64,
}

impl Speed {
    fn of(rounds: &[Value]) -> Option<Self> {
        let median = |key: &str| {
            let mut numbers: Vec<f64> = rounds.iter().filter_map(|round| round[key].as_f64()).collect();
            numbers.sort_by(f64::total_cmp);
            numbers.get(numbers.len() / 2).copied()
        };
        Some(Speed {
            tokens_per_second: median("tokens_per_second_median")?,
            params: median("params")?,
            memory_bytes: median("memory_counted_bytes")?,
        })
    }
}

/// Compares steps of a model in bf16 with eager and compiled PyTorch.
pub(super) fn steps(model: &StepModel, programs: &Programs, rows: &mut Vec<Row>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let folder = folder.path().join(model.name);
    fs::create_dir(&folder)?;
    let mut config = (model.config)();
    if programs.is_quick() {
        config = json!({"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2,
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true});
    }
    fs::write(folder.join("config.json"), config.to_string())?;
    let (batch, seq, num_steps) = if programs.is_quick() { (1, 8, 1) } else { (model.batch, model.seq, 12) };
    let shape =
        format!("--device cuda --dtype bf16 --batch {batch} --seq {seq} --steps {num_steps} --warmup 4");
    let with_shape = |mut command: Command| {
        command.args(shape.split(' ')).arg("--model").arg(&folder);
        command
    };
    let has_torch = programs.has_torch();
    let (mut ours, mut peers) = (Vec::new(), [Vec::new(), Vec::new()]);
    for round in 0..if programs.is_quick() { 1 } else { NUM_ROUNDS } {
        eprintln!("  round {}", round + 1);
        let mut step = programs.trireme();
        step.args(["bench", "step", "--json"]);
        match programs.json(&mut with_shape(step)) {
            Ok(found) => ours.extend(found),
            // The time may be over. The rounds so far count.
            Err(error) if !ours.is_empty() => eprintln!("  {error:#}"),
            Err(error) => return Err(error),
        }
        for (rounds, option) in peers.iter_mut().zip([None, Some("--compile")]).filter(|_| has_torch) {
            let mut torch = programs.python();
            torch.arg("peers/torch_train.py").args(option);
            // A peer that fails, for example for lack of memory, does not hide our figures.
            match programs.json(&mut with_shape(torch)) {
                Ok(found) => rounds.extend(found),
                Err(error) => eprintln!("  {error:#}"),
            }
        }
    }
    let ours = Speed::of(&ours).context("trireme printed no speed")?;
    let peer = peers.iter().filter_map(|rounds| Speed::of(rounds));
    let peer = peer.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second));
    let peer = peer.ok_or(if has_torch { "PyTorch failed" } else { "no PyTorch" });
    let name = format!("{}, bf16, {batch} x {seq}", model.name);
    rows.extend(speed_rows(&name, model, programs.device(), &ours, &peer));
    Ok(())
}

/// Returns the rows of a model. `peer` is the speed of PyTorch, or why there is none.
fn speed_rows(
    name: &str,
    model: &StepModel,
    device: &str,
    ours: &Speed,
    peer: &Result<Speed, &'static str>,
) -> Vec<Row> {
    let reference = |text: &dyn Fn(&Speed) -> String| match peer {
        Ok(peer) => format!("PyTorch {}", text(peer)),
        Err(reason) => (*reason).to_owned(),
    };
    let ratio = |row: Row, of: fn(&Speed) -> f64| match peer {
        Ok(peer) => row.with_ratio(of(ours) / of(peer)),
        Err(_) => row,
    };
    let speed = |speed: &Speed| format!("{:.0} tokens/s", speed.tokens_per_second);
    let memory = |speed: &Speed| format!("{:.2} GiB", speed.memory_bytes / f64::from(1 << 30));
    let mut rows = Vec::from([
        ratio(Row::new(name, speed(ours), reference(&speed)), |speed| speed.tokens_per_second),
        ratio(Row::new(format!("{name}, memory"), memory(ours), reference(&memory)), |speed| {
            speed.memory_bytes
        }),
    ]);
    if let Some((_, peak)) = BF16_PEAKS.iter().find(|(part, _)| device.contains(part)) {
        let mfu = |speed: &Speed| {
            let flops = model.flops_per_token(speed.params) * speed.tokens_per_second;
            format!("{:.1} %", flops / peak * 100.0)
        };
        rows.push(Row::new(format!("{name}, MFU of {:.0} TFLOP/s", peak / 1e12), mfu(ours), reference(&mfu)));
    }
    rows
}

/// Compares the times of the kernels of a step of gpt2-124m with their bounds.
pub(super) fn kernels(programs: &Programs, rows: &mut Vec<Row>) -> Result<()> {
    let mut command = programs.trireme();
    let (model, shape, seconds) = if programs.is_quick() {
        ("configs/models/gpt2-11m", "--batch 1 --seq 8", "0")
    } else {
        ("configs/models/gpt2-124m", "--batch 16 --seq 1024", "0.05")
    };
    command.args(["bench", "kernels", "--device", "cuda", "--dtype", "bf16", "--json", "--model", model]);
    command.args(shape.split(' ')).args(["--seconds", seconds]);
    let reports = programs.json(&mut command)?;
    let step = &reports.first().context("there is no report")?["steps"][0];
    for kernel in step["kernels"].as_array().context("there are no kernels")? {
        let text = |key: &str| kernel[key].as_str().unwrap_or_default();
        let number = |key: &str| kernel[key].as_f64().unwrap_or(f64::NAN);
        let (median, bound) = (number("median_us"), number("bound_us"));
        let name = format!("`{}` {} ({} calls)", text("name"), text("shape"), number("calls"));
        let reference = format!("bound {bound:.1} us, {}", text("limit"));
        rows.push(Row::new(name, format!("{median:.1} us"), reference).with_ratio(median / bound));
    }
    Ok(())
}

/// Times collectives of all GPUs by NCCL, and compares them with nccl-tests if it is installed.
pub(super) fn collectives(programs: &Programs, rows: &mut Vec<Row>) -> Result<()> {
    let num_gpus = programs.num_gpus();
    if num_gpus < 2 {
        rows.push(Row::new("collectives", "needs two GPUs", ""));
        return Ok(());
    }
    let (largest, seconds) = if programs.is_quick() { ("1M", "0") } else { ("256M", "1") };
    for op in ["all_reduce", "all_gather", "reduce_scatter"] {
        let arguments = format!(
            "bench collectives --workers {num_gpus} --memory gpu --any-order --dtype bf16 --ops {op} --min-bytes 1M \
             --max-bytes {largest} --factor 16 --seconds {seconds} --json"
        );
        let mut ours = programs.trireme();
        ours.args(arguments.split(' '));
        let peer = programs.in_path(&format!("{op}_perf")).and_then(|mut perf| {
            let arguments = format!("-b 1M -e {largest} -f 16 -g {num_gpus} -d bfloat16");
            perf.args(arguments.split(' '));
            programs.run(&mut perf).inspect_err(|error| eprintln!("  {error:#}")).ok()
        });
        for measured in programs.json(&mut ours)? {
            let number = |key: &str| measured[key].as_f64().unwrap_or(f64::NAN);
            let (bytes, bandwidth) = (number("bytes"), number("busbw_gbps"));
            let name = format!("{op} of {:.0} MiB, bus", bytes / f64::from(1 << 20));
            let row = Row::new(name, format!("{bandwidth:.1} GB/s"), "");
            rows.push(match peer.as_ref().and_then(|peer| nccl_tests_bandwidth(peer, bytes)) {
                Some(found) => {
                    let reference = format!("nccl-tests {found:.1} GB/s");
                    Row { reference, ..row }.with_ratio(bandwidth / found)
                }
                None => row,
            });
        }
    }
    Ok(())
}

/// Returns the bus bandwidth in the output of nccl-tests for a size. The columns are size, count, type, operation and root, and of the
/// result out of place: time, bandwidth, bus bandwidth.
fn nccl_tests_bandwidth(output: &str, bytes: f64) -> Option<f64> {
    let columns = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let lines = output.lines().filter(|line| !line.starts_with('#')).map(columns);
    let mut of_size = lines.filter(|line| line.first().and_then(|size| size.parse().ok()) == Some(bytes));
    of_size.find_map(|line| line.get(7)?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_of_nccl_tests_are_found_by_size() {
        let output = "#       size   count\n     1048576    524288  bfloat16     sum      -1    31.2   33.6   58.8  0   30.1  34.8  61.0  0\n\
             # Avg bus bandwidth : 58.8\n";
        assert_eq!(nccl_tests_bandwidth(output, 1048576.0), Some(58.8));
        assert_eq!(nccl_tests_bandwidth(output, 4.0), None);
    }

    #[test]
    fn speeds_are_compared_with_the_peer_and_the_peak() {
        let speed = |tokens_per_second| Speed { tokens_per_second, params: 124e6, memory_bytes: 1e9 };
        let rows = speed_rows("m", &MODELS[0], "NVIDIA H200", &speed(3e5), &Ok(speed(2e5)));
        assert_eq!((rows[0].ratio.as_str(), rows[1].ratio.as_str()), ("1.50", "1.00"));
        // 6 x 124e6 + 12 x 12 x 768 x 1024 operations per token.
        assert_eq!((rows[2].found.as_str(), rows[2].reference.as_str()), ("26.0 %", "PyTorch 17.3 %"));
        let rows = speed_rows("m", &MODELS[0], "Fake GPU", &speed(3e5), &Err("no PyTorch"));
        assert_eq!((rows.len(), rows[0].reference.as_str(), rows[0].ratio.as_str()), (2, "no PyTorch", ""));
    }
}
