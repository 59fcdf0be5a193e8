//! A small job with known tensor values, saved by ranks that are threads.

use std::path::{Path, PathBuf};
use trireme_base::{DType, Rank};
use trireme_checkpoint::{CheckpointError, ExtraFile, InMemory, Saved, Snapshot, save};
use trireme_comm::{Group, GroupOptions, inproc_world_with};
use trireme_plan::{Axis, Extent, Mesh, Placement, TensorPlacement};

pub(crate) fn mesh(degree: usize) -> Mesh {
    Mesh::new(&[(Axis::DATA_REPLICATE, degree)]).expect("a mesh")
}

pub(crate) fn tensor(name: &str, shape: &[usize], dtype: DType, placement: Placement) -> TensorPlacement {
    TensorPlacement { name: name.into(), shape: shape.to_vec(), dtype, placements: vec![placement] }
}

/// Returns the bytes of `extent` of a tensor whose elements all differ.
pub(crate) fn bytes(tensor: &TensorPlacement, extent: &Extent) -> Vec<u8> {
    let num_dims = tensor.shape.len();
    let mut bytes = Vec::new();
    for index in 0..extent.num_elements() {
        let (mut rest, mut position, mut stride) = (index, 0, 1);
        for dim in (0..num_dims).rev() {
            position += (extent.start[dim] + rest % extent.shape[dim]) * stride;
            rest /= extent.shape[dim];
            stride *= tensor.shape[dim];
        }
        let value = position as u64 + 7 * tensor.name.len() as u64;
        match tensor.dtype {
            DType::F32 => bytes.extend((value as f32).to_le_bytes()),
            DType::U32 => bytes.extend((value as u32).to_le_bytes()),
            DType::U64 => bytes.extend(value.to_le_bytes()),
            _ => bytes.push(value as u8),
        }
    }
    bytes
}

/// Returns the bytes that a rank holds of a tensor with the values of [`bytes`].
pub(crate) fn held_bytes(tensor: &TensorPlacement, mesh: &Mesh, rank: Rank) -> Vec<u8> {
    let extents = tensor.extents(mesh, rank).expect("a placement");
    extents.iter().flat_map(|extent| bytes(tensor, extent)).collect()
}

/// Runs `work` on every rank of a world of threads.
pub(crate) fn on_ranks<T: Send>(world_size: usize, work: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = inproc_world_with(world_size, &GroupOptions::default())
            .into_iter()
            .map(|group| scope.spawn(move || work(&group)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

pub(crate) const FILES: [ExtraFile<'static>; 2] = [
    ExtraFile { name: "config.toml", contents: b"[training]\nseed = 1\n" },
    ExtraFile { name: "config.json", contents: br#"{"model_type": "gpt2"}"# },
];

/// Saves `tensors` on `degree` ranks. `change` may corrupt the bytes of a rank.
pub(crate) fn save_changed(
    folder: &Path,
    step: u64,
    tensors: &[TensorPlacement],
    degree: usize,
    change: impl Fn(Rank, &mut Vec<Vec<u8>>) + Sync,
) -> Vec<Result<Saved, CheckpointError>> {
    let mesh = mesh(degree);
    let state = serde_json::json!({ "tokens_seen": step * 1000 });
    on_ranks(degree, |group| {
        let mut held: Vec<Vec<u8>> =
            tensors.iter().map(|tensor| held_bytes(tensor, &mesh, group.rank())).collect();
        change(group.rank(), &mut held);
        let held: Vec<&[u8]> = held.iter().map(|bytes| &bytes[..]).collect();
        let snapshot = Snapshot { step, mesh: &mesh, tensors, state: &state, files: &FILES };
        save(group, folder, &snapshot, &mut InMemory(&held), 0)
    })
}

/// Saves `tensors` on `degree` ranks and returns the checkpoint's folder.
pub(crate) fn save_all(folder: &Path, step: u64, tensors: &[TensorPlacement], degree: usize) -> PathBuf {
    let mut results = save_changed(folder, step, tensors, degree, |_, _| ());
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let saved = results.swap_remove(0).expect("every rank has saved");
    assert!(saved.cleanup_errors.is_empty(), "{:?}", saved.cleanup_errors);
    saved.path
}
