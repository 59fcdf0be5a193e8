//! Every key of the config with its name, type, default, limits and documentation, each defined once. The reader, the validator,
//! `trireme config --explain` and the written config are derived from these lists.

use super::choice::{
    Architecture, Bind, Change, DeviceName, Fp8, LogFormat, NcclUse, Packing, Resume, Tokenizer,
};
use super::layout::{ActivationCheckpoint, Memory, Offload, Parallelism};
use super::section::{Attribute, Key, Section, config_section, config_sections};
use super::value::{Interval, above, above_up_to};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;
use trireme_codec::CodecName;
use trireme_comm::{GroupOptions, TransportChoice};
use trireme_data::InvalidUtf8;
use trireme_optim::{Decay, LossScaling, OptimizerName, OptimizerSettings, StateDType};
use trireme_parallel::{Determinism, ExecutorOptions};
use trireme_schedule::collective::Algorithm;
use trireme_tensor::{Device, Precision};

const LOSS_SCALE_MAX: u32 = LossScaling::SCALE_MAX;

/// Keys of `[training]` that have an effect only with `dtype = "f16"`.
pub(super) const LOSS_SCALE_KEYS: [&str; 3] =
    ["loss_scale", "loss_scale_initial", "loss_scale_growth_interval"];

/// Keys of `[training]` that have an effect only with `fp8`.
pub(super) const FP8_KEYS: [&str; 2] = ["fp8_amax_history_len", "fp8_margin"];

/// The maximum length of an amax history, which has a few numbers per layer and step.
pub(crate) const FP8_AMAX_HISTORY_LEN_MAX: usize = 4096;

/// Returns whether the key `section.key`, or its whole section, has `attribute`. For a key that this version does not know, only the
/// section counts.
pub(super) fn has_attribute(name: &str, attribute: Attribute) -> bool {
    let sections = Sections::default();
    let section = name.split_once('.').and_then(|(section, key)| Some((sections.get(section)?, key)));
    section.is_some_and(|(section, key)| {
        let has_it = |own: &Key| own.name == key && own.attributes.contains(&attribute);
        section.attributes().contains(&attribute) || section.keys().iter().any(has_it)
    })
}

config_sections! {
    run: Run,
    model: Model,
    experts: Experts,
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
    /// The name and location of the run. All paths in the config are relative to the current directory.
    @no_effect_on_training Run {
        /// Name of the run's folder. When empty, the name of the config file without `.toml`.
        name: String = String::new();
        /// Folder that contains the folders of runs.
        folder: PathBuf = "runs".into();
    }
}

config_section! {
    /// The model, described in one of three ways: by `config`, by the keys from `architecture` on, or by `init_from`.
    Model {
        /// Path of a Hugging Face `config.json` that describes the model.
        @per_rank
        config: Option<PathBuf> = None;
        /// A Hugging Face directory, a run, a checkpoint, or the name of a model in the local Hugging Face cache, such as `gpt2`. Provides
        /// the initial weights; without it, weights are random. Its `config.json` describes the model unless another key does.
        init_from: Option<PathBuf> = None;
        /// Loads weights even if they contain NaN or infinity, from `init_from` or from a checkpoint.
        allow_non_finite: bool = false;
        /// Accepts text tokenized differently from the model in `init_from`, whose weights have not learned those tokens.
        allow_other_tokenizer: bool = false;
        /// Dropout probability of the embedding and of the output of each attention and feed-forward layer, except experts. Rates in a
        /// `config.json` are ignored.
        dropout: f64 = 0.0, within 0.0..1.0;
        /// Model family. Required for the keys below.
        architecture: Option<Architecture> = None;
        /// Vocabulary size; 0 uses the tokenizer's.
        vocab_size: usize = 0, within 0..=1 << 24;
        /// Width of the residual stream.
        hidden_size: usize = 384, within 1..=1 << 20;
        /// Number of transformer blocks.
        num_layers: usize = 6, within 1..=1 << 12;
        /// Number of attention heads; must divide `hidden_size`.
        num_heads: usize = 6, within 1..=1 << 12;
        /// Number of key-value heads (llama); must divide `num_heads`. 0 uses `num_heads`.
        num_kv_heads: usize = 0, within 0..=1 << 12;
        /// Hidden width of the feed-forward layer. 0 uses 4 x `hidden_size` (gpt2), or 8/3 x `hidden_size` rounded up
        /// to a multiple of 256 (llama).
        intermediate_size: usize = 0, within 0..=1 << 22;
        /// Longest sequence that the model supports; 0 uses `[training] seq_len`.
        max_position_embeddings: usize = 0, within 0..=1 << 24;
        /// Whether the head shares the weights of the embedding.
        tie_word_embeddings: bool = true;
        /// Epsilon added to the variance in normalization layers.
        norm_eps: f64 = 1e-5, within above_up_to(0.0, 1.0);
        /// Base of the rotary frequencies (llama).
        rope_theta: f64 = 10_000.0, within above(0.0);
        /// Standard deviation of the random initial weights.
        initializer_range: f64 = 0.02, within above(0.0);
    }
}

config_section! {
    /// Training of models with a mixture of experts.
    Experts {
        /// Weight of the loss that keeps loads of experts even (Switch Transformer's alpha, Megatron-LM's `--moe-aux-loss-coeff`). With
        /// equal loads the loss of a layer is 1. Replaces `router_aux_loss_coef`, or deepseek_v3's `aux_loss_alpha`, of the model. 0 turns
        /// it off.
        balance_loss: Option<f64> = None;
        /// Weight of the loss that keeps the logits of routers small (ST-MoE; Megatron-LM's `--moe-z-loss-coeff`). Replaces
        /// `router_z_loss_coef` of the model. 0 turns it off.
        z_loss: Option<f64> = None;
        /// How far each update moves the biases that balance experts, in models that have such biases (deepseek_v3; Megatron-LM's
        /// `--moe-router-bias-update-rate`). 0 leaves them as they are.
        bias_update_rate: f64 = 1e-3, within 0.0..=1.0;
        /// Maximum number of tokens of a sample that an expert processes, as a multiple of an even load (Megatron-LM's
        /// `--moe-expert-capacity-factor`). The first tokens of the sample are processed, and later ones skip the expert: the metric
        /// expert_drops is their fraction. Bounds the memory of experts, however uneven loads are. When absent, experts process all tokens.
        capacity_factor: Option<f64> = None;
        /// Whether activations that do not fit into `[memory] device_budget`, because loads are more uneven than was planned for, go to
        /// files in `[offload] folder`. Otherwise the run ends. Memory is planned for even loads; a capacity_factor bounds it.
        spill: bool = true;
        /// Number of chunks in which tokens travel to experts on other workers: one travels while another one is computed
        /// (docs/experts.md). At most as many as a worker has experts. 2 is faster between hosts. Within a host it is slower, since the
        /// cores that compute also copy, and products get smaller. Results stay bit-identical, unless products are in fp8.
        num_chunks: usize = 1, within 1..=1 << 10;
        /// Number of experts of each layer that all workers with different experts replicate (FasterMoE's shadow experts): the experts that
        /// received the most tokens before. Tokens do not travel to them; their weights and gradients do, in each microbatch. This pays off
        /// where a few experts have most of the load (docs/experts.md). Results stay bit-identical.
        num_shadowed: usize = 0, within 0..=1 << 10;
    }
}

config_section! {
    /// The text, and how it becomes tokens.
    Data {
        /// Text files, folders of text, and JSON Lines files or JSON arrays, also compressed (`.gz`, `.zst`). They are prepared into
        /// `folder` on first use. A record has a text in `field`, or `messages`, or a `prompt` and its `completion`, or the fields of
        /// ShareGPT or Alpaca. For conversations and completions, only the answers contribute to the loss.
        @no_effect_on_training
        inputs: Vec<PathBuf> = Vec::new();
        /// Sampling weight of each input, such as [3, 1]. When empty, inputs are sampled in proportion to their tokens.
        weights: Vec<f64> = Vec::new();
        /// Inputs to validate on, instead of `validation_fraction`.
        validation_inputs: Vec<PathBuf> = Vec::new();
        /// Folder of prepared token files. When empty, `data` in the run's folder.
        @no_effect_on_training @per_rank
        folder: PathBuf = PathBuf::new();
        /// `auto`, `bytes`, or the path of a Hugging Face `tokenizer.json`. `auto` uses the tokenizer of the model in `init_from`, or
        /// `bytes` without one.
        tokenizer: Tokenizer = Tokenizer::Auto;
        /// Vocabulary size of a byte-pair encoding to train on the inputs; 0 trains none.
        train_bpe: usize = 0, within 0..=1 << 24;
        /// File extensions to read from folders; an empty list reads every text file.
        extensions: Vec<String> = Vec::new();
        /// Field that contains the text in JSON Lines files.
        field: String = "text".to_owned();
        /// Jinja template that formats `messages` as text: a file, or `chatml`. Defaults to the template of the model in `init_from`, or
        /// the one next to the `tokenizer` file.
        chat_template: Option<PathBuf> = None;
        /// Whether the names of special tokens in `messages` become those tokens. Otherwise they are text, because a user may have typed
        /// them.
        special_tokens_in_messages: bool = false;
        /// Treatment of bytes that are not valid UTF-8: `replace` them, or `refuse` the file.
        invalid_utf8: InvalidUtf8 = InvalidUtf8::Replace;
        /// How documents become sequences. `stream` cuts them wherever a sequence ends. `documents` packs whole documents, each attending
        /// only to itself, and pads the rest. `auto` is `documents` if only answers contribute to the loss, else `stream`.
        packing: Packing = Packing::Auto;
        /// Masks attention to earlier documents in the same sequence.
        mask_documents: bool = false;
        /// Fraction of the tokens held out for validation: whole documents, or the tail of the last document if documents are longer than
        /// the held-out part; only without `validation_inputs`.
        validation_fraction: f64 = 0.05, within 0.0..=0.5;
    }
}

config_section! {
    /// The training itself.
    Training {
        /// Samples in one microbatch of one worker. A sample of a language model is a sequence of tokens.
        local_batch_size: usize = 8, within 1..=1 << 20;
        /// Samples in one step of all workers. Must be a multiple of `local_batch_size` x workers; the remaining
        /// factor is gradient accumulation. 0 uses exactly that product.
        global_batch_size: usize = 0, within 0..;
        /// Tokens per sequence.
        seq_len: usize = 256, within 1..=1 << 24;
        /// Number of optimizer steps. 0 trains none: the run only validates and writes a checkpoint.
        steps: u64 = 1000, within 0..;
        /// Passes over the samples, instead of `steps`; 0 uses `steps`. Setting either on the command line overrides the other. The number
        /// of steps is rounded up, with an asynchronous pipeline to a multiple of `pipeline_parallel_drain_interval`.
        epochs: f64 = 0.0, within 0.0..=1e6;
        /// Seed of the initial weights and of the data order.
        seed: u64 = 0, within 0..;
        /// Data type of activations and matrix multiplications. Weights are stored in f32 (in bf16 with `[memory]
        /// bf16_parameters`), their gradients in f32, and the optimizer's state in `[optimizer] state_dtype`.
        dtype: Precision = Precision::F32;
        /// Rounds the inputs of matrix multiplications in the blocks' linear layers to 8-bit floats: `e4m3` rounds all of them to
        /// E4M3, `hybrid` uses E5M2 for gradients (the recipes of NVIDIA's Transformer Engine). GPUs of compute capability 8.9 or
        /// later multiply the 8-bit floats if the tokens of a microbatch and the inputs and outputs of the layer on each rank are
        /// multiples of 16. Otherwise, and in the layers of experts, the rounded values are multiplied in bf16, which serves to study
        /// convergence and is not faster. Values beyond the range of the format, including infinities, become its largest value.
        /// Requires `dtype = "bf16"`.
        fp8: Fp8 = Fp8::Off;
        /// Number of past steps whose largest magnitudes determine the scale of a tensor (`amax_history_len` of
        /// Transformer Engine). Only applies with `fp8`.
        fp8_amax_history_len: usize = 16, within 1..=FP8_AMAX_HISTORY_LEN_MAX;
        /// Scales leave room for values 2^fp8_margin times larger than the values of earlier steps (`margin` of
        /// Transformer Engine). Only applies with `fp8`.
        fp8_margin: u32 = 0, within 0..=16;
        /// Data type to which gradients are rounded before they are summed over the workers. `bf16` and `f16` halve the message
        /// bytes, but bits are then reproducible only for the same number of workers. `f16` requires `dtype = "f16"`.
        reduce_dtype: Precision = Precision::F32;
        /// Factor of the loss that keeps small gradients above zero in f16 (`--loss-scale` of Megatron-LM,
        /// `loss_scale` of DeepSpeed). 0 adapts it: when gradients overflow, the scale halves and the step is
        /// skipped, which uses up its data and its place in the schedule but changes no weights. A power of two up to
        /// 2^24 is fixed, and an overflow ends the run. Only applies with `dtype = "f16"`.
        loss_scale: u32 = 0, within 0..=LOSS_SCALE_MAX;
        /// Initial scale for `loss_scale = 0`, a power of two (Megatron-LM's `--initial-loss-scale`, `init_scale` of
        /// PyTorch's GradScaler).
        loss_scale_initial: u32 = 1 << 16, within 1..=LOSS_SCALE_MAX;
        /// Number of steps without an overflow after which `loss_scale = 0` doubles the scale (Megatron-LM's
        /// `--loss-scale-window`, `growth_interval` of PyTorch's GradScaler).
        loss_scale_growth_interval: u64 = 2000, within 1..;
        /// Hardware that workers compute on. `cuda` is an NVIDIA GPU for each worker, of compute capability 8.0 or later; `trireme doctor`
        /// lists the GPUs and the libraries that it needs. The worker of local rank `i` uses GPU `i` of those that `CUDA_VISIBLE_DEVICES`
        /// shows; if it shows one, all workers of the host share it. `auto` is `cuda` if there is such a GPU, else `cpu`. `detached` is a
        /// CPU that behaves like an accelerator: kernels run later than they are called, in an order that `seed` changes, and the host
        /// cannot read the device's memory. It has the bits of `cpu`, is slower, and shows whether a model of your own would run on an
        /// accelerator.
        device: DeviceName = DeviceName::Cpu;
        /// Rounds the factors of f32 matrix products to TF32 on GPUs, which has 10 bits of fraction: less exact, and several times as fast
        /// (PyTorch's `allow_tf32`). Attention and experts stay in f32. Only applies with `device = "cuda"` and
        /// `dtype = "f32"`.
        allow_tf32: bool = false;
        /// Measures which of cuBLASLt's algorithms is the fastest when a GPU first multiplies matrices of a shape, and keeps the choice in
        /// the cache folder (`$XDG_CACHE_HOME/trireme/cuda`, or `~/.cache`). Hosts of one run must then share this folder, so that copies
        /// of a product have the same bits. Otherwise, the library chooses without measuring. Only applies with `device = "cuda"`.
        time_matmuls: bool = false;
        /// Launches kernels that repeat in each step together, by CUDA graphs. `false` launches each kernel on its own, to find out whether
        /// a failure depends on it. Results do not. Only applies with `device = "cuda"`.
        @no_effect_on_training
        cuda_graphs: bool = true;
        /// Threads per worker; 0 uses the worker's share of the cores: the cores that it has to itself, and an equal part of the cores that
        /// several workers share, within the CPU quota of its control group.
        @no_effect_on_training @per_rank
        threads: usize = 0, within 0..=Device::THREADS_MAX;
        /// `layout` gives the same bits for any number of workers and threads, as long as the local and global batch
        /// sizes stay the same (and workers, and microbatches of each, are powers of two). `run` gives the same bits
        /// for this layout only, and is a little faster.
        determinism: Determinism = Determinism::Layout;
        /// Maximum global norm of the gradients; larger gradients are scaled down to it. 0 disables clipping, which
        /// one_bit_adam and zero_one_adam require. A pipeline that does not drain between steps clips by the norm of
        /// an earlier step (docs/pipeline.md).
        max_norm: f64 = 1.0, within 0.0..;
        /// Clips by the gradient norm of the previous step, which `[memory] free_gradients` requires of a run that clips. The
        /// first step of a run is not clipped. Only applies with `[memory] free_gradients`.
        clip_by_previous_norm: bool = false;
        /// Steps between validations, the first before step 1; 0 validates only at the end.
        validation_interval: u64 = 0, within 0..;
        /// Time limit of the run, counted from the start of the command. The run saves a checkpoint and ends before it, as estimated from
        /// the times of its steps, validations and checkpoints so far. The exit code is then 138, and the same command resumes. The end of
        /// a Slurm job (SLURM_JOB_END_TIME) is a time limit as well, if checkpoints are enabled.
        @no_effect_on_training
        time_limit: Option<Duration> = None;
        /// Stops the run after this many validations in a row without a new lowest loss; 0 disables it.
        early_stopping_patience: u64 = 0, within 0..;
        /// Number of samples in one validation; 0 uses all.
        validation_samples: usize = 64, within 0..;
    }
}

config_section! {
    /// The optimizer (docs/optimizers.md). A key that names optimizers in parentheses only applies to them.
    Optimizer {
        /// The optimizer (docs/optimizers.md).
        name: OptimizerName = OptimizerName::AdamW;
        /// Peak learning rate.
        lr: f64 = 3e-4, within 0.0..;
        /// Weight decay: added to the gradient in adam, sgd and lars, decoupled in the others.
        weight_decay: f64 = 0.1, within 0.0..;
        /// Whether weight decay applies to norms and biases as well.
        decay_norms_and_biases: bool = false;
        /// Data type of the optimizer state: `f32`, `bf16` (half the bytes), or `int8` (a quarter; small units keep
        /// f32). Checkpoints store f32, so a run can resume with any of them.
        state_dtype: StateDType = StateDType::F32;
        embeds {
            /// The settings of the optimizer.
            settings: OptimizerSettings;
        }
        lists {
            /// Parameters with settings of their own.
            groups: OptimizerGroup;
        }
    }
}

config_section! {
    /// Settings for some of the parameters. Each parameter belongs to the first group whose `match` fits it.
    OptimizerGroup {
        /// Pattern of parameter names, such as "*.bias": `*` matches any text and `?` any character.
        pattern as "match": String = String::new();
        /// Freezes these parameters: they are not updated, have no optimizer state, and their gradients do not count in `max_norm`.
        /// Gradients are still computed.
        frozen: bool = false;
        /// Factor of the learning rate.
        lr_scale: f64 = 1.0, within 0.0..;
        /// Weight decay of these parameters, 0 or more. Replaces the optimizer's.
        weight_decay: Option<f64> = None;
        /// From 0 to below 1. Replaces the optimizer's beta1, or its momentum if it has one instead.
        beta1: Option<f64> = None;
        /// From 0 to below 1. Replaces the optimizer's beta2.
        beta2: Option<f64> = None;
    }
}

config_section! {
    /// The learning rate schedule.
    LrScheduler {
        /// Steps during which the learning rate rises from 0 to `lr`.
        warmup_steps: u64 = 0, within 0..;
        /// How the learning rate decays: `cosine`, `linear`, `wsd` (warm-up, stable, decay) or `constant`.
        decay: Decay = Decay::Cosine;
        /// Steps of the decay. 0 uses all steps after the warm-up for `cosine` and `linear`, and the last fifth of
        /// the run for `wsd`.
        decay_steps: u64 = 0, within 0..;
        /// Final learning rate, relative to `lr`.
        min_lr_factor: f64 = 0.1, within 0.0..=1.0;
    }
}

config_section! {
    /// Checkpoints, in `checkpoints/step-N` of the run's folder.
    @no_effect_on_training Checkpoint {
        /// Whether to write checkpoints. The last step always writes one.
        enable: bool = true;
        /// Steps between checkpoints, such as 500, or the time between them: "90s", "10m" or "1h".
        interval: Interval = Interval::Time(Duration::from_secs(600));
        /// How many of the newest checkpoints to keep; 0 keeps all.
        keep_latest_k: usize = 10, within 0..=1 << 20;
        /// Writes a checkpoint at each new lowest validation loss and keeps the best. `checkpoints/best` names it and can be given wherever
        /// a checkpoint is expected.
        keep_best: bool = true;
        /// `auto` resumes from the newest complete checkpoint of the run, and `never` starts a new run. The path of a
        /// checkpoint resumes from it, and the path of a run's folder from its newest checkpoint.
        resume: Resume = Resume::Auto;
        /// Parts that may have changed since the checkpoint that the run resumes from: `optimizer` (its state starts from zero), `model`
        /// (settings, as far as parameters have the same names and shapes) and `data` (samples, their order, or the tokenizer). Other
        /// changes are always allowed, and reported.
        allow_changed: Vec<Change> = Vec::new();
    }
}

config_section! {
    /// Communication between workers.
    Comm {
        /// `shm` (shared memory, one host), `tcp`, `mpi` (only in a build with MPI support, started by mpirun or
        /// srun), or `auto`: `shm` within hosts and `tcp` between them.
        transport: TransportChoice = TransportChoice::Auto;
        /// Whether GPUs exchange data by NCCL, directly between their memories. `auto` uses NCCL if all hosts have the same
        /// version and each worker has a GPU of its own; otherwise, data passes through host memory. `always` refuses a run
        /// that cannot use NCCL; `never` does not use it. With `determinism = "layout"`, sums keep their order. Only
        /// applies with `device = "cuda"`, and, with `tls_certificate`, to workers of one host.
        nccl: NcclUse = NcclUse::Auto;
        /// Algorithm for collective operations wherever it applies, such as `ring`, `halving_doubling`, `direct` or
        /// `hierarchical:all:direct:ring` (docs/collectives.md). Without it, the fastest algorithm is chosen by the
        /// costs of the links, which are measured at startup; `trireme doctor` shows the choices.
        algorithm: Option<Algorithm> = None;
        /// Latency of a message between two workers of a host. Algorithms are chosen by it. 0 measures it at startup;
        /// with `determinism = "run"`, 0 uses a typical cost.
        within_hosts_latency_microseconds: f64 = 0.0, within 0.0..=1e6;
        /// Bandwidth of such messages; set it together with the latency.
        within_hosts_gigabytes_per_second: f64 = 0.0, within 0.0..=1e6;
        /// Latency of a message between workers of different hosts.
        across_hosts_latency_microseconds: f64 = 0.0, within 0.0..=1e6;
        /// Bandwidth from all workers of a host to other hosts, in total.
        across_hosts_gigabytes_per_second: f64 = 0.0, within 0.0..=1e6;
        /// Time until all workers of a host know, through shared memory, that each of them has arrived.
        shared_memory_latency_microseconds: f64 = 0.0, within 0.0..=1e6;
        /// Bandwidth at which a worker reads and writes the memory of the others while all of them do.
        shared_memory_gigabytes_per_second: f64 = 0.0, within 0.0..=1e6;
        /// Seconds that workers wait for each other at the start: for a host name that is not known yet, a port that no worker listens on
        /// yet, and workers that are missing. Meanwhile they report what they are waiting for.
        @no_effect_on_training
        join_timeout_seconds: f64 = 600.0, within above_up_to(0.0, 86_400.0);
        /// Seconds of silence after which a worker that waits for another one gives up and reports which one. A worker that makes progress,
        /// such as rank 0 while it tokenizes or a worker that writes to a slow disk, signals this, and the others keep waiting for it.
        @no_effect_on_training
        timeout_seconds: f64 = 300.0, within above_up_to(0.0, 86_400.0);
        /// Seconds for which the network between hosts may stall. A host that is silent for longer counts as lost. The end of a process is
        /// noticed within a second, whatever this value is.
        @no_effect_on_training
        network_pause_seconds: f64 = 30.0, within 1.0..=3600.0;
        /// File with the secret that all workers share; only its owner may have access to it. The environment
        /// variable TRIREME_SECRET takes precedence. Workers that this command starts on one host need neither.
        @no_effect_on_training @per_rank
        secret_file: Option<PathBuf> = None;
        /// Whether workers need a secret to listen where other hosts can connect. Without one, anybody on that
        /// network may join.
        require_secret: bool = true;
        /// Address on which rank 0 listens, if it is not the address of MASTER_ADDR: `0.0.0.0` or `::` where workers reach rank 0 by the
        /// name of a service. Any address other than a loopback address requires a secret, unless `require_secret` is off.
        @no_effect_on_training
        listen: Option<IpAddr> = None;
        /// Network interface on which each worker listens for the others: its name (`eth0`) or the beginning of its name, one of its
        /// addresses, or a network (`10.0.0.0/8`). Several can be given, separated by commas; the first one that the host has is used.
        /// `=eth0` matches exactly that name, and `^docker,lo` any interface whose name begins otherwise. By default, the interface through
        /// which the worker reaches rank 0. The environment variable TRIREME_INTERFACE takes precedence; NCCL_SOCKET_IFNAME and
        /// GLOO_SOCKET_IFNAME apply if nothing else is set and workers are on several hosts.
        @no_effect_on_training @per_rank
        interface: Option<String> = None;
        /// Ports on which workers listen for each other, such as `30000-30063`, for firewalls that let only some ports through: at least as
        /// many ports as a host has workers. Ports below 32768 are best, because Linux uses higher ports for outgoing connections. By
        /// default, any port. MASTER_PORT, on which rank 0 listens, is set separately.
        @no_effect_on_training
        ports: Option<RangeInclusive<u16>> = None;
        /// TCP connections to each peer; data is striped over them. More than one pays off on networks that limit the
        /// throughput of a connection: several paths, long distances, clouds.
        sockets_per_peer: usize = 1, within 1..=GroupOptions::SOCKETS_PER_PEER_MAX;
        /// Whether long TCP messages are sent without copying, if the kernel supports it (`MSG_ZEROCOPY`) and it
        /// saves a copy. With several sockets per peer, messages are always copied.
        zero_copy: bool = true;
        /// Whether each message carries a checksum (CRC-32C); a mismatch ends the run. Data that workers of a host
        /// read from each other's memory has none.
        checksums: bool = false;
        /// PEM file with this worker's certificate. With it, data between hosts is encrypted with TLS, and every
        /// worker must present a certificate. Requires a build with `--features tls`.
        @no_effect_on_training @per_rank
        tls_certificate: Option<PathBuf> = None;
        /// PEM file with the certificate's private key; only its owner may have access to it.
        @no_effect_on_training @per_rank
        tls_key: Option<PathBuf> = None;
        /// PEM file with the certificates of the authorities that signed the workers' certificates.
        @no_effect_on_training @per_rank
        tls_ca: Option<PathBuf> = None;
        /// DNS name in every worker's certificate.
        tls_name: String = "trireme".to_owned();
        /// Batches short gradients into messages of at most this many bytes, if workers do not all share memory
        /// (tensor fusion). A gradient of more than half that size is sent alone; with 0, every gradient is. No
        /// gradient waits longer than until the end of backward.
        fusion_bytes: usize = ExecutorOptions::FUSION_BYTES, within 0..=1 << 30;
        /// Compression of gradients before they are summed over the workers, for slow networks: `none`; rounding to
        /// `f16`, `bf16`, `fp8_e4m3` or `fp8_e5m2`; stochastic rounding to `int8` or `int4` (QSGD); `one_bit`, signs
        /// with two scales; `top_k`, the largest elements (deep gradient compression); `random_k`, random elements;
        /// `powersgd`, low-rank matrices. docs/compression.md explains what each sends and when to use it. Requires
        /// `determinism = "run"`. A single worker compresses nothing.
        compression: CodecName = CodecName::None;
        /// `powersgd`: columns of the two thin matrices whose product approximates a gradient.
        compression_rank: usize = 4, within 1..=1024;
        /// `top_k`, `random_k`: fraction of the elements that each step sends.
        compression_ratio: f64 = 0.01, within above_up_to(0.0, 1.0);
        /// `int8`, `int4`, `one_bit`: number of elements that share a scale, a multiple of 64; 0 uses 256, or 1024
        /// with `one_bit`.
        compression_block_len: usize = 0, within 0..=1 << 20;
        /// `top_k`: momentum that is accumulated before the largest elements are chosen (momentum correction of deep
        /// gradient compression). It replaces the optimizer's momentum: use `sgd` with `momentum = 0`.
        compression_momentum: f64 = 0.0, within 0.0..1.0;
        /// Number of first steps that are compressed less. `top_k` and `random_k` begin with a ratio of 25 % and
        /// divide it by four in equal intervals; all others send gradients uncompressed, or use
        /// `compression_warmup_codec`.
        compression_warmup_steps: u64 = 0, within 0..;
        /// `int4`, `one_bit`, `powersgd`: compression of the first steps: `none`, `bf16`, `int8` or `int4`.
        compression_warmup_codec: CodecName = CodecName::None;
        /// Whether the part of a gradient that a step does not send is kept and added to the gradient of the next step (error feedback), at
        /// 4 bytes per parameter. By default, all codecs except `f16`, `bf16`, `int8` and `int4` do this.
        compression_error_feedback: Option<bool> = None;
        /// Whether each worker divides its gradient by the root of its own mean square, over about 200 steps, before
        /// compressing it, so that elements of all sizes count alike in messages, as they do for AdamW. Takes 4 bytes
        /// per parameter. `grad_norm` then has no unit, and `max_norm` means little.
        compression_normalize: bool = false;
    }
}

config_section! {
    /// The records of a run.
    @no_effect_on_training Metrics {
        /// Steps between log lines.
        log_interval: u64 = 10, within 1..;
        /// Format of lines on the console, on standard error and in logs: `text`, or `json`, one object a line. An object has `time`,
        /// `host`, `rank` once it is known, and `message` or a step's `record`.
        log_format: LogFormat = LogFormat::Text;
        /// Whether to write `metrics.jsonl`, with one JSON object per step.
        jsonl: bool = true;
        /// Whether to write event files for TensorBoard.
        tensorboard: bool = true;
        /// Steps between traced steps. A traced step's timeline is written to `trace.json`: when each worker did
        /// what, for `trireme report trace`, chrome://tracing and Perfetto. The file contains the last few traced
        /// steps. 0 writes none.
        trace_interval: u64 = 0, within 0..;
        /// Steps between steps whose results are hashed to `hashes.jsonl`: the loss, and each parameter with its reduced gradient, bit by
        /// bit. With these hashes, `trireme report diff` finds the first difference between two runs. Hashes do not depend on the layout.
        /// Hashing takes about as long as reading gradients and parameters with one thread. 0 hashes none, and changes nothing else.
        hash_interval: u64 = 0, within 0..;
        /// Peak of each worker's device in floating-point operations a second, in `[training] dtype`, such as 312e12. MFU is relative to
        /// this peak. 0 uses the peak of the device: on a CPU, it is measured once, and multiplied by the worker's share of the cores.
        peak_flops: f64 = 0.0, within 0.0..;
        /// TCP port on which rank 0 serves the last record at `/metrics`, in the Prometheus text format; 0 disables it.
        prometheus_port: u16 = 0;
        /// Address to listen on. The default is reachable only from this machine.
        prometheus_address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        /// Whether to predict the time of a step before the first one, and to report after ten steps how far it was off.
        /// Kernels and communication are measured in isolation for a second or more, as by `trireme plan --time`. Only for
        /// workers on one host.
        predict_step_time: bool = false;
    }
}

config_section! {
    /// The workers of a host. If torchrun, SLURM or MPI has started them, `workers` and `master_port` have no effect.
    @no_effect_on_training Launch {
        /// Number of workers that this command starts; 0 starts one for each device of the host. The CPU is one device, however many cores
        /// it has.
        @per_rank
        workers: usize = 0, within 0..=4096;
        /// TCP port where the workers meet; 0 uses a free one.
        @per_rank
        master_port: u16 = 0;
        /// How workers are bound to cores. Neighboring ranks get neighboring cores, close to their own memory. `trireme doctor --workers
        /// N` shows what `auto` would do for N workers on this host.
        @per_rank
        bind: Bind = Bind::Auto;
    }
}

config_section! {
    /// The sample that is printed at the end of a run.
    @no_effect_on_training Generate {
        /// Text to continue.
        prompt: String = "\n".to_owned();
        /// Number of tokens to generate; 0 prints no sample.
        num_tokens: usize = 256, within 0..=1 << 20;
        /// Divides the logits; 0 always chooses the likeliest token.
        temperature: f64 = 0.8, within 0.0..;
        /// Choose only among this many of the likeliest tokens; 0 means all.
        top_k: usize = 0, within 0..=1 << 24;
        /// Choose only among the fewest tokens whose total probability reaches this value.
        top_p: f64 = 1.0, within above_up_to(0.0, 1.0);
        /// Choose only among tokens that are at least this fraction as likely as the likeliest; 0 means all.
        min_p: f64 = 0.0, within 0.0..=1.0;
        /// Seed for sampling.
        seed: u64 = 0, within 0..;
    }
}
