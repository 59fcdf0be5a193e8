//! Keys of how the work is divided among the workers, and where what it takes lies; see [`sections`](super::sections).

use super::choice::{ActivationCheckpointMode, PipelineSchedule, QuantizedGradients, Tier};
use super::section::config_section;
use super::value::{ByteLimit, above_up_to};
use std::path::PathBuf;

/// Keys of `[parallelism]` that the design names and this version does not have.
pub(super) const LATER_PARALLELISM_KEYS: &[&str] =
    &["tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"];

config_section! {
    /// How the work is divided among the workers.
    Parallelism {
        /// Replicas of the training state, which see different data; -1 takes as many as the shards leave.
        data_parallel_replicate_degree: i64 = -1, within -1..=1 << 20;
        /// Workers among which the units of the model (embedding, blocks, head) are divided, in stages of about equal work; each
        /// microbatch goes through all of them. Neighbours in the pipeline are as far apart as there are data-parallel workers.
        /// Losses and weights have the same bits, whatever the schedule, but for those that do not drain between steps.
        pipeline_parallel_degree: usize = 1, within 1..=1 << 12;
        /// In which order stages run: `gpipe`, `1f1b`, `interleaved-1f1b`, `breadth-first`, `zb-h1`, `zb-h2`, `zb-v`, `dualpipe-v` or
        /// `auto`; or `pipedream` or `pipedream-2bw`, which do not drain between steps: losses and weights are others then
        /// (docs/pipeline.md). Counts only with `pipeline_parallel_degree` above 1.
        pipeline_parallel_schedule: PipelineSchedule = PipelineSchedule::OneFOneB;
        /// File with a schedule of your own, in its place: for each worker the passes of its stages in order, as text, such as
        /// `trireme plan --save-schedule` writes (docs/pipeline.md). It is proven before the first step. The first worker reads it for
        /// all. Counts only with `pipeline_parallel_degree` above 1.
        pipeline_parallel_schedule_file: Option<PathBuf> = None;
        /// Stages of a worker; 0 takes 1, or 2 where the schedule needs several. Counts only with `pipeline_parallel_degree` above
        /// 1.
        pipeline_parallel_stages_per_rank: usize = 0, within 0..=1 << 10;
        /// Microbatches of which a worker may hold the activations of all its stages; 0 is no bound, but for `auto` as many as
        /// the pipeline has workers, which are the most of `1f1b`. A schedule that holds more is refused.
        pipeline_parallel_in_flight_max: usize = 0, within 0..=1 << 20;
        /// With `pipedream` and `pipedream-2bw`: steps from one point at which the pipeline is empty to the next one. Validation,
        /// checkpoints and traces need that. With 1 no gradient is old.
        pipeline_parallel_drain_interval: u64 = 10, within 1..=1 << 10;
        /// Units at which the stages after the first begin, in order: 0 is the embedding, 1 the first block. An empty list has stages
        /// cut evenly by counted operations. Counts only with `pipeline_parallel_degree` above 1.
        pipeline_parallel_split_points: Vec<usize> = Vec::new();
        /// Steps from one look at what units were measured to take to the next: where that is uneven, stages are cut anew and
        /// units move to other workers with their state. Losses and weights have the same bits. 0 leaves stages as they are cut.
        /// Counts only with `pipeline_parallel_degree` above 1.
        pipeline_parallel_rebalance_interval: u64 = 0, within 0..;
        /// What the busiest worker of the pipeline must work, as a part of what all do on average, for units to move. Counts only
        /// with `pipeline_parallel_rebalance_interval`.
        pipeline_parallel_rebalance_threshold: f64 = 1.1, within 1.0..;
        /// Workers that share out one replica of the training state and see different data, too; neighbours, so that those
        /// of a host can be one replica (hybrid sharding). -1 takes as many as the replicas leave with a `zero_stage` (one
        /// replica of all workers if neither is set), and 1 without. Counts only with `zero_stage`.
        data_parallel_shard_degree: i64 = -1, within -1..=1 << 20;
        /// What the workers of a replica share out (ZeRO): 0 nothing, 1 the optimizer's state, 2 gradients as well, 3
        /// parameters as well. Losses and weights have the same bits. 1 and 2 send as much as 0, 3 half as much again. With
        /// a 16-bit `dtype`, stages from 1 on gather weights in it.
        zero_stage: u32 = 0, within 0..=3;
        /// With `zero_stage = 3`: how many blocks ahead of their use parameters begin to be gathered.
        zero_prefetch: usize = 1, within 0..=1 << 12;
        /// With `zero_stage = 3`: whether parameters are given back between forward and backward, and gathered again.
        reshard_after_forward: bool = true;
        /// With `zero_stage = 3`: whether parameters are gathered as 8-bit integers (qwZ of ZeRO++). All workers compute with the
        /// rounded values; what is updated stays in f32. docs/zero.md has the bytes that each of these three keys saves
        /// between hosts, each of which needs equally many workers of a replica.
        zero_quantized_weights: bool = false;
        /// With `zero_stage = 3`: whether the workers of a host together keep a copy of the parameters that forward has gathered,
        /// from which backward takes them (hpZ of ZeRO++). It takes the memory of all parameters in `dtype` on each host;
        /// losses and weights have the same bits. Where a replica is on one host it does nothing.
        zero_hpz: bool = false;
        /// With `zero_stage = 3`: the integers as which gradients are summed, `int8` or `int4`, first within hosts and then across
        /// them (qgZ of ZeRO++), or `none`. It takes the place of `reduce_dtype`.
        zero_quantized_gradients: QuantizedGradients = QuantizedGradients::None;
    }
}

config_section! {
    /// What the forward pass keeps for the backward pass; the rest is computed again. Losses and weights have the same bits.
    ActivationCheckpoint {
        /// `none` keeps all; `selective` the results of products and attention, but not of normalisations; `block` the
        /// input of each block; `every-k` the input of every `every_k`-th block; `auto` chooses among all of these, block by
        /// block, so that least is computed again within `memory`.
        mode: ActivationCheckpointMode = ActivationCheckpointMode::None;
        /// Blocks of a segment that is recomputed as one. Counts only with `mode = "every-k"`.
        every_k: usize = 2, within 1..=1 << 12;
        /// Memory of a worker within which to stay, of all categories together, such as "1.5GiB"; "none" takes `[memory]
        /// device_budget`. The worker's share of the host's limit bounds it in any case. Counts only with `mode = "auto"`.
        memory: ByteLimit = ByteLimit(None);
    }
}

config_section! {
    /// The memory of each worker.
    Memory {
        /// What a worker may have in use at a time, of all categories together (docs/memory.md), such as "512MiB"; "none"
        /// sets no bound but the limit of the host: its memory, or what its control group allows. A run that is predicted to need
        /// more than either is refused before its first step.
        device_budget: ByteLimit = ByteLimit(None);
        /// What the state of a worker may take that `[offload]` has live with the host, or pass through it, such as "8GiB";
        /// "none" sets no bound but the limit of the host.
        host_budget: ByteLimit = ByteLimit(None);
    }
}

config_section! {
    /// Where the training state of a worker lives between its uses: on the `device`, in the memory of the `host`, or on `disk`.
    /// What says `auto` leaves the device only if a step would not fit into `[memory] device_budget` and the limit of the host
    /// otherwise: that of which least has to move, to the host as far as that has memory, else to disk; of activations those of as many blocks as it
    /// takes. The plan is printed. Losses and weights have the same bits.
    Offload {
        /// What the optimizer keeps. Where that is not on the device, the host does the updates. Needs `zero_stage` from 1 on,
        /// on one worker, too.
        optimizer: Tier = Tier::Device;
        /// What each worker has of the parameters. Needs `zero_stage = 3`, on one worker, too.
        parameters: Tier = Tier::Device;
        /// What each worker has of the reduced gradients. Needs `zero_stage` 2 or 3; and on `disk` one microbatch a step.
        gradients: Tier = Tier::Device;
        /// What forward passes of blocks keep for backward passes.
        activations: Tier = Tier::Device;
        /// How many uses ahead of its own use state begins to come back.
        prefetch: usize = 1, within 0..=64;
        /// Folder of the files on disk, which have no names and vanish with the process; when empty, the run's folder.
        folder: PathBuf = PathBuf::new();
        /// Seconds after which a transfer that a disk has not ended ends the run.
        timeout_seconds: f64 = 60.0, within above_up_to(0.0, 86_400.0);
    }
}
