//! Damaged files are refused. Failed saves are reported on every rank and leave nothing behind.

use crate::common::{bytes, held_bytes, mesh, on_ranks, save_all, save_changed, tensor};
use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use trireme_base::{DType, Rank};
use trireme_checkpoint::{
    Checkpoint, CheckpointError, ExtraFile, InMemory, Saved, Snapshot, clean_up, find_latest, save,
};
use trireme_plan::{Extent, Placement, TensorPlacement};

fn example() -> [TensorPlacement; 2] {
    [
        tensor("w", &[4, 3], DType::F32, Placement::Shard { dim: 0 }),
        tensor("bias", &[5], DType::U8, Placement::Replicate),
    ]
}

fn files_of(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Reads all tensors. Panics if values are wrong without an error.
fn read_all(path: &Path) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    for tensor in example() {
        let whole = Extent::full(&tensor.shape);
        let expected = bytes(&tensor, &whole);
        let mut loaded = vec![0; expected.len()];
        checkpoint.tensors().read_into(&tensor.name, &whole, &mut loaded)?;
        assert_eq!(loaded, expected);
    }
    Ok(())
}

#[test]
fn every_flipped_bit_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_all(folder.path(), 1, &example(), 2);
    read_all(&path).unwrap();
    for file in files_of(&path) {
        let contents = fs::read(&file).unwrap();
        let header_bytes = if file.extension().is_some_and(|extension| extension == "safetensors") {
            8 + contents[0] as usize + 256 * contents[1] as usize
        } else {
            contents.len()
        };
        for position in 0..contents.len() {
            let mut flipped = contents.clone();
            flipped[position] ^= 1 << (position % 8);
            fs::write(&file, flipped).unwrap();
            let verified = Checkpoint::open(&path).is_ok_and(|checkpoint| checkpoint.verify().is_empty());
            assert!(!verified, "byte {position} of {}", file.display());
            let read = read_all(&path);
            assert!(position < header_bytes || read.is_err(), "byte {position} of {}", file.display());
        }
        fs::write(&file, contents).unwrap();
    }
    read_all(&path).unwrap();
}

#[test]
fn ranks_share_a_file_that_one_rank_has_written() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let tensors = names.map(|name| tensor(name, &[32, 4], DType::F32, Placement::Replicate));
    let path = save_all(folder.path(), 1, &tensors, 1);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let num_ranks = 4;
    let finders = || -> Vec<usize> {
        (0..num_ranks).filter(|&rank| !checkpoint.verify_share(rank, num_ranks, &|| {}).is_empty()).collect()
    };
    assert!(finders().is_empty());
    let mut found_by = [0; 4];
    for file in files_of(&path).iter().filter(|file| !file.ends_with("checkpoint.json")) {
        let contents = fs::read(file).unwrap();
        for position in (0..contents.len()).step_by(8) {
            let mut flipped = contents.clone();
            flipped[position] ^= 1 << (position / 8 % 8);
            fs::write(file, flipped).unwrap();
            let finders = finders();
            assert!(matches!(finders[..], [_]), "byte {position} of {}: {finders:?}", file.display());
            found_by[finders[0]] += 8;
        }
        fs::write(file, &contents).unwrap();
        fs::write(file, [&contents[..], &[0]].concat()).unwrap();
        assert!(!finders().is_empty(), "{} has grown", file.display());
        fs::write(file, contents).unwrap();
    }
    // The largest piece is the shard's header.
    let (least, most) = (found_by.iter().min().unwrap(), found_by.iter().max().unwrap());
    assert!(*least >= 512 && most - least <= 1024, "{found_by:?}");
}

#[test]
fn truncated_and_missing_files_are_refused_on_opening() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_all(folder.path(), 1, &example(), 2);
    for file in files_of(&path) {
        let contents = fs::read(&file).unwrap();
        for length in 0..contents.len() {
            fs::write(&file, &contents[..length]).unwrap();
            assert!(Checkpoint::open(&path).is_err(), "{} cut to {length}", file.display());
        }
        fs::remove_file(&file).unwrap();
        assert!(Checkpoint::open(&path).is_err(), "{} removed", file.display());
        fs::write(&file, contents).unwrap();
    }
}

#[test]
fn a_checkpoint_that_cannot_be_accessed_is_not_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_all(folder.path(), 1, &example(), 1);
    let manifest = path.join("checkpoint.json");
    fs::rename(&manifest, path.join("moved.json")).unwrap();
    assert!(Checkpoint::open(&path).unwrap_err().is_damage(), "there is no manifest");
    // The system refuses to follow a loop of links, even for root.
    symlink(&manifest, &manifest).unwrap();
    let refused = Checkpoint::open(&path).unwrap_err();
    assert!(matches!(refused, CheckpointError::Read { .. }) && !refused.is_damage(), "{refused:?}");
    // The folder is not renamed in favor of a new checkpoint of the same step.
    let saved = save_changed(folder.path(), 1, &example(), 2, |_, _| ());
    assert!(saved.iter().all(Result::is_err), "{saved:?}");
    assert_eq!(files_of(folder.path()), [folder.path().join("latest"), path]);
}

#[test]
fn a_shard_of_another_checkpoint_is_refused_on_opening() {
    let folder = tempfile::tempdir().unwrap();
    let shard = |step, shape: &[usize], dtype| {
        let saved = [tensor("w", shape, dtype, Placement::Replicate)];
        save_all(folder.path(), step, &saved, 1).join("shard-00000.safetensors")
    };
    let path = shard(1, &[2, 3], DType::F32);
    for other in [shard(2, &[3, 2], DType::F32), shard(3, &[2, 3], DType::U32)] {
        fs::copy(other, &path).unwrap();
        let refused = Checkpoint::open(path.parent().unwrap()).unwrap_err().to_string();
        assert!(refused.contains("lacks 'w'"), "{refused}");
    }
}

#[test]
fn a_small_file_that_changed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_all(folder.path(), 1, &example(), 1);
    let checkpoint = Checkpoint::open(&path).unwrap();
    fs::write(path.join("config.json"), r#"{"model_type": "GPT2"}"#).unwrap();
    assert!(matches!(checkpoint.read_file("config.json"), Err(CheckpointError::Damaged { .. })));
}

/// Asserts that `folder` contains only the complete checkpoint `step-1`, which is the latest, and the file `latest`.
fn assert_only_step_1(folder: &Path) {
    let names: Vec<_> = files_of(folder).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names, ["latest", "step-1"]);
    assert_eq!(find_latest(folder, &mut Vec::new()).unwrap().unwrap().step(), 1);
}

#[test]
fn a_failure_on_one_rank_fails_all_ranks_and_leaves_earlier_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    save_all(folder.path(), 1, &example(), 2);
    let results = save_changed(folder.path(), 2, &example(), 3, |rank, held| {
        if rank == Rank(1) {
            held[0].pop();
        }
    });
    for (rank, result) in results.iter().enumerate() {
        match result {
            Err(CheckpointError::SaveFailedHere { step: 2, rank: Rank(1), .. }) => assert_eq!(rank, 1),
            Err(CheckpointError::SaveFailedElsewhere {
                step: 2,
                rank: Rank(1),
                reason,
                is_out_of_space: false,
            }) => {
                assert!(rank != 1 && reason.contains("'w'"), "{reason}");
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
    assert_only_step_1(folder.path());
}

#[test]
fn a_failed_cleanup_does_not_fail_the_save_and_is_retried() {
    let folder = tempfile::tempdir().unwrap();
    let latest = folder.path().join("latest");
    save_all(folder.path(), 1, &example(), 2);
    fs::remove_file(&latest).unwrap();
    fs::create_dir_all(latest.join("in the way")).unwrap();
    // A leftover need not be a folder.
    fs::write(folder.path().join("step-9.partial-0123abcd"), "").unwrap();
    for step in [2, 3] {
        let results = save_changed(folder.path(), step, &example(), 2, |_, _| ());
        let saved: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert!(
            matches!(&saved[0].cleanup_errors[..], [CheckpointError::Rename { to, .. }] if *to == latest),
            "{saved:?}"
        );
        assert!(saved[1].cleanup_errors.is_empty(), "it is for rank 0 to tidy up");
        assert!(Checkpoint::open(&saved[0].path).unwrap().verify().is_empty());
        assert!(!folder.path().join("latest.partial").exists(), "a mark that fails leaves nothing behind");
    }
    fs::remove_dir_all(&latest).unwrap();
    save_all(folder.path(), 4, &example(), 2);
    assert_eq!(fs::read_to_string(&latest).unwrap(), "step-4\n");
    let names: Vec<_> =
        files_of(folder.path()).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names, ["latest", "step-1", "step-2", "step-3", "step-4"]);
}

/// A rank that reports no progress counts as hung to the ranks that wait for it.
#[test]
fn reading_and_removing_report_progress() {
    let folder = tempfile::tempdir().unwrap();
    let (mesh, state) = (mesh(1), serde_json::Value::Null);
    let tensors = ["a", "b", "c"].map(|name| tensor(name, &[32, 4], DType::F32, Placement::Replicate));
    let values = vec![0; 32 * 4 * 4];
    // The file is read in four buffers.
    let files = [ExtraFile { name: "tokenizer.json", contents: &vec![b' '; 1 << 20] }];
    for step in 1..=3 {
        let snapshot = Snapshot { step, mesh: &mesh, tensors: &tensors, state: &state, files: &files };
        save(&trireme_comm::single(), folder.path(), &snapshot, &mut InMemory(&[&values[..]; 3]), 0).unwrap();
    }
    let num_calls = Cell::new(0);
    let progress = || num_calls.set(num_calls.get() + 1);
    let newest = folder.path().join("step-3");
    assert!(Checkpoint::open(&newest).unwrap().verify_share(0, 1, &progress).is_empty());
    assert!(num_calls.replace(0) >= tensors.len() + 4);
    let num_removed = 2 * files_of(&newest).len();
    assert!(clean_up(folder.path(), 3, 1, &progress).is_empty());
    assert_eq!(files_of(folder.path()).len(), 2, "the newest and a link to it");
    assert!(num_calls.get() >= num_removed);
}

#[test]
fn saving_reports_progress() {
    let (folder, group, mesh) = (tempfile::tempdir().unwrap(), trireme_comm::single(), mesh(1));
    let heartbeat = group.heartbeat().clone();
    while heartbeat.age() < Duration::from_millis(20) {
        std::thread::yield_now();
    }
    let began = Instant::now();
    let tensors = [tensor("a", &[32, 4], DType::F32, Placement::Replicate)];
    let state = serde_json::Value::Null;
    let snapshot = Snapshot { step: 1, mesh: &mesh, tensors: &tensors, state: &state, files: &[] };
    save(&group, folder.path(), &snapshot, &mut InMemory(&[&[0; 32 * 4 * 4]]), 0).unwrap();
    // The heartbeat counts whole milliseconds.
    assert!(heartbeat.age() <= began.elapsed() + Duration::from_millis(1));
}

#[test]
fn leftovers_of_a_failed_cleanup_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    for step in 1..=3 {
        save_all(folder.path(), step, &example(), 2);
    }
    fs::remove_file(folder.path().join("latest")).unwrap();
    fs::create_dir(folder.path().join("step-2.partial-0123abcd")).unwrap();
    let newest = Checkpoint::open(&folder.path().join("step-3")).unwrap();
    let names = || -> Vec<_> {
        let name = |path: &PathBuf| path.file_name().unwrap().to_owned();
        files_of(folder.path()).iter().map(name).collect()
    };
    assert!(clean_up(folder.path(), 3, 0, &|| {}).is_empty());
    assert_eq!(names(), ["latest", "step-1", "step-2", "step-3"]);
    assert!(clean_up(folder.path(), 3, 1, &|| {}).is_empty());
    assert_eq!(names(), ["latest", "step-3"]);
    assert!(newest.verify().is_empty());
}

#[test]
fn a_file_named_like_a_checkpoint_is_renamed() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("step-2"), "thesis").unwrap();
    save_all(folder.path(), 2, &example(), 1);
    let kept =
        files_of(folder.path()).into_iter().find(|path| path.to_str().unwrap().contains("step-2.damaged-"));
    assert_eq!(fs::read(kept.expect("it is set aside")).unwrap(), b"thesis");
}

#[test]
fn a_rank_that_cannot_write_fails_the_save_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    save_all(folder.path(), 1, &example(), 1);
    let elsewhere = tempfile::tempdir().unwrap();
    let results = on_ranks(2, |group| {
        // Rank 1 uses another disk, without the folder that rank 0 created.
        let folder = if group.rank() == Rank(1) { elsewhere.path() } else { folder.path() };
        let mesh = mesh(2);
        let held = example().map(|tensor| held_bytes(&tensor, &mesh, group.rank()));
        let snapshot = Snapshot {
            step: 2,
            mesh: &mesh,
            tensors: &example(),
            state: &serde_json::Value::Null,
            files: &[],
        };
        save(group, folder, &snapshot, &mut InMemory(&[&held[0], &held[1]]), 0)
    });
    assert!(
        matches!(&results[0], Err(CheckpointError::SaveFailedElsewhere { rank: Rank(1), reason, .. }) if reason.contains("shard-00001")),
        "{results:?}"
    );
    assert!(matches!(results[1], Err(CheckpointError::SaveFailedHere { .. })));
    assert_only_step_1(folder.path());
    assert_eq!(files_of(elsewhere.path()).len(), 0);
}

/// Returns the error of this rank that made `result` fail.
fn reason(result: Result<Saved, CheckpointError>) -> CheckpointError {
    match result {
        Err(CheckpointError::SaveFailedHere { source, .. }) => *source,
        other => panic!("no failure on this rank: {other:?}"),
    }
}

#[test]
fn a_complete_checkpoint_is_never_overwritten_but_a_damaged_one_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    save_all(folder.path(), 1, &example(), 1);
    for step in [0, 1] {
        let mut results = save_changed(folder.path(), step, &example(), 2, |_, _| ());
        assert!(matches!(reason(results.swap_remove(0)), CheckpointError::NotNewer { .. }));
        assert_only_step_1(folder.path());
    }
    fs::write(folder.path().join("step-1/checkpoint.json"), "{}").unwrap();
    save_all(folder.path(), 1, &example(), 2);
    let aside = files_of(folder.path()).swap_remove(2);
    assert!(aside.to_str().unwrap().contains("step-1.damaged-"), "{}", aside.display());
    fs::remove_dir_all(aside).unwrap();
    assert_only_step_1(folder.path());
}

#[test]
fn a_folder_that_cannot_be_made_fails_the_save() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let mut results = save_changed(&file.join("checkpoints"), 1, &example(), 2, |_, _| ());
    let text = results.swap_remove(1).unwrap_err().to_string();
    assert!(text.contains("rank 0") && text.contains("checkpoints"), "{text}");
}

#[test]
fn ranks_that_save_different_things_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let results = on_ranks(2, |group| {
        let mesh = mesh(2);
        let shape = [2 + group.rank().0];
        let placement = tensor("w", &shape, DType::U8, Placement::Replicate);
        let (tensors, bytes) = ([placement], [&[0; 3][..shape[0]]]);
        let snapshot =
            Snapshot { step: 2, mesh: &mesh, tensors: &tensors, state: &serde_json::Value::Null, files: &[] };
        save(group, folder.path(), &snapshot, &mut InMemory(&bytes), 0)
    });
    for result in results {
        assert!(matches!(result, Err(CheckpointError::RanksDisagree { rank: Rank(1) })), "{result:?}");
    }
    assert_eq!(files_of(folder.path()).len(), 0);
}

#[test]
fn files_that_would_escape_or_replace_the_checkpoints_own_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mesh = mesh(1);
    for name in ["../outside", "a/b", "", "checkpoint.json", "shard-00000.safetensors"] {
        let files = [ExtraFile { name, contents: b"" }];
        let snapshot =
            Snapshot { step: 1, mesh: &mesh, tensors: &[], state: &serde_json::Value::Null, files: &files };
        let refused = reason(save(&trireme_comm::single(), folder.path(), &snapshot, &mut InMemory(&[]), 0));
        assert!(matches!(refused, CheckpointError::FileName { .. }), "{name}");
    }
    let wrong_mesh = crate::common::mesh(2);
    let snapshot =
        Snapshot { step: 1, mesh: &wrong_mesh, tensors: &[], state: &serde_json::Value::Null, files: &[] };
    let refused = reason(save(&trireme_comm::single(), folder.path(), &snapshot, &mut InMemory(&[]), 0));
    assert!(matches!(refused, CheckpointError::MeshSize { mesh: 2, group: 1 }));
}
