//! Every layout can load what any other layout saved.

use crate::common::{FILES, bytes, mesh, save_all, tensor};
use proptest::prelude::*;
use trireme_base::{DType, Rank};
use trireme_checkpoint::{
    Checkpoint, CheckpointError, Mismatch, SkippedCheckpoint, StoredDType, find_latest, list_checkpoints,
    set_aside,
};
use trireme_plan::{Extent, Placement, TensorPlacement};

fn any_placement(num_dims: usize) -> impl Strategy<Value = Placement> {
    (0..=num_dims + 1).prop_map(move |choice| match choice {
        choice if choice < num_dims => Placement::Shard { dim: choice },
        choice if choice == num_dims => Placement::Replicate,
        _ => Placement::Ragged { bounds: Vec::new() },
    })
}

/// Generates a tensor with two placements: of the job that saves, and of the job that loads.
fn any_tensor() -> impl Strategy<Value = (TensorPlacement, TensorPlacement)> {
    let dtype = prop::sample::select(vec![DType::F32, DType::U8, DType::U64]);
    (prop::collection::vec(0..6_usize, 0..4), dtype).prop_flat_map(|(shape, dtype)| {
        let placement = any_placement(shape.len());
        (placement, any_placement(shape.len())).prop_map(move |(writer, reader)| {
            (tensor("", &shape, dtype, writer), tensor("", &shape, dtype, reader))
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_layout_loads_what_any_layout_saved(
        mut tensors in prop::collection::vec(any_tensor(), 0..5), writers in 1..5_usize, readers in 1..5_usize,
    ) {
        for (index, (writer, reader)) in tensors.iter_mut().enumerate() {
            for (tensor, degree) in [(&mut *writer, writers), (&mut *reader, readers)] {
                split_for(tensor, degree);
            }
            writer.name = format!("layer.{index}.{}", "w".repeat(index));
            reader.name = writer.name.clone();
        }
        let (written, read): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
        let folder = tempfile::tempdir().unwrap();
        let path = save_all(folder.path(), 3, &written, writers);
        let checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.tensors().check_against(&read).unwrap();
        for tensor in &read {
            for rank in 0..readers {
                for extent in tensor.extents(&mesh(readers), Rank(rank)).unwrap() {
                    let expected = bytes(tensor, &extent);
                    let mut loaded = vec![0; expected.len()];
                    checkpoint.tensors().read_into(&tensor.name, &extent, &mut loaded).unwrap();
                    prop_assert_eq!(loaded, expected);
                }
            }
        }
    }
}

/// Splits a ragged tensor among `degree` ranks. Earlier runs are shorter, and may be empty.
fn split_for(tensor: &mut TensorPlacement, degree: usize) {
    let num_elements: usize = tensor.shape.iter().product();
    if let [Placement::Ragged { bounds }] = &mut tensor.placements[..] {
        *bounds = (0..=degree).map(|index| num_elements * index * index / (degree * degree)).collect();
    }
}

fn two_tensors() -> [TensorPlacement; 2] {
    [
        tensor("h.0.weight", &[4, 6], DType::F32, Placement::Shard { dim: 1 }),
        tensor("optimizer.exp_avg.h.0.weight", &[4, 6], DType::F32, Placement::Replicate),
    ]
}

#[test]
fn a_checkpoint_holds_state_and_files_beside_the_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_all(folder.path(), 12, &two_tensors(), 2);
    assert_eq!(path, folder.path().join("step-12"));
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.step(), 12);
    assert_eq!(checkpoint.state()["tokens_seen"], 12_000);
    for file in FILES {
        assert_eq!(checkpoint.read_file(file.name).unwrap().as_deref(), Some(file.contents));
    }
    assert_eq!(checkpoint.read_file("tokenizer.json").unwrap(), None);
    assert!(checkpoint.verify().is_empty());
    let weights: Vec<String> = checkpoint.weights().iter().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(weights, ["h.0.weight"]);
}

#[test]
fn the_newest_checkpoint_that_opens_is_found_and_the_others_have_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let mut skipped = Vec::new();
    assert!(find_latest(&folder.path().join("none"), &mut skipped).unwrap().is_none());
    assert!(skipped.is_empty());
    for step in [5, 9, 10] {
        save_all(folder.path(), step, &two_tensors(), 1);
    }
    let steps: Vec<u64> =
        list_checkpoints(folder.path()).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [5, 9, 10]);
    std::fs::remove_file(folder.path().join("step-10/shard-00000.safetensors")).unwrap();
    assert_eq!(find_latest(folder.path(), &mut skipped).unwrap().unwrap().step(), 9);
    assert!(matches!(&skipped[..], [only] if only.path.ends_with("step-10")));
    // A checkpoint that the caller added to `skipped` is not opened again.
    let path = folder.path().join("step-9");
    let reason = CheckpointError::Damaged { path: path.clone(), reason: "a checksum differs".into() };
    skipped.push(SkippedCheckpoint { path: path.clone(), reason });
    assert_eq!(find_latest(folder.path(), &mut skipped).unwrap().unwrap().step(), 5);
    assert_eq!(skipped.len(), 2);
    // A checkpoint that was renamed to another step is refused.
    std::fs::rename(folder.path().join("step-5"), folder.path().join("step-7")).unwrap();
    assert!(find_latest(folder.path(), &mut skipped).unwrap().is_none());
    let aside = set_aside(&path).unwrap();
    assert!(aside.to_str().unwrap().contains("step-9.damaged-"), "{}", aside.display());
    let steps: Vec<u64> =
        list_checkpoints(folder.path()).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [7, 10]);
}

#[test]
fn all_differences_from_the_expected_tensors_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let stored: Vec<_> =
        ["a", "b", "c", "d"].map(|name| tensor(name, &[2], DType::F32, Placement::Replicate)).into();
    let checkpoint = Checkpoint::open(&save_all(folder.path(), 1, &stored, 1)).unwrap();
    checkpoint.tensors().check_against(&stored).unwrap();
    let expected = [
        tensor("a", &[2], DType::F32, Placement::Shard { dim: 0 }),
        tensor("b", &[3], DType::F32, Placement::Replicate),
        tensor("c", &[2], DType::U8, Placement::Replicate),
        tensor("e", &[7], DType::F32, Placement::Replicate),
    ];
    let Err(CheckpointError::Mismatches { mismatches, .. }) = checkpoint.tensors().check_against(&expected)
    else {
        panic!("the differences are not reported");
    };
    let name = |name: &str| name.to_owned();
    assert_eq!(
        mismatches,
        [
            Mismatch::Shape { name: name("b"), expected: vec![3], stored: vec![2] },
            Mismatch::DType { name: name("c"), expected: DType::U8, stored: StoredDType::F32 },
            Mismatch::Missing { name: name("e"), shape: vec![7] },
            Mismatch::Extra { name: name("d"), shape: vec![2] },
        ]
    );
}

#[test]
fn reading_refuses_wrong_names_extents_and_lengths() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&save_all(folder.path(), 1, &two_tensors(), 2)).unwrap();
    let read = |name: &str, start: &[usize], shape: &[usize], len: usize| {
        let extent = Extent { start: start.to_vec(), shape: shape.to_vec() };
        checkpoint.tensors().read_into(name, &extent, &mut vec![0; len]).unwrap_err()
    };
    assert!(matches!(read("other", &[0], &[1], 4), CheckpointError::NoSuchTensor { .. }));
    assert!(matches!(read("h.0.weight", &[0], &[1], 4), CheckpointError::OutsideTensor { .. }));
    assert!(matches!(read("h.0.weight", &[3, 0], &[2, 1], 8), CheckpointError::OutsideTensor { .. }));
    assert!(matches!(read("h.0.weight", &[3, 0], &[1, 1], 8), CheckpointError::WrongLength { .. }));
}
