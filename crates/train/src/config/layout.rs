//! Config keys for the division of the work among the workers, and for memory and the placement of state; see
//! [`sections`](super::sections).

use super::choice::{ActivationCheckpointMode, HugePages, QuantizedGradients, Tier};
use super::section::config_section;
use super::value::{ByteLimit, above_up_to};
use std::path::PathBuf;
use trireme_schedule::StateClass;
use trireme_schedule::pipeline::ScheduleKind;

config_section! {
    /// How the work is divided among the workers.
    Parallelism {
        /// Number of replicas of the training state, each of which sees different data. -1 uses the number of data-parallel
        /// workers divided by the number of shards.
        data_parallel_replicate_degree: i64 = -1, within -1..=1 << 20;
        /// Number of workers that divide each block (heads of attention, inner width of the feed-forward layer) and the
        /// vocabulary. They are neighbors, read the same data, and exchange activations twice per block in forward and
        /// twice in backward. The order of sums differs from the order of one worker, so losses differ by rounding.
        tensor_parallel_degree: usize = 1, within 1..=1 << 12;
        /// With `tensor_parallel_degree` above 1: whether these workers also divide the rows of normalizations, of residuals and of the
        /// outputs of blocks (sequence parallelism). This takes less memory. Forward sends as many bytes as without; backward sends half as
        /// many again. `seq_len` must be a multiple of `tensor_parallel_degree`.
        sequence_parallel: bool = true;
        /// Number of workers that divide the positions of each sequence. They read the same samples, and each takes its positions. Their
        /// ranks differ by `tensor_parallel_degree`. `seq_len` must be a multiple of twice the degree. The memory of activations is
        /// divided by the degree. Attention reads the keys and values of all of these workers (docs/context.md). Losses differ from those
        /// of one worker by rounding.
        context_parallel_degree: usize = 1, within 1..=1 << 12;
        /// Number of neighbors among the workers of `context_parallel_degree` that exchange positions for heads before attention and
        /// back after it (Ulysses). Between these groups of neighbors, keys and values go around a ring. With 1 there is only the ring,
        /// and with the value of `context_parallel_degree` there is none. Must divide that degree, and the number of key-value heads that
        /// a worker has. 0 chooses the value that sends the fewest bytes, or 1 for a custom task.
        context_parallel_heads_degree: usize = 0, within 0..=1 << 12;
        /// Number of workers with different experts, for models with experts (docs/experts.md). They are neighbors among the workers that
        /// see different samples or positions. Tokens travel to their experts and back in each layer, forward and backward. Must divide the
        /// number of these workers and the experts of each layer. If training state is sharded, it must divide the workers of a replica, or
        /// be a multiple of them.
        expert_parallel_degree: usize = 1, within 1..=1 << 12;
        /// Number of workers in a pipeline. The units of the model (embedding, blocks, head) are divided among them in stages of about
        /// equal work, and each microbatch passes through all of them. Ranks of neighbors in the pipeline differ by the number of
        /// data-parallel workers times `context_parallel_degree` times `tensor_parallel_degree`. Losses and weights have the same bits with
        /// every schedule that drains between steps.
        pipeline_parallel_degree: usize = 1, within 1..=1 << 12;
        /// Order in which stages run (docs/pipeline.md). `pipedream` and `pipedream-2bw` do not drain between steps, so losses and
        /// weights differ. Only applies with `pipeline_parallel_degree` above 1.
        pipeline_parallel_schedule: ScheduleKind = ScheduleKind::OneFOneB;
        /// File with a custom schedule, which replaces the passes of `pipeline_parallel_schedule`. The file lists the passes of each
        /// worker in order, as text, in the format that `trireme plan --save-schedule` writes (docs/pipeline.md). If its schedule does
        /// not drain between steps, `pipeline_parallel_schedule` must be the one of `pipedream` and `pipedream-2bw` that has the same
        /// versions of weights. The schedule is validated before the first step. The first worker reads the file for all. Only applies
        /// with `pipeline_parallel_degree` above 1.
        pipeline_parallel_schedule_file: Option<PathBuf> = None;
        /// Stages per worker; 0 uses 1, or 2 if the schedule needs several. Only applies with
        /// `pipeline_parallel_degree` above 1.
        pipeline_parallel_stages_per_rank: usize = 0, within 0..=1 << 10;
        /// Maximum number of microbatches for which a worker may hold the activations of all its stages; a schedule
        /// that holds more is rejected. 0 sets no bound, except for `auto`, which is then bounded by the number of
        /// workers in the pipeline, the most that `1f1b` holds.
        pipeline_parallel_in_flight_max: usize = 0, within 0..=1 << 20;
        /// With `pipedream` and `pipedream-2bw`: steps between points at which the pipeline is empty, as validation,
        /// checkpoints and traces require. With 1, no gradient is stale.
        pipeline_parallel_drain_interval: u64 = 10, within 1..=1 << 10;
        /// Units at which the stages after the first begin, in order: 0 is the embedding, 1 the first block. An empty
        /// list divides stages evenly by counted operations. Only applies with `pipeline_parallel_degree` above 1.
        pipeline_parallel_split_points: Vec<usize> = Vec::new();
        /// Steps between checks of the measured time of each unit. If stages are uneven, the units are split into stages again, and move to
        /// other workers with their state. Losses and weights have the same bits. 0 keeps the stages unchanged. Only applies with
        /// `pipeline_parallel_degree` above 1.
        pipeline_parallel_rebalance_interval: u64 = 0, within 0..;
        /// Units move if the work of the busiest worker of the pipeline, relative to the mean, exceeds this value.
        /// Only applies with `pipeline_parallel_rebalance_interval`.
        pipeline_parallel_rebalance_threshold: f64 = 1.1, within 1.0..;
        /// Number of workers that shard one replica of the training state; they see different data, too. Their ranks differ by
        /// `context_parallel_degree` times `tensor_parallel_degree`, so one replica can stay within a host (hybrid sharding). The workers
        /// of `context_parallel_degree` shard the replica as well. If anything is sharded, -1 uses as many workers as the replicas leave:
        /// all workers if `data_parallel_replicate_degree` is -1 as well. If nothing is sharded, -1 means 1. Only applies with `zero_stage`
        /// or `shard_gradients`.
        data_parallel_shard_degree: i64 = -1, within -1..=1 << 20;
        /// State that the workers of a replica shard (ZeRO): 0 nothing, 1 the optimizer state, 2 gradients as well, 3
        /// parameters as well. Losses and weights have the same bits. 1 and 2 send as much as 0; 3 sends half as much
        /// again. With a 16-bit `dtype`, stages 1 and above gather weights in it.
        zero_stage: u32 = 0, within 0..=3;
        /// Whether gradients are sharded with `zero_stage` 0 or 1 as well. With 0, workers still update all parameters: gradients are
        /// summed in shards after each microbatch, and gathered for the updates. With one microbatch per step, this sends as many bytes as
        /// without sharding, and half as many again for each further microbatch. With 1, it is the same as `zero_stage = 2`.
        shard_gradients: bool = false;
        /// With `zero_stage = 3`: how many blocks ahead of their use parameters are gathered.
        zero_prefetch: usize = 1, within 0..=1 << 12;
        /// With `zero_stage = 3`: whether gathered parameters are freed between forward and backward, and gathered
        /// again.
        reshard_after_forward: bool = true;
        /// With `zero_stage = 3`: whether parameters are gathered as 8-bit integers (qwZ of ZeRO++). All workers
        /// compute with the rounded values; the updated parameters stay in f32. docs/zero.md lists the bytes that
        /// this and the next two keys save between hosts. Each of them needs the same number of a replica's workers
        /// on each host.
        zero_quantized_weights: bool = false;
        /// With `zero_stage = 3`: whether the workers of a host jointly keep a copy of the parameters gathered in
        /// forward, and use it for backward (hpZ of ZeRO++). It takes the memory of all parameters in `dtype` on each
        /// host; losses and weights have the same bits. It has no effect if a replica is on one host.
        zero_hpz: bool = false;
        /// With `zero_stage = 3`: integer type in which gradients are summed, first within hosts and then across them
        /// (qgZ of ZeRO++): `int8` or `int4`, or `none`. Replaces `reduce_dtype`.
        zero_quantized_gradients: QuantizedGradients = QuantizedGradients::None;
    }
}

config_section! {
    /// Activations that the forward pass keeps for the backward pass; the rest is recomputed. Losses and weights have the same
    /// bits.
    ActivationCheckpoint {
        /// `none` keeps everything; `selective` the results of matrix multiplications and attention, but not of
        /// normalizations; `block` the input of each block; `every-k` the input of every `every_k`-th block; `auto`
        /// chooses among these, block by block, to recompute as little as possible within `memory`.
        mode: ActivationCheckpointMode = ActivationCheckpointMode::None;
        /// Number of blocks that are recomputed as one segment. Only applies with `mode = "every-k"`.
        every_k: usize = 2, within 1..=1 << 12;
        /// Memory budget of a worker, for the total of all categories, such as "1.5GiB"; "none" uses `[memory]
        /// device_budget`. The worker's share of the host's limit applies in any case. Only applies with `mode =
        /// "auto"`.
        memory: ByteLimit = ByteLimit(None);
    }
}

config_section! {
    /// The memory of each worker.
    Memory {
        /// Maximum memory that a worker may have in use at a time, for the total of all categories (docs/memory.md),
        /// such as "512MiB". "none" sets only the limit of the host: its memory, or what its control group allows. A
        /// run that is predicted to need more than either is rejected before its first step.
        device_budget: ByteLimit = ByteLimit(None);
        /// Maximum host memory for the offloaded state of a worker, including state on its way to a disk (see
        /// `[offload]`), such as "8GiB"; "none" sets only the limit of the host.
        host_budget: ByteLimit = ByteLimit(None);
        /// Which pages of 2 MiB hold tensors: `transparent`, `reserved` or `never` (docs/memory.md).
        huge_pages: HugePages = HugePages::Transparent;
        /// Updates each unit as soon as its gradient is reduced, and frees the gradient, so that few gradients are in
        /// memory at a time. Requires one microbatch per step and worker. Without clipping, losses and weights have the
        /// same bits. A step cannot clip by its own norm: set `[training] max_norm = 0`, or `clip_by_previous_norm =
        /// true`. If the loss or the norm is not finite, some parameters have been updated already, and the run must
        /// resume from its last checkpoint (docs/memory.md).
        free_gradients: bool = false;
        /// Stores parameters in bf16: 2 bytes instead of 4. Each update is computed in f32 and rounded stochastically, so
        /// that small updates count on average (docs/memory.md). The random bits depend only on the step and the
        /// element's position in its unit, so a layout changes no more bits than without this key. Requires
        /// `[training] dtype = "bf16"`. Excludes `fp8` and `zero_quantized_weights`.
        bf16_parameters: bool = false;
    }
}

config_section! {
    /// Where a worker keeps its training state between uses: on the `device`, in the memory of the `host`, or on
    /// `disk`. State set to `auto` leaves the device only if a step would not fit into `[memory] device_budget` and
    /// the limit of the host otherwise. The choice moves as little as possible: to the host while it has memory, else
    /// to disk; and activations of only as many blocks as needed. The plan is printed. Losses and weights have the
    /// same bits.
    Offload {
        /// Optimizer state. If it is not on the device, the host computes the updates. Requires `zero_stage` 1 or
        /// above, even on one worker.
        optimizer: Tier = Tier::Device;
        /// Each worker's shard of the parameters. Requires `zero_stage = 3`, even on one worker.
        parameters: Tier = Tier::Device;
        /// Each worker's shard of the reduced gradients. Requires `zero_stage` 2 or 3, or 1 with `shard_gradients`;
        /// `disk` also requires one microbatch per step.
        gradients: Tier = Tier::Device;
        /// Activations that forward passes of blocks keep for backward passes.
        activations: Tier = Tier::Device;
        /// How many uses ahead offloaded state is fetched.
        prefetch: usize = 1, within 0..=64;
        /// Folder for files on disk. The files are unnamed and disappear with the process. When empty, the run's
        /// folder.
        @per_rank
        folder: PathBuf = PathBuf::new();
        /// Seconds after which an unfinished disk transfer ends the run.
        timeout_seconds: f64 = 60.0, within above_up_to(0.0, 86_400.0);
    }
}

impl Offload {
    /// Returns the configured tier of each class of state.
    pub fn tiers(&self) -> [(StateClass, Tier); 4] {
        [
            (StateClass::Optimizer, self.optimizer),
            (StateClass::Parameters, self.parameters),
            (StateClass::Gradients, self.gradients),
            (StateClass::Activations, self.activations),
        ]
    }
}
