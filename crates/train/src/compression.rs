//! Compression of gradients, or momentum in their place, in a run: what a user is told of it, and its way to checkpoints and back.

use crate::error::TrainError;
use crate::observer::Observer;
use serde::{Deserialize, Serialize};
use trireme_base::{DType, Rank};
use trireme_checkpoint::{Checkpoint, OPTIMIZER_PREFIX, StoredTensors};
use trireme_comm::{CodecName, Compressor, StateCopy, StateValues};
use trireme_parallel::Executor;
use trireme_plan::{Axis, Mesh, Placement, TensorPlacement};

/// What a compressor keeps that differs from rank to rank.
const PER_RANK: [&str; 3] = ["residual", "velocity", "second_moment"];

/// Says what the codec does in this run.
pub(crate) fn notice_compression(executor: &Executor, observer: &mut dyn Observer) {
    let (compression, world_size) = (executor.compression(), executor.ranks().data().world_size());
    let (num_compressed, num_units) = (executor.compressors().count(), executor.model().num_units());
    if compression.codec() == CodecName::None {
        return;
    }
    let has_momentum = executor.optimizer().exchanges_momentum();
    observer.notice(&match (world_size, num_compressed) {
        (1, _) => format!("compression {}: a single worker sends nothing, so nothing is compressed", compression.codec()),
        (_, 0) => format!(
            "compression {compression} would not save any bytes among {world_size} workers, so gradients are sent \
             uncompressed"
        ),
        _ if has_momentum => format!(
            "while the second moment is frozen, momentum of {num_compressed} of {num_units} units is exchanged \
             instead of gradients, compressed by {compression}: sums are approximate"
        ),
        _ => format!(
            "gradients of {num_compressed} of {num_units} units are compressed by {compression}: sums are approximate"
        ),
    });
}

/// Whose state is among a checkpoint's tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CompressionState {
    codec: String,
    world_size: usize,
    /// The loss scale of the gradients that were kept; 1 of momentum, which has none.
    loss_scale: u32,
    /// Whether momentum was kept, not gradients; versions that compress only those do not say.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_momentum: bool,
}

impl CompressionState {
    /// That of this run, if gradients are compressed in it.
    pub(crate) fn of(executor: &Executor) -> Option<Self> {
        executor.compressors().next()?;
        let is_momentum = executor.optimizer().exchanges_momentum();
        Some(CompressionState {
            codec: executor.compression().codec().to_string(),
            world_size: executor.group().world_size(),
            loss_scale: if is_momentum { 1 } else { executor.loss_scaler().scale() },
            is_momentum,
        })
    }

    /// What was compressed.
    fn contents(&self) -> &'static str {
        if self.is_momentum { "momentum" } else { "gradients" }
    }

    /// Refuses what no run has saved.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !self.loss_scale.is_power_of_two() {
            return Err(format!("{} is not a valid loss scale of compressed gradients", self.loss_scale));
        }
        Ok(())
    }
}

/// How what every compressor has kept lies in a checkpoint.
pub(crate) fn compressor_placements(executor: &Executor, mesh: &Mesh) -> Vec<TensorPlacement> {
    let of_unit = |(unit, compressor): (_, &Compressor)| -> Vec<TensorPlacement> {
        compressor.state().map(|(name, values)| placement(unit, name, values, mesh)).collect()
    };
    executor.compressors().flat_map(of_unit).collect()
}

/// What a compressor has kept, in the order of [`compressor_placements`].
pub(crate) fn compressor_bytes(executor: &Executor, index: usize) -> &[u8] {
    let mut values = executor.compressors().flat_map(|(_, compressor)| compressor.state());
    values.nth(index).expect("the compressor was listed").1.bytes()
}

fn name_prefix() -> String {
    format!("{OPTIMIZER_PREFIX}compression_")
}

/// Where what a compressor keeps lies: what is a rank's own is a row of a matrix, or that of ranks with the same part of parameters.
fn placement(unit: &str, name: &str, values: StateValues<'_>, mesh: &Mesh) -> TensorPlacement {
    let (dtype, len) = match values {
        StateValues::F32(values) => (DType::F32, values.len()),
        StateValues::U64(values) => (DType::U64, values.len()),
    };
    let full_name = format!("{}{name}.{unit}", name_prefix());
    // What ranks with the same parameters have in common, those that hold parts of them do not.
    let is_per_rank = PER_RANK.contains(&name);
    let is_own = |axis: Axis, degree: usize| is_per_rank || axis == Axis::TENSOR && degree > 1;
    let axes = mesh.axes().iter().map(|&(axis, degree)| (is_own(axis, degree), degree));
    let own = axes.clone().filter(|(is_own, _)| *is_own);
    let num_rows: usize = own.clone().map(|(_, degree)| degree).product();
    let shape = if own.count() > 0 { vec![num_rows, len] } else { vec![len] };
    let placements =
        axes.map(|(is_own, _)| if is_own { Placement::Shard { dim: 0 } } else { Placement::Replicate });
    TensorPlacement { name: full_name, shape, dtype, placements: placements.collect() }
}

/// Reads what every compressor has kept, if `checkpoint` has the state of this run's compressors; else says what is
/// lost. All ranks find the same, for they all read the manifest.
pub(crate) fn read_compressors(
    checkpoint: &Checkpoint,
    saved: Option<&CompressionState>,
    executor: &mut Executor,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    let Some(saved) = saved else { return Ok(()) };
    let (rank, mesh) = (executor.group().rank(), executor.ranks().mesh().clone());
    let is_kept = |name: &str| name.starts_with(&name_prefix());
    let stored = checkpoint.tensors().renamed(|name| is_kept(name).then(|| name.to_owned()))?;
    if let Err(difference) = check_fits(saved, &stored, executor, &mesh) {
        let CompressionState { codec, world_size, .. } = saved;
        let anew = match CompressionState::of(executor) {
            Some(_) => ", and compression restarts with its warm-up",
            None => "",
        };
        observer.notice(&format!(
            "{} has the state of compression {codec} on {world_size} workers, but {difference}. The state was \
             ignored: gradients that earlier steps have not sent yet are lost{anew}",
            checkpoint.path().display()
        ));
        return Ok(());
    }
    let own_scale = CompressionState::of(executor).map_or(1, |own| own.loss_scale);
    let factor = own_scale as f32 / saved.loss_scale as f32;
    for (unit, compressor) in executor.compressors_mut() {
        read_compressor(&stored, unit, compressor, rank, &mesh, checkpoint)?;
        compressor.rescale(factor);
    }
    Ok(())
}

/// Why the state does not fit this run.
fn check_fits(
    saved: &CompressionState,
    stored: &StoredTensors,
    executor: &Executor,
    mesh: &Mesh,
) -> Result<(), String> {
    let Some(own) = CompressionState::of(executor) else {
        return Err("this run does not compress".to_owned());
    };
    if (&own.codec, own.world_size) != (&saved.codec, saved.world_size) {
        return Err(format!("this run uses {} on {}", own.codec, own.world_size));
    }
    if own.is_momentum != saved.is_momentum {
        return Err(format!("it is of {}, but this run compresses {}", saved.contents(), own.contents()));
    }
    let expected = executor.compressors().flat_map(|(unit, compressor)| {
        compressor.state().map(move |(name, values)| placement(unit, name, values, mesh))
    });
    let expected: Vec<TensorPlacement> = expected.collect();
    let differs =
        |_| format!("{} keeps different state, or layers are cut in another way", executor.compression());
    stored.check_against(&expected).map_err(differs)
}

/// Reads what a compressor of `rank` has kept; names and shapes were checked.
fn read_compressor(
    stored: &StoredTensors,
    unit: &str,
    compressor: &mut Compressor,
    rank: Rank,
    mesh: &Mesh,
    checkpoint: &Checkpoint,
) -> Result<(), TrainError> {
    let read = |(name, own): (&'static str, StateValues<'_>)| {
        let placement = placement(unit, name, own, mesh);
        let extents = placement.extents(mesh, rank).expect("a state is placed on this mesh");
        let mut kept = StateCopy::from(own);
        // One box, or none.
        for extent in &extents {
            stored.read_into(&placement.name, extent, kept.bytes_mut())?;
        }
        Ok::<_, TrainError>((name, kept))
    };
    let kept = compressor.state().map(read).collect::<Result<Vec<_>, _>>()?;
    let values: Vec<_> = kept.iter().map(|(name, kept)| (*name, kept.values())).collect();
    compressor.load_state(&values).map_err(|source| TrainError::CompressionState {
        path: checkpoint.path().to_owned(),
        unit: unit.to_owned(),
        source,
    })
}
