//! The keys of `[comm]` that configure the compression of gradients, or of the momentum that some optimizers exchange instead.

use super::Config;
use super::checks::{Checks, changed_keys};
use super::choice::one_of;
use super::memory::sharding_key;
use super::sections::{Comm, Sections};
use trireme_codec::{CodecName, Compression, CompressionError, CompressionOptions};
use trireme_optim::OptimizerName;
use trireme_parallel::Determinism;
use trireme_tensor::Precision;

const PREFIX: &str = "compression_";

/// Number of momentum elements that share a scale, unless the user has chosen a codec. Momentum is divided by the square root of the second
/// moment, which differs between elements. The more elements share a scale, the more rounding changes the small ones.
const MOMENTUM_BLOCK_LEN: usize = 64;

impl Config {
    /// Returns how gradients, or the momentum that some optimizers exchange instead, are compressed before they are sent. These optimizers
    /// exchange momentum in order to send few bits, so for them `none` means `one_bit` with short blocks.
    #[expect(clippy::missing_panics_doc, reason = "the validation of the config refuses invalid options")]
    pub fn compression(&self) -> Compression {
        let mut options = options(self.comm());
        if options.codec == CodecName::None && self.optimizer().name.exchanges_momentum() {
            options.codec = CodecName::OneBit;
            options.block_len = Some(MOMENTUM_BLOCK_LEN);
        }
        Compression::new(&options).expect("the validator refuses what cannot be")
    }
}

/// Returns whether a key of `[comm]` has an effect with this codec.
pub(super) fn has_effect(codec: CodecName, key: &str) -> bool {
    key.strip_prefix(PREFIX).is_none_or(|option| codec.options().contains(&option))
}

/// Returns the codec with the options that it has. An option whose value means "the codec's default" is `None`.
fn options(comm: &Comm) -> CompressionOptions {
    let has = |option| comm.compression.options().contains(&option);
    CompressionOptions {
        codec: comm.compression,
        rank: has("rank").then_some(comm.compression_rank),
        ratio: has("ratio").then_some(comm.compression_ratio),
        block_len: Some(comm.compression_block_len).filter(|&len| has("block_len") && len > 0),
        momentum: has("momentum").then_some(comm.compression_momentum as f32),
        warmup_steps: has("warmup_steps").then_some(comm.compression_warmup_steps),
        warmup_codec: has("warmup_codec").then_some(comm.compression_warmup_codec),
        error_feedback: comm.compression_error_feedback.filter(|_| has("error_feedback")),
        normalize: (comm.compression_normalize && has("normalize")).then_some(Compression::NORMALIZE_DECAY),
    }
}

pub(super) fn check_compression(checks: &mut Checks<'_>) {
    let comm = &checks.unchecked.sections.comm;
    let codec = comm.compression;
    for key in changed_keys(comm).filter(|key| !has_effect(codec, key)) {
        let owners = CodecName::ALL.into_iter().filter(|&owner| has_effect(owner, key)).map(CodecName::name);
        let owners: Vec<&str> = owners.collect();
        let keys = [&format!("comm.{key}"), "comm.compression"];
        checks.only_applies(false, &keys, &format!("compression = {}", one_of(&owners)));
    }
    match Compression::new(&options(comm)) {
        Ok(_) => {}
        Err(CompressionError::Option { option, allowed, .. }) => {
            let key = format!("comm.{PREFIX}{option}");
            checks.require(false, &[&key, "comm.compression"], || format!("expected {allowed}"));
        }
        Err(error) => checks.require(false, &["comm.compression"], || error.to_string()),
    }
    if codec != CodecName::None {
        check_conflicts(checks, codec);
    }
    if checks.unchecked.sections.optimizer.name.exchanges_momentum() {
        check_momentum(checks);
    }
}

fn check_momentum(checks: &mut Checks<'_>) {
    let Sections { comm, training, parallelism, .. } = &checks.unchecked.sections;
    let mut require = |holds, keys: &[&str], text: &str| checks.require(holds, keys, || text.to_owned());
    require(
        training.max_norm == 0.0,
        &["training.max_norm", "optimizer.name"],
        "this optimizer exchanges momentum, so no worker knows the norm of the gradients to clip by; set max_norm = \
         0 in [training]",
    );
    require(
        !parallelism.state_layout().has_shards(),
        &[sharding_key(parallelism), "optimizer.name"],
        "this optimizer needs the whole momentum on every worker; set zero_stage = 0 and shard_gradients = false, or \
         use \"adamw\"",
    );
    require(
        !comm.compression_normalize,
        &["comm.compression_normalize", "optimizer.name"],
        "this optimizer exchanges momentum, and normalizes it itself; remove this key",
    );
    if comm.compression != CodecName::None {
        return;
    }
    require(
        training.determinism == Determinism::Run,
        &["optimizer.name", "training.determinism"],
        "sums of compressed momentum depend on the number of workers, which determinism = \"layout\" rules out; set \
         determinism = \"run\" in [training]",
    );
    require(
        training.reduce_dtype == Precision::F32,
        &["training.reduce_dtype", "optimizer.name"],
        "this optimizer sends gradients in full precision and compresses momentum; remove this key",
    );
}

fn check_conflicts(checks: &mut Checks<'_>, codec: CodecName) {
    let Sections { comm, training, optimizer, .. } = &checks.unchecked.sections;
    checks.require(
        training.determinism == Determinism::Run,
        &["comm.compression", "training.determinism"],
        || {
            "sums of compressed gradients depend on the number of workers, which determinism = \"layout\" rules out; \
             set determinism = \"run\""
                .to_owned()
        },
    );
    checks.require(
        training.reduce_dtype == Precision::F32,
        &["comm.compression", "training.reduce_dtype"],
        || "gradients would also be rounded to reduce_dtype; remove one of the two keys".to_owned(),
    );
    checks.require(
        codec != CodecName::F16
            || training.dtype == Precision::F16
            || comm.compression_error_feedback == Some(true),
        &["comm.compression", "training.dtype", "comm.compression_error_feedback"],
        || {
            "only dtype = \"f16\" scales the loss; without scaling, small gradients would become zero in f16; use \
             \"bf16\", or set compression_error_feedback = true"
                .to_owned()
        },
    );
    let has_own_momentum = optimizer.name != OptimizerName::Sgd || optimizer.settings.momentum > 0.0;
    checks.require(
        comm.compression_momentum == 0.0 || !has_effect(codec, "compression_momentum") || !has_own_momentum,
        &["comm.compression_momentum", "optimizer.momentum", "optimizer.name"],
        || {
            "replaces the optimizer's momentum, so momentum would apply twice; set name = \"sgd\" and momentum = 0 \
             in [optimizer], or remove this key"
                .to_owned()
        },
    );
}
