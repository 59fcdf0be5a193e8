//! Test helpers: ranks as threads, small models (language models and a classifier), a counting allocator, an AMX emulator, and networks of
//! hosts with bad links. For tests only.

#![expect(clippy::missing_panics_doc, reason = "a failure of a test's own set-up panics")]

mod allocations;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx_emulator;
mod classifier;
mod cuda;
mod gradients;
pub mod network;
pub mod relay;
mod skipping;
mod traced;

pub use allocations::CountingAllocator;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub use amx_emulator::emulate_amx;
pub use classifier::{build_classifier, classifier_batch, classifier_sample, classifier_specs};
pub use cuda::{fake_cuda_folder, fake_gpu, test_gpu};
pub use gradients::{ApplyOperations, GradientCheck, Input, Reference};
pub use skipping::or_skip;
pub use traced::TracedDevice;
pub use trireme_fake_cuda::install as install_fake_cuda;
pub use trireme_fake_cuda::nvrtc::PTX_VARIABLE as FAKE_CUDA_PTX;

use trireme_base::{Random, RandomKey};
use trireme_comm::{Group, GroupOptions, inproc_world_on};
use trireme_model::{Batch, HostBatch, ModelConfig, set_window, token_specs};
use trireme_tensor::Device;

/// Runs `rank` on a thread for each rank of a world within this process. Returns the results by rank.
///
/// # Panics
/// If a rank panics.
pub fn run_ranks<T: Send>(world_size: usize, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    run_ranks_on(&vec![0; world_size], rank)
}

/// As [`run_ranks`], with `hosts.len()` ranks. Rank `r` is assigned to host number `hosts[r]`.
pub fn run_ranks_on<T: Send>(hosts: &[usize], rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    on_threads(inproc_world_on(hosts, &GroupOptions::default()), &rank)
}

/// Calls `body` with each input, on a thread of its own. Returns the results in order. The code of threads is compiled once for each type
/// of results, not for each closure.
///
/// # Panics
/// If `body` panics.
pub fn on_threads<I: Send, T: Send>(inputs: Vec<I>, body: &(dyn Fn(I) -> T + Sync)) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = inputs.into_iter().map(|input| scope.spawn(move || body(input))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread panicked")).collect()
    })
}

/// Returns a gpt2 with tied embeddings, and a llama with untied embeddings and grouped heads. Each has some ten thousand parameters.
pub fn small_models() -> [ModelConfig; 2] {
    let gpt2 = r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 3}"#;
    let llama = r#"{"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32}"#;
    [gpt2, llama].map(|text| ModelConfig::from_json(text).expect("the small models are valid"))
}

/// Returns the microbatch with the global index `index` of a step: random tokens, the same on every rank. `shape` is the batch size and the
/// sequence length.
///
/// # Panics
/// If the device has too little memory.
pub fn random_batch(
    device: &Device,
    shape: (usize, usize),
    vocab_size: usize,
    step: u64,
    index: usize,
) -> Batch {
    random_tokens(shape, vocab_size, step, index).upload(device).expect("memory for a batch")
}

/// As [`random_batch`], in host memory.
pub fn random_tokens(
    (batch, seq_len): (usize, usize),
    vocab_size: usize,
    step: u64,
    index: usize,
) -> HostBatch {
    let mut tokens = HostBatch::new(&token_specs(batch, seq_len));
    let mut random = Random::new(RandomKey::new(step << 32 | index as u64, "random batch"), 0);
    for row in 0..batch {
        let window: Vec<u32> = (0..=seq_len).map(|_| random.below(vocab_size as u64) as u32).collect();
        set_window(&mut tokens, row, &window);
    }
    tokens
}
