//! Notices and metrics of compressed gradients, and runs that change their compression or their layout.

use crate::common::recording_observer::RecordingObserver;
use crate::common::{job, open, trainer};
use serde_json::Value;
use std::path::{Path, PathBuf};
use trireme_checkpoint::{Checkpoint, ExtraFile, InMemory, Snapshot, StoredTensor, save};
use trireme_plan::{Extent, Mesh, TensorPlacement};
use trireme_testkit::run_ranks;
use trireme_train::NullObserver;
use trireme_train::config::Config;

fn config(folder: &Path, world_size: usize, steps: u64, keys: &[&str]) -> Config {
    job(folder, "run", world_size, steps, &[&["training.determinism=run"], keys].concat())
}

/// Trains the run up to `steps`. Returns the notices and losses of rank 0, which are equal on all ranks.
fn train(folder: &Path, world_size: usize, steps: u64, keys: &[&str]) -> RecordingObserver {
    let config = config(folder, world_size, steps, keys);
    let mut ranks = run_ranks(world_size, |group| {
        let mut observed = RecordingObserver::default();
        trainer(&config, group, &mut observed).run().unwrap();
        observed
    });
    assert!(ranks.iter().all(|rank| rank.notices == ranks[0].notices && rank.losses == ranks[0].losses));
    ranks.remove(0)
}

#[test]
fn a_run_that_changes_compression_or_layout_reports_lost_state() {
    let folder = tempfile::tempdir().unwrap();
    let top_k = "comm.compression=top_k";
    let changes: [(usize, &[&str], &str, &str); 8] = [
        (1, &[top_k], "a single worker sends nothing, so nothing is compressed", ""),
        (2, &[top_k], "gradients of 4 of 4 units are compressed by top_k (ratio = 0.01", ""),
        // The state of the same codec on the same number of workers is kept.
        (2, &[top_k, "comm.compression_ratio=0.02"], "top_k (ratio = 0.02", ""),
        (
            4,
            &[top_k],
            "units are compressed by top_k",
            "of compression top_k on 2 workers, but this run uses top_k on 4.",
        ),
        (
            4,
            &[top_k, "comm.compression_error_feedback=false"],
            "error_feedback = false",
            "on 4 workers, but top_k (ratio = 0.01, momentum = 0, warmup_steps = 0, error_feedback = false, normalize = false) keeps different \
             state, or layers are cut in another way.",
        ),
        (4, &["comm.compression=one_bit"], "by one_bit (block_len = 1024", "but this run uses one_bit on 4."),
        (
            1,
            &["comm.compression=one_bit"],
            "a single worker",
            "of compression one_bit on 4 workers, but this run does not compress.",
        ),
        (2, &[], "", ""),
    ];
    let mut first_loss = None;
    for (index, (world_size, keys, about_codec, about_state)) in changes.into_iter().enumerate() {
        let observed = train(folder.path(), world_size, 5 * (index as u64 + 1), keys);
        let expected = [about_codec, about_state];
        let expected: Vec<&str> = expected.into_iter().filter(|part| !part.is_empty()).collect();
        assert_eq!(observed.notices.len(), expected.len(), "{:?}", observed.notices);
        for (notice, part) in observed.notices.iter().zip(expected) {
            assert!(notice.contains(part), "{notice}");
        }
        if !about_state.is_empty() {
            let lost = "The state was ignored: gradients that earlier steps have not sent yet are lost";
            let restarts = ", and compression restarts with its warm-up";
            let restarts = if about_state.contains("does not compress") { "" } else { restarts };
            assert!(observed.notices[1].ends_with(&format!("{lost}{restarts}")), "{:?}", observed.notices);
        }
        assert_eq!(observed.losses.len(), 5);
        let first_loss = *first_loss.get_or_insert(observed.losses[0]);
        assert!(observed.losses[4] < first_loss, "{:?}", observed.losses);
    }
}

#[test]
fn tensor_parallel_workers_resume_compressor_state() {
    for codec in [&["comm.compression=top_k"][..], &["comm.compression=powersgd", "comm.compression_rank=2"]]
    {
        let keys = [codec, &["parallelism.tensor_parallel_degree=2"]].concat();
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [straight, halted] = folders.each_ref().map(|folder| folder.path());
        let expected = train(straight, 4, 5, &keys).losses;
        train(halted, 4, 2, &keys);
        let resumed = train(halted, 4, 5, &keys);
        assert_eq!(resumed.losses, expected[2..], "{codec:?}: {:?}", resumed.notices);
    }
}

/// A worker of a pipeline compresses the same gradients as a worker without a pipeline, if both have the same data-parallel degree.
#[test]
fn workers_of_a_pipeline_compress_and_resume_as_others_do() {
    const PIPELINE: &str = "parallelism.pipeline_parallel_degree=2";
    // The gradient of a tied head is summed in another order.
    const UNTIED: &str = "model.tie_word_embeddings=false";
    let one_bit_adam = [
        "optimizer.name=one_bit_adam",
        "optimizer.freeze_step=2",
        "training.max_norm=0",
        "optimizer.weight_decay=0",
    ];
    // A schedule that updates each unit as soon as it can, and drains after each step.
    let eager = [
        "parallelism.pipeline_parallel_schedule=pipedream",
        "parallelism.pipeline_parallel_drain_interval=1",
    ];
    for codec in [&["comm.compression=top_k"][..], &["comm.compression=one_bit"], &one_bit_adam] {
        for schedule in [&[][..], &eager] {
            let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
            let [straight, halted] = folders.each_ref().map(|folder| folder.path());
            let keys = [codec, &[UNTIED, "training.max_norm=0"]].concat();
            let expected = train(straight, 2, 5, &keys);
            let keys = [&keys, &[PIPELINE][..], schedule].concat();
            let begun = train(halted, 4, 3, &keys);
            assert!(begun.notices.ends_with(&expected.notices), "{:?}", begun.notices);
            assert_eq!(begun.losses, expected.losses[..3], "{keys:?}");
            let resumed = train(halted, 4, 5, &keys);
            assert_eq!(resumed.losses, expected.losses[3..], "{keys:?}: {:?}", resumed.notices);
        }
    }
}

/// Each step of a program without drains exchanges either gradients or momentum, and its record shows which.
#[test]
fn momentum_is_exchanged_from_the_step_on_that_freezes_the_second_moment() {
    let folder = tempfile::tempdir().unwrap();
    let keys = [
        "model.tie_word_embeddings=false",
        "parallelism.pipeline_parallel_degree=2",
        "parallelism.pipeline_parallel_schedule=pipedream",
        "parallelism.pipeline_parallel_drain_interval=5",
        "optimizer.name=one_bit_adam",
        "optimizer.freeze_step=2",
        "training.max_norm=0",
    ];
    train(folder.path(), 4, 5, &keys);
    let metrics =
        std::fs::read_to_string(config(folder.path(), 4, 5, &keys).run_folder().join("metrics.jsonl"))
            .unwrap();
    let records: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let saved = |record: &Value| record["compression_bytes_saved"].as_u64().unwrap() > 0;
    assert_eq!(records.iter().map(saved).collect::<Vec<_>>(), [false, false, true, true, true]);
}

#[test]
fn a_compression_that_saves_no_bytes_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let observed = train(folder.path(), 8, 1, &["comm.compression=int8"]);
    let expected = "compression int8 (block_len = 256, warmup_steps = 0, error_feedback = false, normalize = false) would not save any bytes among 8 \
                    workers, so gradients are sent uncompressed";
    assert_eq!(observed.notices, [expected]);
}

#[test]
fn metrics_report_saved_bytes_and_compression_errors() {
    let folder = tempfile::tempdir().unwrap();
    let records = |name: &str, keys: &[&str]| -> Vec<Value> {
        let keys = [&["training.determinism=run"], keys].concat();
        let config = job(folder.path(), name, 2, 3, &keys);
        run_ranks(2, |group| drop(trainer(&config, group, &mut NullObserver).run().unwrap()));
        let text = std::fs::read_to_string(config.run_folder().join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let (plain, top_k) = (records("plain", &[]), records("top_k", &["comm.compression=top_k"]));
    for (plain, top_k) in plain.iter().zip(&top_k) {
        assert!(
            plain.get("compression_bytes_saved").is_none() && plain.get("compression_error_norm").is_none()
        );
        // In an all-reduce, each of two ranks sends as many elements as the vector has, whatever the algorithm.
        let bytes = |record: &Value, key: &str| record[key].as_u64().unwrap();
        let saved = bytes(plain, "comm_bytes") - bytes(top_k, "comm_bytes");
        assert_eq!(bytes(top_k, "compression_bytes_saved"), saved);
        assert!(10 * saved > 9 * bytes(plain, "comm_bytes"), "nearly all of it: {saved}");
        let error = top_k["compression_error_norm"].as_f64().unwrap();
        let norm = top_k["grad_norm"].as_f64().unwrap();
        assert!(error > 0.1 * norm, "much of the gradient is late: {error}, {norm}");
    }
    // The error adds up over the steps.
    let errors: Vec<f64> =
        top_k.iter().map(|record| record["compression_error_norm"].as_f64().unwrap()).collect();
    assert!(errors.is_sorted(), "{errors:?}");
}

#[test]
fn stored_gradients_are_rescaled_when_the_loss_scale_changes() {
    let folder = tempfile::tempdir().unwrap();
    let keys = ["comm.compression=top_k", "training.dtype=f16"];
    let run = |name: &str, steps, scale: &str| {
        let keys = [&keys[..], &["training.determinism=run", scale]].concat();
        let config = job(folder.path(), name, 2, steps, &keys);
        run_ranks(2, |group| {
            let mut observed = RecordingObserver::default();
            trainer(&config, group, &mut observed).run().unwrap();
            observed.losses
        })
        .remove(0)
    };
    // Apart from the scale, gradients in f16 have the same bits at both scales unless they underflow, and few do.
    let whole = run("whole", 10, "training.loss_scale=1024");
    run("cut", 5, "training.loss_scale=1024");
    let rest = run("cut", 10, "training.loss_scale=4096");
    for (rest, whole) in rest.iter().zip(&whole[5..]) {
        assert!((rest / whole - 1.0).abs() < 1e-3, "{rest} instead of {whole}");
    }
}

#[test]
fn a_state_that_is_not_finite_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let keys = [
        "training.determinism=run",
        "comm.compression=top_k",
        "comm.compression_momentum=0.5",
        "optimizer.name=sgd",
        "optimizer.momentum=0",
    ];
    let first = job(folder.path(), "first", 1, 5, &keys);
    trainer(&first, trireme_comm::single(), &mut NullObserver).run().unwrap();
    let damaged = folder.path().join("damaged");
    let resume = |path: &Path| {
        let config = job(
            folder.path(),
            "rest",
            1,
            10,
            &[&keys[..], &[&format!("checkpoint.resume={path:?}")]].concat(),
        );
        open(&config, trireme_comm::single(), &mut NullObserver).err().map(|error| error.to_string())
    };
    let original = first.run_folder().join("checkpoints/step-5");
    assert_eq!(resume(&original), None);
    let path = copy_with_nan(&original, &damaged, "optimizer.compression_velocity.head");
    let error = resume(&path).expect("a refusal");
    assert!(error.contains("the compressor of head in") && error.contains("damaged/step-5"), "{error}");
}

/// Momentum that one optimizer has not sent yet has no meaning for another optimizer.
#[test]
fn momentum_that_another_optimizer_kept_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let keys = ["training.max_norm=0", "optimizer.name=one_bit_adam", "optimizer.freeze_step=2"];
    train(folder.path(), 2, 5, &keys);
    let original = config(folder.path(), 2, 5, &keys).run_folder().join("checkpoints/step-5");
    let residual = "optimizer.compression_residual.head";
    let damaged = copy_with_nan(&original, &folder.path().join("damaged"), residual);
    let resume = |optimizer: &[&str]| {
        let changes = [
            &format!("checkpoint.resume={damaged:?}"),
            "checkpoint.allow_changed=[\"optimizer\"]",
            "training.max_norm=0",
            "training.determinism=run",
        ];
        let rest = job(folder.path(), "rest", 2, 10, &[&changes, optimizer].concat());
        run_ranks(2, |group| open(&rest, group, &mut NullObserver).err().map(|error| error.to_string()))
            .remove(0)
    };
    let error = resume(&keys[1..]).expect("a refusal");
    assert!(error.contains("the compressor of head"), "{error}");
    assert_eq!(resume(&["optimizer.name=zero_one_adam"]), None);
}

/// Saves the tensors of a checkpoint again, with NaN as the first element of one of them.
fn copy_with_nan(original: &Path, folder: &Path, damaged: &str) -> PathBuf {
    let (checkpoint, mesh) = (Checkpoint::open(original).unwrap(), Mesh::data_parallel(1));
    let read = |(name, tensor): (&str, &StoredTensor)| {
        let placement = TensorPlacement::replicated(name, tensor.shape(), tensor.dtype().unwrap(), &mesh);
        let mut bytes = vec![0; tensor.stored_bytes() as usize];
        checkpoint.tensors().read_into(name, &Extent::full(tensor.shape()), &mut bytes).unwrap();
        if name == damaged {
            bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        (placement, bytes)
    };
    let (tensors, values): (Vec<_>, Vec<_>) = checkpoint.tensors().iter().map(read).unzip();
    let values: Vec<&[u8]> = values.iter().map(|bytes| &bytes[..]).collect();
    let config = checkpoint.read_file("config.toml").unwrap().unwrap();
    let files = &[ExtraFile { name: "config.toml", contents: &config }];
    let snapshot = Snapshot { step: 5, mesh: &mesh, tensors: &tensors, state: checkpoint.state(), files };
    save(&trireme_comm::single(), folder, &snapshot, &mut InMemory(&values), 1).unwrap().path
}
