use super::*;
use crate::error::TrainError;

/// Returns the timeline of a rank in a pipeline of `num_ranks`, with one unit per rank.
pub(super) fn rank(rank: usize, num_ranks: usize) -> RankTimeline {
    let stages: String = (0..num_ranks).map(|rank| format!(" stage {rank}-{}@{rank}", rank + 1)).collect();
    let outline = format!("units {num_ranks} microbatches 1 rank {rank}{stages}");
    let texts = [format!("F {rank} 0"), format!("B {rank} 0"), format!("STEP {rank}")];
    let action = |(index, text): (u64, &String)| TracedAction {
        action: text.parse().unwrap(),
        issued: 1000 * index,
        start: 1000 * index + 400,
        end: 1000 * index + 1000,
        product_flops: 7 * index,
        kernels: (index % 2 == 1).then_some([1000 * index + 500, 1000 * index + 2500]),
    };
    RankTimeline {
        place: RankPlace { rank, pipeline_rank: rank, data_rank: 0, host: 0 },
        header: outline.parse().unwrap(),
        peak_flops: (rank > 0).then_some(2e9),
        duration: 6500,
        actions: (0..).zip(&texts).map(action).collect(),
    }
}

fn steps() -> Vec<TracedStep> {
    let step = |step| {
        let mut ranks = vec![rank(0, 2), rank(1, 2)];
        // Rank 1 waits long before its first pass.
        ranks[1].actions[0].start = 2700 + step;
        ranks[1].actions.iter_mut().for_each(|traced| traced.end += 3000);
        ranks[1].actions[1..].iter_mut().for_each(|traced| {
            traced.issued += 3000;
            traced.start += 3000;
            traced.kernels = traced.kernels.map(|times| times.map(|time| time + 3000));
        });
        TracedStep { step, began: 10_000 * step, model_flops: 20.5, ranks }
    };
    vec![step(10), step(20)]
}

#[test]
fn a_written_trace_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(TRACE_FILE);
    file::write(&path, &steps()[..1]).unwrap();
    file::write(&path, &steps()).unwrap();
    let mut expected = steps();
    // The first step of a file begins at 0.
    (expected[0].began, expected[1].began) = (0, 100_000);
    assert_eq!(read(folder.path()).unwrap(), expected);
    let names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [TRACE_FILE]);
}

#[test]
fn the_file_is_what_viewers_read() {
    let folder = tempfile::tempdir().unwrap();
    file::write(&folder.path().join(TRACE_FILE), &steps()).unwrap();
    let text = std::fs::read_to_string(folder.path().join(TRACE_FILE)).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = value["traceEvents"].as_array().unwrap();
    for event in events {
        assert!(["X", "M"].contains(&event["ph"].as_str().unwrap()), "{event}");
        assert!(event["pid"].is_u64() && event["tid"].is_u64() && event["name"].is_string(), "{event}");
        assert!(event["ph"] == "M" || event["ts"].is_f64() && event["dur"].is_f64(), "{event}");
    }
    let forward =
        events.iter().find(|event| event["name"] == "F 1 0" && event["args"]["step"] == 20).unwrap();
    assert_eq!((forward["pid"].as_u64(), forward["tid"].as_u64()), (Some(1), Some(0)));
    assert_eq!((forward["ts"].as_f64(), forward["dur"].as_f64()), (Some(102.72), Some(1.28)));
    assert_eq!((&forward["args"]["unit"], &forward["args"]["microbatch"]), (&1.into(), &0.into()));
    assert_eq!(forward["args"]["issued"], 100.0);
    // Only waits that are long enough to be visible.
    let waits = events.iter().filter(|event| event["cat"] == "waiting");
    let names: Vec<&str> = waits.map(|event| event["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["waits to F 1 0", "waits to F 1 0"]);
}

/// Returns the error for a file with this text.
fn refused(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(TRACE_FILE), text).unwrap();
    let error = read(folder.path()).expect_err(text);
    assert!(matches!(error, TrainError::DamagedTrace { .. }), "{error}");
    error.to_string()
}

#[test]
fn other_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("set [metrics] trace_interval"), "{error}");
    file::write(&folder.path().join(TRACE_FILE), &steps()).unwrap();
    let text = std::fs::read_to_string(folder.path().join(TRACE_FILE)).unwrap();
    for (from, to, why) in [
        ("\"format\":4", "\"format\":3", "its format is 3"),
        (
            "compute\",\"ph\":\"X\",\"pid\":1",
            "compute\",\"ph\":\"X\",\"pid\":7",
            "belongs to a rank that does not exist",
        ),
        ("\"name\":\"F 1 0\"", "\"name\":\"F one 0\"", "is not an action with valid times"),
        ("\"dur\":0.6", "\"dur\":-0.6", "is not an action with valid times"),
        ("\"dur\":0.6", "\"dur\":1e300", "is not an action with valid times"),
        ("\"dur\":0.6", "\"dur\":60.0", "begins before the previous one has ended"),
        ("\"ts\":105.4,\"dur\":0.6", "\"ts\":105.4,\"dur\":1e11", "step 20 takes longer than a day"),
        ("\"issued\":1.0", "\"issued\":9.0", "is not an action with valid times"),
        ("[1.5,3.5]", "[3.5,1.5]", "is not an action with valid times"),
        ("[1.5,3.5]", "[0.5,3.5]", "is not an action with valid times"),
        ("\"step\":20,\"unit\"", "\"stop\":20,\"unit\"", "has no step"),
        ("\"step\":20,\"model", "\"step\":30,\"model", "does not tell how long step 20 took"),
        ("[6500,6500]", "[6500]", "does not fit its ranks"),
        ("[6500,6500]", "[6500,5999]", "step 10 ends before the actions of rank 1"),
        ("[6500,6500]", "[6500,86400000000001]", "step 10 takes longer than a day"),
        ("20.5", "-20.5", "does not fit its ranks"),
        ("2000000000.0", "0.0", "rank 1 has an invalid peak"),
        ("units 2", "units 99999999999999999999", "has an invalid outline"),
        ("units 2", "units 4000000000 microbatches 2 rank", "has an invalid outline"),
        ("units 2", "units 4000000000", "does not match the other ranks"),
        ("microbatches 1", "microbatches 0", "does not match the other ranks"),
        ("microbatches 1", "microbatches 1 ties 1:5", "does not match the other ranks"),
        ("\"pipeline_rank\":1", "\"pipeline_rank\":0", "does not match the other ranks"),
        ("\"data_rank\":0", "\"data_rank\":1", "does not match the other ranks"),
        ("rank 1 stage", "rank 0 stage", "does not match the other ranks"),
    ] {
        assert!(text.contains(from), "{from}");
        let error = refused(&text.replacen(from, to, 1));
        assert!(error.contains(why), "{from} -> {to}: {error}");
    }
    refused("");
    refused("[]");
    refused(&"[".repeat(100_000));
    // A truncated file is refused.
    (0..text.len() - 2).step_by(97).for_each(|length| drop(refused(&text[..length])));
}
