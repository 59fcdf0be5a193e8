//! fp8 in a run: its recipe, and the amax histories in checkpoints.

use crate::config;
use crate::error::TrainError;
use std::path::Path;
use trireme_base::DType;
use trireme_checkpoint::{OPTIMIZER_PREFIX, StoredTensors};
use trireme_plan::{Extent, Mesh, TensorPlacement};
use trireme_tensor::{Fp8Formats, Fp8Recipe, Fp8State, ParameterId, ParameterTable};

/// Says where fp8 is emulated.
pub const FP8_NOTICE: &str = "fp8 multiplications need a GPU of compute capability 8.9 or later, and sizes that are multiples of 16; \
                              elsewhere, and in the layers of experts, values are rounded to fp8 but multiplied in bf16, which is not \
                              faster";

/// Returns the fp8 recipe of a config, or `None` without fp8.
pub(crate) fn recipe(training: &config::Training) -> Option<Fp8Recipe> {
    let formats = match training.fp8 {
        config::Fp8::Off => return None,
        config::Fp8::E4m3 => Fp8Formats::E4m3,
        config::Fp8::Hybrid => Fp8Formats::Hybrid,
    };
    let (amax_history_len, margin) = (training.fp8_amax_history_len, training.fp8_margin);
    Some(Fp8Recipe { formats, amax_history_len, margin })
}

/// Returns the name of each layer's amax history in a checkpoint. It contains the name of the first parameter of the layer's weight.
fn history_names<'a>(state: &'a Fp8State, table: &'a ParameterTable) -> impl Iterator<Item = String> + 'a {
    let name = |id: &ParameterId| &table.parameters()[id.0].name;
    state.layers().iter().map(move |id| format!("{OPTIMIZER_PREFIX}fp8_amax_history.{}", name(id)))
}

/// Returns the placement of every layer's amax history in a checkpoint.
pub(crate) fn history_placements(
    state: &Fp8State,
    table: &ParameterTable,
    mesh: &Mesh,
) -> Vec<TensorPlacement> {
    let placement = |(layer, name): (usize, String)| {
        let (_, shape) = state.history(layer);
        TensorPlacement::replicated(name, &shape, DType::F32, mesh)
    };
    history_names(state, table).enumerate().map(placement).collect()
}

/// Reads the amax history of every layer for which the checkpoint at `path` has one. Checkpoints of runs without fp8 have none.
pub(crate) fn read_histories(
    stored: &StoredTensors,
    state: &mut Fp8State,
    table: &ParameterTable,
    path: &Path,
) -> Result<(), TrainError> {
    let names: Vec<String> = history_names(state, table).collect();
    for (layer, name) in names.into_iter().enumerate() {
        let Some(tensor) = stored.get(&name) else { continue };
        let shape = tensor.shape();
        // The size is checked before memory is allocated. `restore` checks the rest.
        let is_small = matches!(shape, [3, len] if *len <= config::FP8_AMAX_HISTORY_LEN_MAX);
        let restored = is_small && tensor.dtype() == Some(DType::F32) && {
            let mut history = vec![0.0_f32; shape.iter().product()];
            stored.read_into(&name, &Extent::full(shape), bytemuck::cast_slice_mut(&mut history))?;
            state.restore(layer, &history, shape)
        };
        if !restored {
            let shape = shape.to_vec();
            return Err(TrainError::Fp8History { path: path.to_owned(), name, shape });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_checkpoint::{Checkpoint, InMemory, Snapshot, save};
    use trireme_tensor::{Device, DeviceOptions, Initial, Parameter};

    fn layers() -> (ParameterTable, Vec<ParameterId>) {
        let mut table = ParameterTable::default();
        table.begin_unit("block");
        let spans =
            ["norm", "in", "out"].map(|name| table.add(Parameter::matrix(name, &[2, 2], Initial::ZEROS)));
        (table, spans[1..].iter().map(|span| span.first).collect())
    }

    fn state(layers: &[ParameterId], amax_history_len: usize) -> Fp8State {
        let device = Device::counting(DeviceOptions::default()).unwrap();
        let recipe = Fp8Recipe { formats: Fp8Formats::Hybrid, amax_history_len, margin: 0 };
        Fp8State::new(recipe, layers.to_vec(), &device).unwrap()
    }

    fn saved(tensors: &[TensorPlacement], values: &[&[f32]], folder: &Path) -> Checkpoint {
        let (mesh, state) = (Mesh::data_parallel(1), serde_json::Value::Null);
        let bytes: Vec<&[u8]> = values.iter().map(|values| bytemuck::cast_slice(values)).collect();
        let snapshot = Snapshot { step: 1, mesh: &mesh, tensors, state: &state, files: &[] };
        let path = save(&trireme_comm::single(), folder, &snapshot, &mut InMemory(&bytes), 1).unwrap().path;
        Checkpoint::open(&path).unwrap()
    }

    #[test]
    fn histories_round_trip_through_a_checkpoint() {
        let (table, layers) = layers();
        let mut kept = state(&layers, 2);
        kept.advance(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        kept.advance(&[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]);
        let tensors = history_placements(&kept, &table, &Mesh::data_parallel(1));
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["optimizer.fp8_amax_history.in", "optimizer.fp8_amax_history.out"]);
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = saved(&tensors, &[kept.history(0).0, kept.history(1).0], folder.path());
        let mut found = state(&layers, 2);
        read_histories(checkpoint.tensors(), &mut found, &table, folder.path()).unwrap();
        assert!((0..2).all(|layer| found.history(layer) == kept.history(layer)));
        // A longer history begins with the stored steps. A layer without a stored history stays unchanged.
        let mut longer = state(&layers, 3);
        let only_out =
            checkpoint.tensors().renamed(|name| name.ends_with("out").then(|| name.to_owned())).unwrap();
        read_histories(&only_out, &mut longer, &table, folder.path()).unwrap();
        assert_eq!(longer.history(0).0, [0.0; 9]);
        assert_eq!(longer.history(1).0, [0.4, 4.0, 0.0, 0.5, 5.0, 0.0, 0.6, 6.0, 0.0]);
    }

    #[test]
    fn invalid_histories_are_refused_by_name() {
        let (table, layers) = layers();
        let bad = [1.0, 2.0, f32::NAN];
        let long = vec![1.0_f32; 3 * (config::FP8_AMAX_HISTORY_LEN_MAX + 1)];
        let cases: [(&[f32], Vec<usize>, DType); 5] = [
            (&bad, vec![3, 1], DType::F32),
            (&bad[..2], vec![2, 1], DType::F32),
            (&bad[..2], vec![2], DType::F32),
            (&bad[..3], vec![3, 1], DType::U32),
            (&long, vec![3, long.len() / 3], DType::F32),
        ];
        for (values, shape, dtype) in cases {
            let name = "optimizer.fp8_amax_history.out";
            let placement = TensorPlacement::replicated(name, &shape, dtype, &Mesh::data_parallel(1));
            let folder = tempfile::tempdir().unwrap();
            let checkpoint = saved(&[placement], &[values], folder.path());
            let read =
                read_histories(checkpoint.tensors(), &mut state(&layers, 1), &table, Path::new("step-1"));
            let error = read.unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{name} of shape {shape:?} in step-1 is not a valid fp8 history")),
                "{error}"
            );
        }
    }
}
