//! What a step is told, and what it tells.

use std::time::Duration;
use trireme_base::{ContextPlace, DType};
use trireme_codec::{Compression, CompressionStatistics};
use trireme_model::PassOptions;
use trireme_optim::LossScaling;
use trireme_schedule::{Outline, StateClass};
use trireme_tensor::{Fp8Recipe, IntegerFormat, Precision};

trireme_base::named! {
    /// The order in which gradients are summed over the batch.
    pub enum Determinism {
        /// The global microbatch index: the same bits for any layout.
        Layout = "layout",
        /// The order in which gradients arrive: the same bits for the same layout, and no partial sums.
        Run = "run",
    }
}

/// How steps are run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExecutorOptions {
    /// What activations are kept in and products are made of. Sharded parameters are gathered in it, or with `fp8` in f32.
    pub precision: Precision,
    /// How the blocks' linear layers work in fp8, which is emulated in bf16 and needs that `precision`; `None` for not at all.
    pub fp8: Option<Fp8Recipe>,
    /// Whether ranks of the tensor axis have parts of the rows of a microbatch between layers that they cut: sequence parallelism.
    pub shards_rows: bool,
    /// What gradients are rounded to before they are summed over ranks: 16 bits halve the bytes of messages. A world of
    /// one rounds nothing, and what is compressed is not rounded as well.
    pub reduce_dtype: Precision,
    /// Bytes of short gradients that travel as one message, where ranks do not all share memory; one of more than half
    /// of it travels alone, and with 0 each does. Changes no bit of `determinism` by layout.
    pub fusion_bytes: usize,
    /// If parameters are sharded: what the ranks of a replica send each other less of.
    pub zero_plus_plus: ZeroPlusPlus,
    /// How gradients are compressed before they are sent; or momentum, with an optimizer that exchanges it, which sends its
    /// gradients as they are. Sums depend on the layout then, whatever `determinism` is.
    pub compression: Compression,
    /// Seed of the random numbers of compression and dropout; alike on all ranks.
    pub seed: u64,
    /// How the loss is scaled. Without scaling, a step that finds something infinite or NaN is an error; f16 needs it.
    pub loss_scaling: LossScaling,
    /// What decides the order of sums over the batch.
    pub determinism: Determinism,
}

/// What ZeRO++ spares the network between hosts (Wang et al., "ZeRO++: extremely efficient collective communication for giant
/// model training", 2023), each part by itself. A world of one spares nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZeroPlusPlus {
    /// Parameters are gathered as 8-bit integers (qwZ, section 3.1 of the paper), first across hosts and then within them. All
    /// ranks compute with the rounded values; what is stepped stays in f32.
    pub quantized_weights: bool,
    /// Each host keeps a copy of what was gathered, sharded among its ranks in the precision of the whole, from which later
    /// gatherings take it until the unit is stepped (hpZ, section 3.2). Changes no bit.
    pub secondary_shards: bool,
    /// Gradients are summed as integers: rounded, exchanged and summed in f32 within hosts, and so again across them (qgZ,
    /// section 3.3). Takes the place of [`reduce_dtype`](ExecutorOptions::reduce_dtype).
    pub quantized_gradients: Option<IntegerFormat>,
}

impl ZeroPlusPlus {
    /// All is sent as it is.
    pub const NONE: ZeroPlusPlus =
        ZeroPlusPlus { quantized_weights: false, secondary_shards: false, quantized_gradients: None };
}

impl ExecutorOptions {
    /// All in f32 and in the canonical order; nothing is rounded, compressed, scaled or sent with others.
    pub const PLAIN: ExecutorOptions = ExecutorOptions {
        precision: Precision::F32,
        fp8: None,
        shards_rows: false,
        reduce_dtype: Precision::F32,
        fusion_bytes: 0,
        zero_plus_plus: ZeroPlusPlus::NONE,
        compression: Compression::none(),
        seed: 0,
        loss_scaling: LossScaling::Off,
        determinism: Determinism::Layout,
    };

    /// A sensible [`fusion_bytes`](ExecutorOptions::fusion_bytes): a shorter gradient is copied sooner than TCP begins to send it.
    pub const FUSION_BYTES: usize = 512 << 10;

    /// How passes compute, on one of the ranks that have the positions of a sequence.
    pub fn passes(&self, context: ContextPlace) -> PassOptions {
        PassOptions { precision: self.precision, fp8: self.fp8, shards_rows: self.shards_rows, context }
    }

    /// What parameters are gathered in.
    pub fn gather_precision(&self) -> Precision {
        if self.fp8.is_some() { Precision::F32 } else { self.precision }
    }

    /// The dtype in which `num_ranks` ranks reduce gradients, and the dtype of a shard's gradient: several reduce-scattered sums are added
    /// in f32. A rank alone rounds nothing, and `as_integers` gradients are not rounded otherwise.
    pub fn gradient_dtypes(&self, outline: &Outline, num_ranks: usize, as_integers: bool) -> [DType; 2] {
        let reduced = if num_ranks == 1 || as_integers { DType::F32 } else { self.reduce_dtype.dtype() };
        let sums_shards = outline.state.is_sharded(StateClass::Gradients) && outline.num_microbatches > 1;
        [reduced, if sums_shards { DType::F32 } else { reduced }]
    }
}

/// What is done with the gradients' global norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GradNorm {
    /// It is not computed, unless the loss is scaled: then it tells of overflows.
    Off,
    /// It is computed and reported.
    Measure,
    /// Longer gradients are scaled down to this norm. Not with an optimizer that exchanges momentum: no rank knows the norm.
    Clip(f64),
}

/// What changes from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepPlan {
    /// Number of the step in its schedule, from 1; skipped steps count.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// What is done with the gradients' norm.
    pub grad_norm: GradNorm,
    /// Whether anything in the step's batch counts in the loss; the same on all ranks. If nothing does, the step is skipped.
    pub has_loss: bool,
}

/// What a step found; the same on all ranks but for times and compression.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over the global batch before the update; of a language model in nats a token. NaN if nothing in the batch counts in it.
    pub loss: f64,
    /// Global norm of the mean gradient before clipping, without the loss scale, if it was computed and momentum was not exchanged.
    pub grad_norm: Option<f64>,
    /// The scale of the loss in this step's backward.
    pub loss_scale: u32,
    /// Why the step was skipped, if it was: parameters and optimizer are as before.
    pub skipped: Option<Skipped>,
    /// Time in which this rank waited for communication with nothing else to do.
    pub comm_exposed: Duration,
    /// What compression did on this rank to all units, if there is any. The norm of the error is that of what this rank's
    /// mean gradient lacks in its messages, without the loss scale and before clipping, like `grad_norm`.
    pub compression: Option<CompressionStatistics>,
}

/// Why a step was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skipped {
    /// The loss or the gradients overflowed, and the loss scale has fallen.
    Overflow(NonFinite),
    /// Nothing in the batch counts in the loss. The loss scale is as before.
    NoLoss,
}

trireme_base::named! {
    /// The quantity that was infinite or NaN.
    pub enum NonFinite {
        /// The mean loss: the forward pass went beyond its range.
        Loss = "loss",
        /// The global norm of the gradients: some gradient went beyond its range, on some rank or in the sum over ranks.
        GradNorm = "gradient norm",
    }
}
