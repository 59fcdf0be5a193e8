//! Every key of the config: name, type, default, limits and meaning, each said once. The reader, the
//! validator, `trireme config --explain` and the written config follow from these lists.

use super::choice::{
    Architecture, Decay, Determinism, Fp8, InvalidUtf8, MuonScale, OptimizerName, Resume, StateDtype,
    Tokenizer, TrainingDtype, Transport,
};
use super::layout::{ActivationCheckpoint, Memory, Offload, Parallelism};
use super::section::{Section, config_section, config_sections};
use super::value::{above, above_up_to};
use std::path::PathBuf;
use trireme_comm::{CodecName, GroupOptions};
use trireme_optim::LossScaling;
use trireme_parallel::ExecutorOptions;
use trireme_schedule::collective::Algorithm;
use trireme_tensor::Device;

const LOSS_SCALE_MAX: u32 = LossScaling::SCALE_MAX;

/// Keys of `[training]` that count only with `dtype = "f16"`.
pub(super) const LOSS_SCALE_KEYS: [&str; 3] =
    ["loss_scale", "loss_scale_initial", "loss_scale_growth_interval"];

/// Keys of `[training]` that count only with `fp8`.
pub(super) const FP8_KEYS: [&str; 2] = ["fp8_amax_history_len", "fp8_margin"];

/// The longest history of amaxes; a few numbers a layer and step.
pub(crate) const FP8_AMAX_HISTORY_LEN_MAX: usize = 4096;

config_sections! {
    run: Run,
    model: Model,
    data: Data,
    training: Training,
    optimizer: Optimizer,
    lr_scheduler: LrScheduler,
    parallelism: Parallelism,
    activation_checkpoint: ActivationCheckpoint,
    memory: Memory,
    offload: Offload,
    checkpoint: Checkpoint,
    comm: Comm,
    metrics: Metrics,
    launch: Launch,
    generate: Generate,
}

config_section! {
    /// The run's name and place. Every path in the config is relative to the current directory.
    Run {
        /// Name of the run's folder; when empty, the name of the config file without `.toml`.
        name: String = String::new();
        /// Where the folders of runs are.
        folder: PathBuf = "runs".into();
    }
}

config_section! {
    /// The model, given in one of three ways: `config`, the keys from `architecture` on, or `init_from`.
    Model {
        /// Path of a Hugging Face `config.json` that describes the model.
        config: Option<PathBuf> = None;
        /// Hugging Face directory whose `model.safetensors` (one file, or shards with an index) holds the
        /// first weights; random weights without it. Its `config.json` counts where nothing else describes
        /// the model.
        init_from: Option<PathBuf> = None;
        /// Whether weights are loaded although they hold NaN or infinity, from `init_from` or from a checkpoint.
        allow_non_finite: bool = false;
        /// Family of the model; the keys below count only with it.
        architecture: Option<Architecture> = None;
        /// Number of tokens the model knows; 0 takes the tokenizer's.
        vocab_size: usize = 0, within 0..=1 << 24;
        /// Width of the residual stream.
        hidden_size: usize = 384, within 1..=1 << 20;
        /// Number of transformer blocks.
        num_layers: usize = 6, within 1..=1 << 12;
        /// Number of attention heads; divides `hidden_size`.
        num_heads: usize = 6, within 1..=1 << 12;
        /// Number of key-value heads (llama); divides `num_heads`; 0 makes it the same.
        num_kv_heads: usize = 0, within 0..=1 << 12;
        /// Width within the feed-forward layer; 0 takes 4 x `hidden_size` (gpt2), or 8/3 x `hidden_size`
        /// rounded up to a multiple of 256 (llama).
        intermediate_size: usize = 0, within 0..=1 << 22;
        /// Longest sequence the model can take; 0 takes `[training] seq_len`.
        max_position_embeddings: usize = 0, within 0..=1 << 24;
        /// Whether the head uses the weights of the embedding.
        tie_word_embeddings: bool = true;
        /// Added to the variance in normalisations.
        norm_eps: f64 = 1e-5, within above_up_to(0.0, 1.0);
        /// Base of the rotary frequencies (llama).
        rope_theta: f64 = 10_000.0, within above(0.0);
        /// Standard deviation of the first random weights.
        initializer_range: f64 = 0.02, within above(0.0);
    }
}

config_section! {
    /// The text and how it becomes tokens.
    Data {
        /// Files and folders of text, and JSON-lines; prepared into `folder` on first use.
        inputs: Vec<PathBuf> = Vec::new();
        /// Folder of prepared token files; when empty, `data` in the run's folder.
        folder: PathBuf = PathBuf::new();
        /// `bytes`, or the path of a Hugging Face `tokenizer.json`.
        tokenizer: Tokenizer = Tokenizer::Bytes;
        /// Vocabulary size of a byte-pair encoding to be trained on the inputs; 0 trains none.
        train_bpe: usize = 0, within 0..=1 << 24;
        /// Endings of the files to take from folders; an empty list takes every text file.
        extensions: Vec<String> = Vec::new();
        /// Key of the text in JSON-lines files.
        field: String = "text".to_owned();
        /// Whether to `replace` bytes that are no UTF-8, or to `refuse` their file.
        invalid_utf8: InvalidUtf8 = InvalidUtf8::Replace;
        /// Share of the tokens that is kept for validation.
        validation_fraction: f64 = 0.05, within 0.0..=0.5;
    }
}

config_section! {
    /// The training itself.
    Training {
        /// Sequences in one microbatch of one worker.
        local_batch_size: usize = 8, within 1..=1 << 20;
        /// Sequences in one step of all workers; a multiple of `local_batch_size` x workers, the rest is
        /// gradient accumulation. 0 takes just that product.
        global_batch_size: usize = 0, within 0..;
        /// Tokens in a sequence.
        seq_len: usize = 256, within 1..=1 << 24;
        /// Optimizer steps.
        steps: u64 = 1000, within 1..;
        /// Seed of the weights and of the order of the data.
        seed: u64 = 0, within 0..;
        /// What activations are kept in and products are made of. Weights, their gradients and the optimizer stay f32.
        dtype: TrainingDtype = TrainingDtype::F32;
        /// Emulates 8-bit floats to study convergence: what the blocks' linear layers multiply is rounded as fp8 would
        /// round it, `e4m3` all of it, `hybrid` gradients to E5M2 (the recipes of NVIDIA's Transformer Engine). Nothing
        /// becomes faster. Values beyond the format's range become its largest, infinities among them. Needs `dtype = "bf16"`.
        fp8: Fp8 = Fp8::Off;
        /// Steps whose largest magnitudes give the scale of a tensor (`amax_history_len` of Transformer Engine). Counts
        /// only with `fp8`.
        fp8_amax_history_len: usize = 16, within 1..=FP8_AMAX_HISTORY_LEN_MAX;
        /// Scales leave room for values 2^fp8_margin times larger than those of earlier steps (`margin` of Transformer
        /// Engine). Counts only with `fp8`.
        fp8_margin: u32 = 0, within 0..=16;
        /// What gradients are rounded to before they are summed over the workers: `bf16` and `f16` halve the bytes of
        /// messages, and give the same bits for the same number of workers only. `f16` needs `dtype = "f16"`.
        reduce_dtype: TrainingDtype = TrainingDtype::F32;
        /// Factor of the loss that keeps small gradients above zero in f16 (`--loss-scale` of Megatron-LM, `loss_scale`
        /// of DeepSpeed). 0 finds it: where gradients overflow it halves and the step is skipped, which uses up its
        /// data and its place in the schedule, and changes no weight. A power of two up to 2^24 stays, and an
        /// overflow ends the run. Counts only with `dtype = "f16"`.
        loss_scale: u32 = 0, within 0..=LOSS_SCALE_MAX;
        /// Where `loss_scale = 0` begins, a power of two (Megatron-LM's `--initial-loss-scale`, `init_scale` of
        /// PyTorch's GradScaler).
        loss_scale_initial: u32 = 1 << 16, within 1..=LOSS_SCALE_MAX;
        /// Steps without an overflow after which `loss_scale = 0` doubles it (Megatron-LM's `--loss-scale-window`,
        /// `growth_interval` of PyTorch's GradScaler).
        loss_scale_growth_interval: u64 = 2000, within 1..;
        /// Threads of each worker; 0 shares the cores of the host among its workers.
        threads: usize = 0, within 0..=Device::THREADS_MAX;
        /// `layout` gives the same bits for any number of workers and threads, at the same local and
        /// global_batch_size (workers, and microbatches of each, in powers of two); `run` gives them for this
        /// layout only, a little faster.
        determinism: Determinism = Determinism::Layout;
        /// Largest global norm of the gradients, to which larger ones are scaled; 0 leaves them as they are, which one_bit_adam
        /// and zero_one_adam need. In a pipeline that does not drain between steps each worker goes by the norm of its own units.
        max_norm: f64 = 1.0, within 0.0..;
        /// Steps from one validation to the next; 0 validates only at the end.
        validation_interval: u64 = 0, within 0..;
        /// Sequences in one validation; 0 takes all there are.
        validation_windows: usize = 64, within 0..;
    }
}

config_section! {
    /// The optimizer (docs/optimizers.md). Keys that name optimizers count only with them.
    Optimizer {
        /// `adamw`, `adam`, `sgd`, `lion`, `adafactor`, `lamb`, `lars`, `muon`, `one_bit_adam` or `zero_one_adam`.
        name: OptimizerName = OptimizerName::AdamW;
        /// Largest learning rate.
        lr: f64 = 3e-4, within 0.0..;
        /// Decay of the mean of gradients (those of Adam's kind, muon's other parameters); the gradient's share in the update
        /// is what it leaves (lion).
        beta1: f64 = 0.9, within 0.0..1.0;
        /// Decay of the mean of squared gradients (those of Adam's kind, muon's other parameters), or of the mean of gradients
        /// (lion).
        beta2: f64 = 0.95, within 0.0..1.0;
        /// Share of the mean of gradients in the update; the gradient itself has the rest (adamw, adam; QHAdam). Where gradients
        /// are of old weights, as in pipelines that do not drain, 0.78 is better than 1.
        nu: f64 = 1.0, within 0.0..=1.0;
        /// Added to the denominator of the update (those of Adam's kind, muon's other parameters).
        eps: f64 = 1e-8, within above(0.0);
        /// Weight decay: added to the gradient in adam, sgd and lars, decoupled from it in the others.
        weight_decay: f64 = 0.1, within 0.0..;
        /// Whether norms and biases decay as well.
        decay_norms_and_biases: bool = false;
        /// Decay of the velocity (sgd, lars).
        momentum: f64 = 0.9, within 0.0..1.0;
        /// Whether to take Nesterov's step (sgd).
        nesterov: bool = false;
        /// The new square has the share step^beta2_decay in the second moment (adafactor).
        beta2_decay: f64 = -0.8, within -1.0..0.0;
        /// Largest root mean square of an update, to which larger ones are scaled (adafactor).
        clip_threshold: f64 = 1.0, within above(0.0);
        /// Whether learning rates are parts of the parameter's root mean square, and no larger than 1 / sqrt(step)
        /// (adafactor).
        relative_step: bool = true;
        /// Length of an update as a part of the parameter's, before the learning rate (lars).
        trust_coefficient: f64 = 1e-3, within above(0.0);
        /// Decay of the mean of gradients of hidden matrices (muon); the step is Nesterov's.
        muon_momentum: f64 = 0.95, within 0.0..1.0;
        /// Rounds of the Newton-Schulz iteration (muon).
        muon_iterations: usize = 5, within 1..=20;
        /// How updates of matrices are scaled (muon): `original`, by sqrt(max(1, rows / cols)), or `match_rms_adamw`, by
        /// 0.2 sqrt(max(rows, cols)), for which learning rates of AdamW fit.
        muon_scale: MuonScale = MuonScale::MatchRmsAdamw;
        /// AdamW's learning rate for all but hidden matrices, as a part of `lr` (muon).
        muon_adamw_lr_scale: f64 = 1.0, within 0.0..;
        /// Steps after which the second moment stands still (one_bit_adam; `freeze_step` of DeepSpeed, too); 0 takes a fifth
        /// of the run.
        freeze_step: u64 = 0, within 0..;
        /// Updates of the second moment after which the interval between them doubles (zero_one_adam; `var_update_scaler` of
        /// DeepSpeed, too).
        var_update_scaler: u64 = 16, within 1..=1 << 32;
        /// What the optimizer's state is kept in: `f32`, `bf16` (half the bytes), or `int8` (a quarter; small units keep f32).
        /// Checkpoints hold f32, so that any goes on from any.
        state_dtype: StateDtype = StateDtype::F32;
        lists {
            /// Parameters with settings of their own.
            groups: OptimizerGroup;
        }
    }
}

config_section! {
    /// Parameters with settings of their own; the first group whose `match` fits a parameter counts for it.
    OptimizerGroup {
        /// Names of parameters, in which `*` stands for any text and `?` for any character, such as "*.bias".
        pattern as "match": String = String::new();
        /// Factor of the learning rate.
        lr_scale: f64 = 1.0, within 0.0..;
        /// Weight decay, 0 or more, instead of that of the optimizer.
        weight_decay: Option<f64> = None;
        /// From 0 to below 1, instead of that of the optimizer; where it has a momentum, instead of that.
        beta1: Option<f64> = None;
        /// From 0 to below 1, instead of that of the optimizer.
        beta2: Option<f64> = None;
    }
}

config_section! {
    /// The learning rate over the steps.
    LrScheduler {
        /// Steps in which the learning rate rises from 0 to `lr`.
        warmup_steps: u64 = 0, within 0..;
        /// How the learning rate falls: `cosine`, `linear`, `wsd` (warm-up, stable, decay) or `constant`.
        decay: Decay = Decay::Cosine;
        /// Steps of the fall. 0 takes all after the warm-up for `cosine` and `linear`, and the last fifth
        /// of the run for `wsd`.
        decay_steps: u64 = 0, within 0..;
        /// Where the fall ends, as a part of `lr`.
        min_lr_factor: f64 = 0.1, within 0.0..=1.0;
    }
}

config_section! {
    /// Checkpoints, in `checkpoints/step-N` of the run's folder.
    Checkpoint {
        /// Whether to write any. The last step always writes one.
        enable: bool = true;
        /// Steps from one checkpoint to the next.
        interval: u64 = 500, within 1..;
        /// How many of the newest stay; 0 keeps all.
        keep_latest_k: usize = 10, within 0..=1 << 20;
        /// `auto` goes on from the newest complete checkpoint of the run, `never` starts anew, and a path
        /// goes on from that checkpoint.
        resume: Resume = Resume::Auto;
    }
}

config_section! {
    /// Messages between workers.
    Comm {
        /// `shm` (shared memory, one host), `tcp`, `mpi` (in a program built with it, started by mpirun or srun), or
        /// `auto`: `shm` within hosts and `tcp` between them.
        transport: Transport = Transport::Auto;
        /// How collective operations are done wherever it fits, such as `ring`, `halving_doubling`, `direct` or
        /// `hierarchical:all:direct:ring` (docs/collectives.md). Without it, the quickest way by the costs of the links,
        /// which are measured at the start; `trireme doctor` shows it.
        algorithm: Option<Algorithm> = None;
        /// What a message between two workers of a host costs without any data. Algorithms are chosen by it; 0 measures it
        /// at the start, or takes a typical cost with `determinism = "run"`.
        within_hosts_latency_microseconds: f64 = 0.0, within 0.0..=1e6;
        /// What such messages carry; it belongs to the latency.
        within_hosts_gigabytes_per_second: f64 = 0.0, within 0.0..=1e6;
        /// The same of messages between workers of different hosts.
        across_hosts_latency_microseconds: f64 = 0.0, within 0.0..=1e6;
        /// What all workers of a host together send to other hosts.
        across_hosts_gigabytes_per_second: f64 = 0.0, within 0.0..=1e6;
        /// How long all workers of a host take to learn that each of them has come, by shared memory.
        shared_memory_latency_microseconds: f64 = 0.0, within 0.0..=1e6;
        /// What a worker reads and writes in the others' memory while all do.
        shared_memory_gigabytes_per_second: f64 = 0.0, within 0.0..=1e6;
        /// Seconds after which a worker that waits for another one gives up and says for whom.
        timeout_seconds: f64 = 300.0, within above_up_to(0.0, 86_400.0);
        /// File with the secret that all workers share; nobody but its owner may read it. The environment
        /// variable TRIREME_SECRET counts before it. Workers that the command starts on this host need neither.
        secret_file: Option<PathBuf> = None;
        /// Whether workers need a secret to listen where other hosts can connect. Without one, anybody on that
        /// network may join.
        require_secret: bool = true;
        /// Network interface, by name (`eth0`) or address, on which each worker listens for the others; by default
        /// the one by which it reaches rank 0.
        interface: Option<String> = None;
        /// TCP connections to each peer, over which data goes in turns. More than one pays on networks that bind what one
        /// connection may carry: several paths, long ways, clouds.
        sockets_per_peer: usize = 1, within 1..=GroupOptions::SOCKETS_PER_PEER_MAX;
        /// Whether long messages go by TCP without a copy, where the kernel has that (`MSG_ZEROCOPY`) and it saves one. With
        /// several sockets to a peer they are always copied.
        zero_copy: bool = true;
        /// Whether each message carries a checksum (CRC-32C), and one that differs ends the run. What workers of a host read
        /// in each other's memory has none.
        checksums: bool = false;
        /// PEM file with this worker's certificate: with it, data between hosts is encrypted by TLS, and every worker shows
        /// a certificate. Needs a build with `--features tls`.
        tls_certificate: Option<PathBuf> = None;
        /// PEM file with the certificate's private key; nobody but its owner may read it.
        tls_key: Option<PathBuf> = None;
        /// PEM file with the certificates of the authorities that have signed those of the workers.
        tls_ca: Option<PathBuf> = None;
        /// DNS name that every worker's certificate is for.
        tls_name: String = "trireme".to_owned();
        /// Short gradients travel together, up to this many bytes at a time, where workers do not all share memory (tensor
        /// fusion): one of more than half of it travels alone, and with 0 each does. None waits longer than until the end
        /// of backward.
        fusion_bytes: usize = ExecutorOptions::FUSION_BYTES, within 0..=1 << 30;
        /// How gradients are compressed before they are summed over the workers, which is for slow networks: `none`;
        /// rounded to `f16`, `bf16`, `fp8_e4m3` or `fp8_e5m2`; rounded at random to `int8` or `int4` (QSGD); `one_bit`, signs
        /// with two scales; `top_k`, the largest elements (deep gradient compression); `random_k`, random elements;
        /// `powersgd`, matrices of low rank. docs/compression.md says what each sends and when to use it. Needs
        /// `determinism = "run"`. One worker compresses nothing.
        compression: CodecName = CodecName::None;
        /// `powersgd`: columns of the two thin matrices whose product a gradient becomes.
        compression_rank: usize = 4, within 1..=1024;
        /// `top_k`, `random_k`: part of the elements that a step sends.
        compression_ratio: f64 = 0.01, within above_up_to(0.0, 1.0);
        /// `int8`, `int4`, `one_bit`: elements that share a scale, a multiple of 64; 0 takes 256, or 1024 with `one_bit`.
        compression_block_len: usize = 0, within 0..=1 << 20;
        /// `top_k`: momentum that is accumulated before the largest elements are chosen (momentum correction of deep
        /// gradient compression). It takes the place of the optimizer's: use `sgd` with `momentum = 0`.
        compression_momentum: f64 = 0.0, within 0.0..1.0;
        /// First steps with this compression, which are compressed less: `top_k` and `random_k` begin with a ratio of 25 %,
        /// divided by four in equal intervals; all others send them as they are, or by `compression_warmup_codec`.
        compression_warmup_steps: u64 = 0, within 0..;
        /// `int4`, `one_bit`, `powersgd`: what compresses the first steps: `none`, `bf16`, `int8` or `int4`.
        compression_warmup_codec: CodecName = CodecName::None;
        /// Whether what a step does not send is kept and added to the next one's gradient: 4 bytes a parameter. By
        /// default all do but `f16`, `bf16`, `int8` and `int4`.
        compression_error_feedback: Option<bool> = None;
        /// Whether each worker divides its gradient by the root of its own mean of squares, over some 200 steps, before the
        /// gradient is compressed, so that elements of all sizes count alike in messages, as they do for AdamW: 4 bytes
        /// a parameter. `grad_norm` has no unit then, and `max_norm` means little.
        compression_normalize: bool = false;
    }
}

config_section! {
    /// What is recorded of a run.
    Metrics {
        /// Steps from one log line to the next.
        log_interval: u64 = 10, within 1..;
        /// Whether to write `metrics.jsonl`, one JSON object a step.
        jsonl: bool = true;
        /// Whether to write event files for TensorBoard.
        tensorboard: bool = true;
        /// Steps from one to the next whose timeline is written to `trace.json`: when each worker did what, for `trireme report
        /// trace`, chrome://tracing and Perfetto. The file holds the last few of them. 0 writes none.
        trace_interval: u64 = 0, within 0..;
    }
}

config_section! {
    /// The workers that the command starts on this host. Nothing here counts where torchrun, SLURM or MPI
    /// has started the workers.
    Launch {
        /// How many workers.
        workers: usize = 1, within 1..=4096;
        /// TCP port at which the workers meet; 0 takes a free one.
        master_port: u16 = 0;
    }
}

config_section! {
    /// The sample that is printed at the end of a run.
    Generate {
        /// Text to go on from.
        prompt: String = "\n".to_owned();
        /// Number of tokens to add; 0 prints no sample.
        num_tokens: usize = 256, within 0..=1 << 20;
        /// Divides the logits; 0 always takes the likeliest token.
        temperature: f64 = 0.8, within 0.0..;
        /// Chooses among this many of the likeliest tokens; 0 among all.
        top_k: usize = 0, within 0..=1 << 24;
        /// Chooses among the fewest tokens that together have this probability.
        top_p: f64 = 1.0, within above_up_to(0.0, 1.0);
        /// Seed of the choice.
        seed: u64 = 0, within 0..;
    }
}
