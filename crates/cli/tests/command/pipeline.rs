//! Pipelines from a config.

use crate::common::{Fixture, assert_contains};

/// Six units; the head is tied to the embedding.
const MODEL: &str = "--set model.num_layers=4";

#[test]
fn a_pipeline_has_the_losses_of_one_worker() {
    let fixture = Fixture::with_corpus();
    let (degree, schedule) =
        ("parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule");
    fixture.run(&format!("train tiny.toml --workers 1 {MODEL} --set run.name=one")).succeeded();
    for (name, settings) in [
        ("two", format!("--workers 2 --set {degree}=2")),
        ("grid", format!("--workers 4 --set {degree}=2 --set parallelism.zero_stage=1")),
        ("turns", format!("--workers 2 --set {degree}=2 --set {schedule}=interleaved-1f1b")),
        ("halves", format!("--workers 2 --set {degree}=2 --set {schedule}=zb-h2")),
        ("fold", format!("--workers 2 --set {degree}=2 --set {schedule}=zb-v")),
        ("best", format!("--workers 2 --set {degree}=2 --set {schedule}=auto")),
    ] {
        let text =
            fixture.run(&format!("train tiny.toml {MODEL} {settings} --set run.name={name}")).succeeded();
        assert_eq!(fixture.losses(name), fixture.losses("one"), "{name}");
        // The prediction for the rank that needs the most memory equals the measurement.
        let total = text.lines().find(|line| line.starts_with("total")).unwrap();
        let columns: Vec<&str> = total.split_whitespace().collect();
        assert_eq!(columns[1], columns[3], "{text}");
        assert_contains(
            &fixture.read(&format!("runs/{name}/program.txt")),
            &["stage 0-", "SEND_F", "RECV_B"],
        );
    }
    let untied = format!("{MODEL} --set model.tie_word_embeddings=false");
    let sharded = format!("--workers 4 --set {degree}=2 --set parallelism.zero_stage=3");
    fixture.run(&format!("train tiny.toml --workers 1 {untied} --set run.name=untied")).succeeded();
    fixture.run(&format!("train tiny.toml {untied} {sharded} --set run.name=sharded")).succeeded();
    assert_eq!(fixture.losses("sharded"), fixture.losses("untied"));
    fixture.run(&format!("train tiny.toml --workers 1 {MODEL} --set run.name=tied")).succeeded();
    fixture.run(&format!("train tiny.toml {MODEL} {sharded} --set run.name=tied-sharded")).succeeded();
    assert_eq!(fixture.losses("tied-sharded"), fixture.losses("tied"));
}

/// The messages of the pipeline and the tied embedding's gradient have the same length here, and use memory of one pool.
#[test]
fn messages_may_be_as_long_as_a_tied_embedding() {
    let fixture = Fixture::with_corpus();
    // A sequence of as many tokens as there are in the vocabulary.
    let lengths = "--set training.seq_len=257 --set training.local_batch_size=1 --set training.steps=2";
    fixture.run(&format!("train tiny.toml --workers 1 {lengths} --set run.name=one")).succeeded();
    let two = "--workers 2 --set parallelism.pipeline_parallel_degree=2 --set run.name=two";
    fixture.run(&format!("train tiny.toml {lengths} {two}")).succeeded();
    assert_eq!(fixture.losses("two"), fixture.losses("one"));
}

#[test]
fn auto_fits_every_worker_of_a_pipeline() {
    let fixture = Fixture::with_corpus();
    let pipeline = "--workers 2 --set model.num_layers=8 --set parallelism.pipeline_parallel_degree=2";
    let total = |name: &str| {
        let record = fixture.records(name).pop().unwrap();
        record["memory_peak_bytes"]["total"].as_u64().unwrap()
    };
    fixture.run(&format!("train tiny.toml {pipeline} --set run.name=all")).succeeded();
    let most = total("all");
    for (name, part, settings, told) in [
        ("kept", 63, "--set activation_checkpoint.mode=auto", ["recomputation, for at most", "keep"]),
        (
            "moved",
            60,
            "--set parallelism.zero_stage=1 --set offload.activations=auto --set offload.optimizer=auto",
            ["offload, for at most", "(host"],
        ),
        (
            "both",
            57,
            "--set parallelism.zero_stage=1 --set activation_checkpoint.mode=auto --set offload.optimizer=auto",
            ["recomputation, for at most", "optimizer (host)"],
        ),
    ] {
        let budget = most * part / 64;
        let settings =
            format!("{pipeline} {settings} --set memory.device_budget={budget}B --set run.name={name}");
        // A budget ends any worker that exceeds it.
        assert_contains(&fixture.run(&format!("train tiny.toml {settings}")).succeeded(), &told);
        assert!(total(name) <= budget);
        assert_eq!(fixture.losses(name), fixture.losses("all"), "{name}");
    }
}

#[test]
fn units_move_where_given_split_points_are_uneven() {
    let fixture = Fixture::with_corpus();
    // Six blocks: on any machine, five take longer than one.
    let model = format!("{MODEL} --set model.num_layers=6 --set training.steps=12");
    let pipeline =
        "--set parallelism.pipeline_parallel_degree=2 --set parallelism.pipeline_parallel_split_points=[2]";
    let balanced = "--set parallelism.pipeline_parallel_rebalance_interval=9";
    fixture.run(&format!("train tiny.toml --workers 1 {model} --set run.name=one")).succeeded();
    for (name, workers) in [("two", "--workers 2"), ("grid", "--workers 4 --set parallelism.zero_stage=2")] {
        let command = format!(
            "train tiny.toml {workers} {model} {pipeline} {balanced} --set run.name={name} --set metrics.trace_interval=1"
        );
        let text = fixture.run(&command).succeeded();
        assert_eq!(fixture.losses(name), fixture.losses("one"), "{name}");
        let moved = text.lines().find(|line| line.contains("units 0-1 | 2-7 become 0-"));
        let moved = moved.unwrap_or_else(|| panic!("nothing moved: {text}"));
        assert_contains(moved, &["step 9: the busiest worker of the pipeline took "]);
        let program = fixture.read(&format!("runs/{name}/program.txt"));
        assert!(!program.contains("stage 0-2@0"), "{program}");
        assert_contains(&program, &["# step ", " become "]);
        // The trace covers only steps after the move, with their programs.
        assert_contains(
            &fixture.run(&format!("report trace runs/{name} --step 10")).succeeded(),
            &["measured", "simulated"],
        );
        // The memory is the memory of the stages after the move.
        let rest = text.split_once("since units moved after step ").unwrap().1;
        let total = rest.lines().find(|line| line.starts_with("total")).unwrap();
        let columns: Vec<&str> = total.split_whitespace().collect();
        assert_eq!(columns[1], columns[3], "{text}");
    }
    // Another layout resumes with the state that ranks had before the move.
    fixture
        .run(&format!("train tiny.toml --workers 1 {model} --set run.name=two --set training.steps=14"))
        .succeeded();
    fixture
        .run(&format!("train tiny.toml --workers 1 {model} --set run.name=one --set training.steps=14"))
        .succeeded();
    assert_eq!(fixture.losses("two"), fixture.losses("one"));
}

#[test]
fn plan_tells_and_draws_a_pipeline() {
    let fixture = Fixture::with_corpus();
    let settings = format!("--workers 3 --set parallelism.pipeline_parallel_degree=3 {MODEL}");
    let text = fixture.run(&format!("plan tiny.toml {settings} --draw --svg step.svg")).succeeded();
    assert_contains(
        &text,
        &["pipeline rank 2: units ", "bubble: ", "which needs the most memory", "rank 0 |F0", "\u{b7}"],
    );
    assert!(fixture.read("step.svg").starts_with("<svg "));
    let text = fixture
        .run(&format!("plan tiny.toml {settings} --set parallelism.pipeline_parallel_split_points=[1,5] --set parallelism.pipeline_parallel_rebalance_interval=9"))
        .succeeded();
    assert_contains(
        &text,
        &["pipeline rank 1: units 1-4 ", "every 9 steps, units move", "more than 1.1 of the mean"],
    );
    let text = fixture.run("plan tiny.toml --workers 1 --draw").succeeded();
    assert_contains(&text, &["rank 0 |F0"]);
    assert!(!text.contains("pipeline rank"), "{text}");
}

#[test]
fn pipelines_that_cannot_be_are_refused() {
    let fixture = Fixture::with_corpus();
    let degree = "parallelism.pipeline_parallel_degree";
    let split_points = "parallelism.pipeline_parallel_split_points";
    let interval = "parallelism.pipeline_parallel_rebalance_interval";
    for (settings, facts) in [
        (
            format!("--workers 3 {MODEL} --set {degree}=2"),
            ["3 workers", "not a multiple of the pipeline degree 2"],
        ),
        (
            format!(
                "--workers 4 {MODEL} --set {degree}=4 --set parallelism.pipeline_parallel_schedule=breadth-first"
            ),
            ["8 stages", "the model has 6"],
        ),
        ("--set parallelism.pipeline_parallel_schedule=gpipe".to_owned(), ["only applies with", "above 1"]),
        (
            format!("--workers 2 {MODEL} --set {degree}=2 --set {split_points}=[2,4]"),
            ["need 1 split points, but there are 2", "the first unit of each stage after the first"],
        ),
        (
            format!("--workers 3 {MODEL} --set {degree}=3 --set {split_points}=[3,3]"),
            ["increasing numbers", "[3,3]"],
        ),
        (
            format!("--workers 2 {MODEL} --set {degree}=2 --set {split_points}=[6]"),
            ["unit 6, but the model has 6", "lower it"],
        ),
        (format!("--set {split_points}=[1]"), ["only applies with", "above 1"]),
        (
            format!(
                "--workers 2 --set {degree}=2 --set model.hidden_size=8192 --set model.num_layers=8 --set training.seq_len=256 \
                 --set training.local_batch_size=8192 --set training.global_batch_size=16384"
            ),
            ["stage 0 of the pipeline keeps", "local_batch_size"],
        ),
        (
            format!(
                "--workers 2 {MODEL} --set {degree}=2 --set {interval}=5 --set memory.device_budget=1GiB"
            ),
            ["no room for them", "device_budget"],
        ),
        (
            format!(
                "--workers 2 {MODEL} --set {degree}=2 --set {interval}=5 --set optimizer.name=one_bit_adam --set optimizer.freeze_step=2 \
                 --set training.determinism=run --set training.max_norm=0"
            ),
            ["does not move with it", "adamw"],
        ),
        (
            format!("--workers 2 {MODEL} --set {degree}=2 --set {interval}=5 --set parallelism.zero_stage=3"),
            ["do not move", "zero_stage = 2"],
        ),
        (
            "--set parallelism.pipeline_parallel_rebalance_threshold=1.5".to_owned(),
            ["only applies with pipeline_parallel_rebalance_interval", "such as to 100"],
        ),
    ] {
        assert_contains(&fixture.refused_without_changes(&format!("train tiny.toml {settings}")), &facts);
    }
}

#[test]
fn a_pipeline_that_does_not_drain_reports_every_step_and_resumes_from_a_checkpoint() {
    let fixture = Fixture::with_corpus();
    let settings = format!(
        "--workers 2 {MODEL} --set model.tie_word_embeddings=false --set parallelism.pipeline_parallel_degree=2 \
         --set parallelism.pipeline_parallel_schedule=pipedream-2bw --set parallelism.pipeline_parallel_drain_interval=2 \
         --set checkpoint.interval=2 --set lr_scheduler.decay_steps=4"
    );
    let text = fixture
        .run(&format!("train tiny.toml {settings} --set run.name=whole --set metrics.trace_interval=2"))
        .succeeded();
    assert_contains(&text, &["this schedule applies stale gradients", "[optimizer] nu"]);
    // Updates are between the passes; their width in the drawing depends on time.
    let drawn = fixture.run("report trace runs/whole").succeeded();
    assert_contains(&drawn, &["measured", "simulated", "U update"]);
    let plan = fixture.run(&format!("plan tiny.toml {settings} --draw")).succeeded();
    assert_contains(&plan, &["keep 2, 2 versions", "at most 1, 1 updates newer"]);
    let total = text.lines().find(|line| line.starts_with("total")).unwrap();
    let columns: Vec<&str> = total.split_whitespace().collect();
    assert_eq!(columns[1], columns[3], "{text}");
    assert_contains(&fixture.read("runs/whole/program.txt"), &["steps 2 weights double-buffered", "STASH 0"]);
    assert!(fixture.losses("whole").len() >= 4, "{:?}", fixture.losses("whole"));
    // The same run in two parts.
    for steps in [2, 4] {
        let steps = format!("--set training.steps={steps} --set run.name=parts");
        fixture.run(&format!("train tiny.toml {settings} {steps}")).succeeded();
    }
    assert_eq!(fixture.losses("parts"), fixture.losses("whole"));
    let refused = fixture.run(&format!(
        "train tiny.toml {settings} --set run.name=parts --set parallelism.pipeline_parallel_drain_interval=3 --set training.steps=6 --set checkpoint.interval=3"
    ));
    assert_contains(
        &refused.refused(),
        &["resumes at step 4", "not a multiple of the 3 steps", "pipeline_parallel_drain_interval"],
    );
    let refused = fixture.run(&format!(
        "train tiny.toml {settings} --set parallelism.pipeline_parallel_drain_interval=3 --set run.name=odd"
    ));
    assert_contains(&refused.refused(), &["not a multiple", "pipeline_parallel_drain_interval"]);
    // The steps of epochs, here 12, are rounded up to a multiple.
    let drain = "--set parallelism.pipeline_parallel_drain_interval=5 --set checkpoint.interval=5";
    fixture
        .run(&format!("train tiny.toml {settings} {drain} --set training.epochs=0.1 --set run.name=epochs"))
        .succeeded();
    assert_eq!(fixture.losses("epochs").len(), 15);
    let refused = fixture
        .run(&format!("train tiny.toml {settings} --set model.tie_word_embeddings=true --set run.name=tied"));
    assert_contains(&refused.refused(), &["two units share a weight", "tie_word_embeddings = false"]);
}

#[test]
fn a_custom_schedule_is_run_or_refused_with_the_place_marked() {
    let fixture = Fixture::with_corpus();
    let pipeline = format!("--workers 2 {MODEL} --set parallelism.pipeline_parallel_degree=2");
    let file = |name: &str| format!("--set parallelism.pipeline_parallel_schedule_file={name}");
    fixture.run(&format!("train tiny.toml --workers 1 {MODEL} --set run.name=one")).succeeded();
    fixture
        .run(&format!(
            "plan tiny.toml {pipeline} --set parallelism.pipeline_parallel_schedule=dualpipe-v --save-schedule saved.txt"
        ))
        .succeeded();
    // A schedule without a name: the embedding is on the last worker, and a worker's stages are neighbors.
    fixture.write(
        "own.txt",
        "ranks 2 placement 1,1,0,0 microbatches 4 # there is no such schedule\n\
         rank 0: F 2 0, F 2 1, F 3 0, I 3 0, B 2 0, F 3 1, W 3 0, B 3 1, B 2 1, F 2 2, F 3 2, B 3 2, B 2 2, F 2 3, F 3 3, B 3 3, \
         I 2 3, W 2 3\n\
         rank 1: F 0 0, F 1 0, F 0 1, F 1 1, F 0 2, B 1 0, I 0 0, W 0 0, F 1 2, I 1 1, W 1 1, B 0 1, B 1 2, B 0 2, F 0 3, F 1 3, \
         B 1 3, B 0 3\n",
    );
    // The first worker has the first and the last stage, and the last worker has the stage between them.
    fixture.write(
        "uneven.txt",
        "ranks 2 placement 0,1,0 microbatches 4\n\
         rank 0: F 0 0, F 0 1, F 2 0, B 2 0, F 2 1, B 2 1, B 0 0, F 0 2, F 2 2, B 2 2, B 0 1, F 0 3, F 2 3, B 2 3, B 0 2, B 0 3\n\
         rank 1: F 1 0, F 1 1, B 1 0, F 1 2, B 1 1, B 1 2, F 1 3, B 1 3\n",
    );
    for name in ["saved.txt", "own.txt", "uneven.txt"] {
        let settings = format!("{pipeline} {}", file(name));
        let text = fixture.run(&format!("train tiny.toml {settings} --set run.name={name}")).succeeded();
        assert_eq!(fixture.losses(name), fixture.losses("one"), "{name}");
        let total = text.lines().find(|line| line.starts_with("total")).unwrap();
        let columns: Vec<&str> = total.split_whitespace().collect();
        assert_eq!(columns[1], columns[3], "{text}");
        // The saved schedule equals the given one.
        fixture.run(&format!("plan tiny.toml {settings} --save-schedule again.txt")).succeeded();
        let passes = |file: &str| fixture.read(file).lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(passes("again.txt"), passes(name));
    }
    assert_contains(&fixture.read("runs/own.txt/program.txt"), &["@1", "SEND_GRAD 0 1", "I 4 0"]);
    let text = fixture.run(&format!(
        "plan tiny.toml {pipeline} {} --set parallelism.pipeline_parallel_split_points=[2]",
        file("uneven.txt")
    ));
    assert_contains(&text.refused(), &["3 stages need 2 split points", "has 1"]);

    // A schedule that does not drain.
    let ahead = format!(
        "{pipeline} --set parallelism.pipeline_parallel_schedule=pipedream --set parallelism.pipeline_parallel_drain_interval=2 \
         --set model.tie_word_embeddings=false --set checkpoint.interval=2"
    );
    fixture.run(&format!("plan tiny.toml {ahead} --save-schedule stashed.txt")).succeeded();
    assert_contains(&fixture.read("stashed.txt"), &["steps 2 weights stashed"]);
    fixture.run(&format!("train tiny.toml {ahead} --set run.name=stashed")).succeeded();
    fixture.run(&format!("train tiny.toml {ahead} {} --set run.name=given", file("stashed.txt"))).succeeded();
    assert_eq!(fixture.losses("given"), fixture.losses("stashed"));

    let in_order = "F 0 0, F 0 1, F 0 2, F 0 3, B 0 0, B 0 1, B 0 2, B 0 3";
    let refusals: [(&str, String, &str, &[&str]); 8] = [
        (
            "late.txt",
            format!(
                "ranks 2 placement 0,1 microbatches 4\nrank 0: {in_order}\n\
                 rank 1: F 1 0, B 1 0, F 1 2, B 1 2, F 1 1, B 1 1, F 1 3, B 1 3"
            ),
            "",
            &["rank 1, pass 3: 'B 1 2' comes before 'B 1 1'", "rank 0 |F0F1F2F3", "^^ B 1 2", "F forward"],
        ),
        (
            "ring.txt",
            "ranks 2 placement 0,1 microbatches 4\n\
             rank 0: F 0 0, B 0 0, F 0 1, B 0 1, F 0 2, B 0 2, F 0 3, B 0 3\n\
             rank 1: F 1 1, F 1 0, B 1 0, B 1 1, F 1 2, B 1 2, F 1 3, B 1 3"
                .to_owned(),
            "",
            &[
                "deadlock: ",
                "'F 1 1' waits for 'F 0 1' on rank 0",
                "'B 0 0' waits for 'B 1 0' on rank 1",
                "^ B 0 0",
            ],
        ),
        (
            "much.txt",
            format!(
                "ranks 2 placement 0,1 microbatches 4\nrank 0: {in_order}\nrank 1: {}",
                in_order.replace(" 0 ", " 1 ")
            ),
            "--set parallelism.pipeline_parallel_in_flight_max=2",
            &["rank 0, pass 2: 'F 0 2' raises", "the bound is ", "^^ F 0 2", "in_flight_max sets the bound"],
        ),
        (
            "other.txt",
            "ranks 1 placement 0 microbatches 1\nrank 0: F 0 0, B 0 0".to_owned(),
            "",
            &["workers 1, microbatches 1", "workers 2, microbatches 4"],
        ),
        (
            "idle.txt",
            "ranks 2 placement 0,0 microbatches 4\nrank 0:\nrank 1:".to_owned(),
            "",
            &["worker 1 has no stage"],
        ),
        (
            "ahead.txt",
            "ranks 2 placement 0,1 microbatches 4 steps 2 weights stashed\nrank 0:\nrank 1:".to_owned(),
            "",
            &["a drain after 2 steps and stashed weights", "asks for a drain after 1 step", "pipedream"],
        ),
        (
            "text.txt",
            fixture.read("text.txt"),
            "",
            &["line 1:", "should read 'ranks P placement R,R,... microbatches M'"],
        ),
        (
            "saved.txt",
            fixture.read("saved.txt"),
            "--set parallelism.pipeline_parallel_schedule=gpipe",
            &["replaces the schedule"],
        ),
    ];
    for (name, text, settings, facts) in refusals {
        fixture.write(name, text);
        let command = format!("train tiny.toml {pipeline} {} {settings} --set run.name=refused", file(name));
        assert_contains(&fixture.refused_without_changes(&command), facts);
    }
    let gone = fixture.refused_without_changes(&format!("train tiny.toml {pipeline} {}", file("gone.txt")));
    assert_contains(&gone, &["gone.txt", "cannot read the file", "No such file"]);
    let command = "plan tiny.toml --workers 2 --save-schedule none.txt";
    assert_contains(&fixture.refused_without_changes(command), &["set parallelism.pipeline_parallel_degree"]);
    let alone = fixture.refused_without_changes(&format!("train tiny.toml {}", file("saved.txt")));
    assert_contains(&alone, &["only applies with", "above 1"]);
}
