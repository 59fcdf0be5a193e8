//! Gradient or momentum compression of a run: the notice to the user, and the compressors' state in checkpoints.

use crate::error::TrainError;
use crate::observer::Observer;
use serde::{Deserialize, Serialize};
use trireme_base::{DType, Rank};
use trireme_checkpoint::{Checkpoint, OPTIMIZER_PREFIX, StoredTensors};
use trireme_codec::{CodecName, Compressor, StateCopy, StateValues};
use trireme_parallel::{Executor, ParallelError};
use trireme_plan::{Axis, Mesh, Placement, TensorPlacement};

/// Names of compressor state that differs from rank to rank.
const PER_RANK: [&str; 3] = ["residual", "velocity", "second_moment"];

/// Reports to the observer what the codec does in this run. Collective over the ranks of the pipeline.
///
/// # Errors
/// Failed communication, or [`TrainError::UnreadableCompressors`] if a rank sends no list of compressor state.
pub(crate) fn notice_compression(executor: &Executor, observer: &mut dyn Observer) -> Result<(), TrainError> {
    let (compression, world_size) = (executor.compression(), executor.ranks().data().world_size());
    if compression.codec() == CodecName::None {
        return Ok(());
    }
    let num_compressed = CompressorStates::gather(executor)?.num_compressed;
    let num_units = executor.model().num_units();
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
    Ok(())
}

/// Describes the run that wrote the compressor state of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CompressionInfo {
    codec: String,
    world_size: usize,
    /// The loss scale of the stored gradients. 1 for momentum, which is not scaled.
    loss_scale: u32,
    /// Whether the state belongs to compressed momentum and not gradients. Versions that compress only gradients do not state it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_momentum: bool,
}

impl CompressionInfo {
    /// Returns the description of this run's compressor state, or `None` if the run compresses no unit.
    pub(crate) fn of(executor: &Executor, states: &CompressorStates) -> Option<Self> {
        if states.num_compressed == 0 {
            return None;
        }
        let is_momentum = executor.optimizer().exchanges_momentum();
        Some(CompressionInfo {
            codec: executor.compression().codec().to_string(),
            world_size: executor.group().world_size(),
            loss_scale: if is_momentum { 1 } else { executor.loss_scaler().scale() },
            is_momentum,
        })
    }

    /// Returns the name of the compressed quantity.
    fn contents(&self) -> &'static str {
        if self.is_momentum { "momentum" } else { "gradients" }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        if !self.loss_scale.is_power_of_two() {
            return Err(format!("{} is not a valid loss scale of compressed gradients", self.loss_scale));
        }
        Ok(())
    }
}

/// The compressor state of all ranks of the pipeline, in the order of these ranks.
pub(crate) struct CompressorStates {
    num_compressed: usize,
    states: Vec<CompressorState>,
}

/// One vector of state of a unit's compressor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct CompressorState {
    unit: String,
    name: String,
    is_f32: bool,
    len: usize,
    /// The rank of the pipeline that has the unit.
    #[serde(skip)]
    pipeline_rank: usize,
}

impl CompressorStates {
    /// Exchanges the lists of compressor state between the ranks of the pipeline. Collective.
    pub(crate) fn gather(executor: &Executor) -> Result<Self, TrainError> {
        let mut all = CompressorStates { num_compressed: 0, states: Vec::new() };
        if executor.compression().codec() == CodecName::None {
            return Ok(all);
        }
        let own: Vec<CompressorState> = executor.compressors().flat_map(CompressorState::all).collect();
        let own = serde_json::to_vec(&(executor.compressors().count(), own));
        let own = own.expect("a state has only texts and numbers");
        let texts = executor.ranks().pipeline().all_gather_bytes(&own).wait().map_err(ParallelError::from)?;
        for (pipeline_rank, text) in texts.iter().enumerate() {
            let (num_compressed, states): (usize, Vec<CompressorState>) =
                serde_json::from_slice(text).map_err(|_| TrainError::UnreadableCompressors)?;
            all.num_compressed += num_compressed;
            all.states.extend(states.into_iter().map(|state| CompressorState { pipeline_rank, ..state }));
        }
        Ok(all)
    }

    pub(crate) fn placements(&self, mesh: &Mesh) -> Vec<TensorPlacement> {
        self.states.iter().map(|state| state.placement(mesh)).collect()
    }

    /// Returns, for each state, its index among the states of this rank, or `None` if another rank of the pipeline has it.
    pub(crate) fn own_indices(&self, executor: &Executor) -> impl Iterator<Item = Option<usize>> {
        let rank = executor.ranks().pipeline().rank().0;
        let mut own = 0..;
        self.states.iter().map(move |state| (state.pipeline_rank == rank).then(|| own.next()).flatten())
    }
}

/// Returns the bytes of a compressor state of this rank, by its index among all states of this rank's compressors.
pub(crate) fn compressor_bytes(executor: &Executor, index: usize) -> &[u8] {
    let mut values = executor.compressors().flat_map(|(_, compressor)| compressor.state());
    values.nth(index).expect("the compressor was listed").1.bytes()
}

fn name_prefix() -> String {
    format!("{OPTIMIZER_PREFIX}compression_")
}

impl CompressorState {
    /// Lists the state of a unit's compressor.
    fn all((unit, compressor): (&str, &Compressor)) -> Vec<Self> {
        let of = |(name, values): (&str, StateValues<'_>)| {
            let (is_f32, len) = match values {
                StateValues::F32(values) => (true, values.len()),
                StateValues::U64(values) => (false, values.len()),
            };
            CompressorState { unit: unit.to_owned(), name: name.to_owned(), is_f32, len, pipeline_rank: 0 }
        };
        compressor.state().map(of).collect()
    }

    /// Returns the placement of the state. If each rank, or each rank of the tensor axis, has its own state, the tensor is a matrix with
    /// one row per such rank.
    fn placement(&self, mesh: &Mesh) -> TensorPlacement {
        let CompressorState { unit, name, is_f32, len, pipeline_rank } = self;
        let full_name = format!("{}{name}.{unit}", name_prefix());
        // Ranks of the tensor axis hold different parts of parameters, so they never share state.
        let is_per_rank = PER_RANK.contains(&&**name);
        let is_own = |axis: Axis, degree: usize| {
            axis != Axis::PIPELINE && (is_per_rank || axis == Axis::TENSOR && degree > 1)
        };
        let own = mesh.axes().iter().filter(|&&(axis, degree)| is_own(axis, degree));
        let num_rows: usize = own.clone().map(|(_, degree)| degree).product();
        let shape = if own.count() > 0 { vec![num_rows, *len] } else { vec![*len] };
        let placement = |&(axis, degree): &(Axis, usize)| match axis {
            Axis::PIPELINE => Placement::Single { rank: *pipeline_rank },
            _ if is_own(axis, degree) => Placement::Shard { dim: 0 },
            _ => Placement::Replicate,
        };
        let dtype = if *is_f32 { DType::F32 } else { DType::U64 };
        TensorPlacement {
            name: full_name,
            shape,
            dtype,
            placements: mesh.axes().iter().map(placement).collect(),
        }
    }
}

/// Reads the state of every compressor if `checkpoint` has state that fits this run. Otherwise, reports which state is lost. All ranks
/// decide alike, because all of them read the manifest.
pub(crate) fn read_compressors(
    checkpoint: &Checkpoint,
    saved: Option<&CompressionInfo>,
    executor: &mut Executor,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    let Some(saved) = saved else { return Ok(()) };
    let states = CompressorStates::gather(executor)?;
    let (rank, mesh) = (executor.group().rank(), executor.ranks().mesh().clone());
    let is_kept = |name: &str| name.starts_with(&name_prefix());
    let stored = checkpoint.tensors().renamed(|name| is_kept(name).then(|| name.to_owned()))?;
    if let Err(difference) = check_fits(saved, &stored, executor, &states, &mesh) {
        let CompressionInfo { codec, world_size, .. } = saved;
        let restart = match CompressionInfo::of(executor, &states) {
            Some(_) => ", and compression restarts with its warm-up",
            None => "",
        };
        observer.notice(&format!(
            "{} has the state of compression {codec} on {world_size} workers, but {difference}. The state was \
             ignored: gradients that earlier steps have not sent yet are lost{restart}",
            checkpoint.path().display()
        ));
        return Ok(());
    }
    let own_scale = CompressionInfo::of(executor, &states).map_or(1, |own| own.loss_scale);
    let factor = own_scale as f32 / saved.loss_scale as f32;
    for (unit, compressor) in executor.compressors_mut() {
        let placements =
            states.states.iter().filter(|state| state.unit == unit).map(|state| state.placement(&mesh));
        read_compressor(&stored, unit, compressor, placements, rank, &mesh, checkpoint)?;
        compressor.rescale(factor);
    }
    Ok(())
}

fn check_fits(
    saved: &CompressionInfo,
    stored: &StoredTensors,
    executor: &Executor,
    states: &CompressorStates,
    mesh: &Mesh,
) -> Result<(), String> {
    let Some(own) = CompressionInfo::of(executor, states) else {
        return Err("this run does not compress".to_owned());
    };
    if (&own.codec, own.world_size) != (&saved.codec, saved.world_size) {
        return Err(format!("this run uses {} on {}", own.codec, own.world_size));
    }
    if own.is_momentum != saved.is_momentum {
        return Err(format!("it is of {}, but this run compresses {}", saved.contents(), own.contents()));
    }
    let differs =
        |_| format!("{} keeps different state, or layers are cut in another way", executor.compression());
    stored.check_against(&states.placements(mesh)).map_err(differs)
}

/// Reads the state of a compressor of `rank`, stored at `placements`. Names and shapes were checked before.
fn read_compressor(
    stored: &StoredTensors,
    unit: &str,
    compressor: &mut Compressor,
    placements: impl Iterator<Item = TensorPlacement>,
    rank: Rank,
    mesh: &Mesh,
    checkpoint: &Checkpoint,
) -> Result<(), TrainError> {
    let read = |((name, own), placement): ((&'static str, StateValues<'_>), TensorPlacement)| {
        let extents = placement.extents(mesh, rank).expect("a state is placed on this mesh");
        let mut kept = StateCopy::from(own);
        // A rank has one box of the tensor, or none.
        for extent in &extents {
            stored.read_into(&placement.name, extent, kept.bytes_mut())?;
        }
        Ok::<_, TrainError>((name, kept))
    };
    let kept = compressor.state().zip(placements).map(read).collect::<Result<Vec<_>, _>>()?;
    let values: Vec<_> = kept.iter().map(|(name, kept)| (*name, kept.values())).collect();
    compressor.load_state(&values).map_err(|source| TrainError::CompressionState {
        path: checkpoint.path().to_owned(),
        unit: unit.to_owned(),
        source,
    })
}
