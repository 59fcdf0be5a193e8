//! Options, inputs and results of training steps.

use std::time::Duration;
use trireme_base::{ContextRank, DType};
use trireme_codec::{Compression, CompressionStatistics};
use trireme_model::PassOptions;
use trireme_optim::LossScaling;
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::{Fp8Recipe, IntegerFormat, Precision};

trireme_base::named! {
    /// The order in which gradients are summed over the batch.
    pub enum Determinism {
        /// The order of the global microbatch index: the same bits for any layout.
        Layout = "layout",
        /// The order in which gradients arrive on a rank: the same bits only for the same layout, but no memory for partial sums.
        Run = "run",
    }
}

/// How an executor runs steps. The same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExecutorOptions {
    /// Precision of activations and of the operands of matrix products. Sharded parameters are gathered in this precision, or in f32 if
    /// `fp8` is set.
    pub precision: Precision,
    /// Whether parameters are stored in bf16: each update is computed in f32 and rounded stochastically. Requires `precision` bf16, and
    /// neither `fp8` nor quantized weights.
    pub bf16_parameters: bool,
    /// Recipe for the linear layers of blocks in fp8, or `None`. Other matmuls and activations use `precision`, which must be bf16.
    pub fp8: Option<Fp8Recipe>,
    /// Whether ranks of the tensor axis split the rows of a microbatch between tensor-parallel layers (sequence parallelism).
    pub shards_rows: bool,
    /// Precision to which gradients are rounded before they are summed over ranks: 16 bits halve the bytes of messages. The gradients of a
    /// single rank, and gradients that are compressed, are not rounded.
    pub reduce_dtype: Precision,
    /// Maximum bytes of a batch of short gradients that are reduced as one message (tensor fusion). Gradients longer than half of the
    /// maximum are reduced alone. Nothing is fused with 0, or if all ranks share memory. Does not change bits with [`Determinism::Layout`].
    pub fusion_bytes: usize,
    /// Methods of ZeRO++ that reduce the traffic within a replica. They apply only if parameters are sharded.
    pub zero_plus_plus: ZeroPlusPlus,
    /// Compression of gradients before they are sent. An optimizer that exchanges momentum compresses momentum instead, and sends gradients
    /// uncompressed. With compression, sums depend on the layout, whatever `determinism` is.
    pub compression: Compression,
    /// Seed of the random numbers of compression and dropout; the same on all ranks.
    pub seed: u64,
    /// Scaling of the loss. Without scaling, an infinite or NaN loss or gradient norm is an error; f16 needs scaling.
    pub loss_scaling: LossScaling,
    /// The order of sums over the batch.
    pub determinism: Determinism,
}

/// Methods that reduce traffic between hosts (Wang et al., "ZeRO++: extremely efficient collective communication for giant model training",
/// 2023). Each can be used without the others. None has an effect if a replica has a single rank; secondary shards need several hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZeroPlusPlus {
    /// Gathers parameters as 8-bit integers (qwZ, section 3.1 of the paper), first across hosts and then within them. All ranks compute
    /// with the rounded values; updates read and write parameters in f32.
    pub quantized_weights: bool,
    /// Keeps a copy of gathered parameters on each host, sharded among its ranks in the precision of gathers. Later gathers read that copy,
    /// until the unit is updated (hpZ, section 3.2). Does not change bits.
    pub secondary_shards: bool,
    /// Format in which gradients are exchanged as integers: rounded, exchanged and summed in f32 within hosts, then again across hosts
    /// (qgZ, section 3.3). Replaces [`reduce_dtype`](ExecutorOptions::reduce_dtype).
    pub quantized_gradients: Option<IntegerFormat>,
}

impl ZeroPlusPlus {
    /// No method: everything is sent in full precision.
    pub const NONE: ZeroPlusPlus =
        ZeroPlusPlus { quantized_weights: false, secondary_shards: false, quantized_gradients: None };
}

impl ExecutorOptions {
    /// Everything in f32 and in the canonical order, without rounding, compression, loss scaling or fusion.
    pub const PLAIN: ExecutorOptions = ExecutorOptions {
        precision: Precision::F32,
        bf16_parameters: false,
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

    /// A sensible [`fusion_bytes`](ExecutorOptions::fusion_bytes). Copying a shorter gradient into a batch takes less time than starting
    /// another message over TCP.
    pub const FUSION_BYTES: usize = 512 << 10;

    /// Returns the options of the passes of units. `context` is this rank's place on the context axis.
    pub fn pass_options(&self, context: ContextRank) -> PassOptions {
        PassOptions { precision: self.precision, fp8: self.fp8, sequence_parallel: self.shards_rows, context }
    }

    /// Returns the dtype in which the parameters that a rank updates are stored.
    pub fn parameter_dtype(&self) -> DType {
        if self.bf16_parameters { DType::Bf16 } else { DType::F32 }
    }

    /// Returns the precision in which parameters are gathered.
    pub fn gather_precision(&self) -> Precision {
        if self.fp8.is_some() { Precision::F32 } else { self.precision }
    }

    /// Returns the dtype in which `num_ranks` ranks reduce gradients, and the dtype of a shard's gradient. A shard that sums several
    /// reduce-scattered microbatches is in f32. The gradients of a single rank, and gradients that are exchanged `as_integers`, are not
    /// rounded.
    pub fn gradient_dtypes(&self, header: &ProgramHeader, num_ranks: usize, as_integers: bool) -> [DType; 2] {
        let reduced = if num_ranks == 1 || as_integers { DType::F32 } else { self.reduce_dtype.dtype() };
        let sums_shards = header.state.is_sharded(StateClass::Gradients) && header.num_microbatches > 1;
        [reduced, if sums_shards { DType::F32 } else { reduced }]
    }
}

/// Use of the global norm of the gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GradNorm {
    /// The norm is not computed, unless the loss is scaled: then it detects overflows.
    Off,
    /// The norm is computed and reported.
    Measure,
    /// Gradients with a larger norm are scaled down to this norm. Not possible with an optimizer that exchanges momentum: no rank knows the
    /// norm of the gradients.
    Clip(f64),
}

/// Settings of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepPlan {
    /// Number of the step in its schedule, from 1. Skipped steps count.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Use of the gradients' norm.
    pub grad_norm: GradNorm,
    /// Whether any row of the step's global batch counts in the loss; the same on all ranks. If not, the step is skipped.
    pub has_loss: bool,
}

/// The results of a step. The time and the compression statistics are local to this rank; everything else is the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over the global batch before the update. For a language model, in nats per token. NaN if nothing in the batch counts in
    /// the loss.
    pub loss: f64,
    /// Global norm of the mean gradient before clipping, without the loss scale. `None` if it was not computed, or if momentum was
    /// exchanged.
    pub grad_norm: Option<f64>,
    /// The loss scale of this step's backward.
    pub loss_scale: u32,
    /// The reason why the step was skipped, or `None`. A skipped step leaves parameters and optimizer as they were.
    pub skipped: Option<Skipped>,
    /// Time in which this rank only waited for communication (exposed communication).
    pub comm_exposed: Duration,
    /// Compression statistics of all units on this rank; `None` without compression. The error norm is the norm of the part of this rank's
    /// mean gradient that its messages left out, without the loss scale and before clipping, like `grad_norm`.
    pub compression: Option<CompressionStatistics>,
}

/// The reason why a step was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skipped {
    /// The loss or the gradients overflowed. The loss scale has decreased.
    Overflow(NonFinite),
    /// Nothing in the batch counts in the loss. The loss scale is unchanged.
    NoLoss,
}

trireme_base::named! {
    /// The quantity that was infinite or NaN.
    pub enum NonFinite {
        /// The mean loss: the forward pass overflowed, or computed NaN.
        Loss = "loss",
        /// The global norm of the gradients: a gradient overflowed or became NaN, on some rank or in the sum over ranks.
        GradNorm = "gradient norm",
    }
}
