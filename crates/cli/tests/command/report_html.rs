//! Pages about runs.

use crate::common::{Scene, tells};

const CHARTS: [&str; 7] =
    ["Loss", "Learning rate", "Gradient norm", "Speed", "MFU", "Exposed communication", "Memory"];

/// Writes the folder of a run with `num_steps` records of made-up numbers.
fn write_records(scene: &Scene, folder: &str, num_steps: usize) {
    std::fs::create_dir_all(scene.path(folder)).unwrap();
    let memory = "{\"parameters\":4096,\"total\":9000}";
    let line = |step: usize| {
        // Digits as in the numbers of real runs, and values that are not finite.
        let noise = (step * 7919 % 1009) as f64 / 1009.0;
        let loss = if step.is_multiple_of(1000) {
            "null".to_owned()
        } else {
            (5.0 / (1.0 + step as f64 / 1e4) + noise).to_string()
        };
        let validation = if step.is_multiple_of(50) {
            format!(",\"validation_loss\":{}", 2.0 + noise)
        } else {
            String::new()
        };
        format!(
            "{{\"step\":{step},\"loss\":{loss},\"grad_norm\":{noise},\"lr\":{},\"samples\":{step},\"samples_per_second\":{},\"step_seconds\":0.5,\
             \"comm_seconds_exposed\":{},\"comm_bytes\":0,\"memory_peak_bytes\":{memory}{validation}}}\n",
            1e-3 * noise,
            100.0 + noise,
            0.1 * noise
        )
    };
    scene.write(&format!("{folder}/metrics.jsonl"), (1..=num_steps).map(line).collect::<String>());
}

/// Asserts that a browser needs nothing but the page.
fn loads_nothing(page: &str) {
    // Names of the SVG namespace and of a pattern within the page, which are not loaded.
    let page = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "").replace("url(#idle)", "");
    for reference in ["http:", "https:", "src=", "href=", "url(", "@import", "<link", "<iframe", "<img"] {
        assert!(!page.contains(reference), "{reference}");
    }
}

#[test]
fn bad_lines_of_the_metrics_are_skipped_with_a_warning() {
    let scene = Scene::new();
    write_records(&scene, "runs/a", 20);
    scene.write(
        "runs/a/metrics.jsonl",
        scene.read("runs/a/metrics.jsonl").replacen("\"step\":7,", "\"step\":\0", 1),
    );
    for (command, printed) in
        [("report run runs/a", "steps: 20"), ("report html runs/a", "written: report.html")]
    {
        let outcome = scene.run(command);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        tells(&outcome.stdout, &[printed]);
        let warning =
            "warning: skipped 1 line of runs/a/metrics.jsonl without a step record; the first is line 7";
        tells(&outcome.stderr, &[warning]);
    }
}

#[test]
fn a_page_compares_two_runs() {
    let scene = Scene::with_corpus();
    let train = "train tiny.toml --set training.validation_interval=2 --set metrics.trace_interval=2";
    for (name, lr) in [("slow", "0.0011"), ("fast", "0.0099")] {
        scene.run(&format!("{train} --set run.name={name} --set optimizer.lr={lr}")).succeeded();
    }
    assert_eq!(scene.run("report html runs/slow runs/fast").succeeded(), "written: report.html\n");
    let page = scene.read("report.html");
    tells(
        &page,
        &[
            "<title>slow, fast</title>",
            "gpt2, 1 layers of width 32",
            "<td>4 of 4</td>",
            "<td>512 tokens</td>",
        ],
    );
    tells(&page, &["<th>workers</th><td>2</td><td>2</td>", "best validation loss", "began"]);
    let inspected = scene.run("checkpoint inspect runs/slow").succeeded();
    let (_, elements) = inspected.split_once("weights: 16 tensors, ").unwrap();
    let parameters = elements.split_once(" elements").unwrap().0;
    tells(&page.replace(',', ""), &[&format!("<th>parameters</th><td>{parameters}</td>")]);
    for title in CHARTS {
        assert_eq!(page.matches(&format!("<h3>{title}</h3>")).count(), 1, "{title}");
    }
    assert_eq!(page.matches("<svg viewBox=").count(), CHARTS.len());
    for curve in ["slow, training", "slow, validation", "fast, training", "fast, validation"] {
        tells(&page, &[&format!("data-name=\"{curve}\"")]);
    }
    tells(
        &page,
        &[
            "</span>bigram baseline 1.",
            "fast: parameters, predicted ",
            "The last traced step",
            "runs/fast: step 4",
            "<th>time of step 4, all workers; MFU ",
            "<th>median MFU</th>",
        ],
    );
    // The part above the fold has the keys that differ, the folded part the shared keys.
    let (different, shared) = page.split_once("<details>").unwrap();
    let row = |key: &str, values: &[&str]| {
        let cell = |value: &&str| format!("<td><code>{value}</code></td>");
        format!("<th><code>{key}</code></th>{}", values.iter().map(cell).collect::<String>())
    };
    tells(different, &[&row("optimizer.lr", &["0.0011", "0.0099"])]);
    tells(shared, &[&row("training.seq_len", &["16"])]);
    assert!(!different.contains("training.seq_len") && !shared.contains("optimizer.lr"));
    loads_nothing(&page);
    // A later page replaces the earlier one, with the full config of its only run.
    scene.run("report html runs/slow").succeeded();
    let page = scene.read("report.html");
    tells(page.split_once("<details>").unwrap().1, &["optimizer.lr", "training.seq_len"]);
    assert!(!page.contains("fast"));
    assert!(!scene.path(".report.html.partial").exists());
}

#[test]
fn text_of_runs_is_no_markup() {
    let scene = Scene::new();
    let folder = "runs/<script>alert(1)";
    write_records(&scene, folder, 3);
    scene.write(&format!("{folder}/config.toml"), "[run]\nname = \"</code><img src=x>\"\n\"<b>\" = 1\n");
    scene.write(&format!("{folder}/trace.json"), "{\"<i>\": 1}");
    let outcome = scene.run(&format!("report html {folder}"));
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    tells(
        &outcome.stderr,
        &[
            "warning: the last traced step of runs/<script>alert(1) is not drawn: ",
            "trace.json is not a valid trace",
        ],
    );
    let page = scene.read("report.html");
    tells(
        &page,
        &["<title>&lt;script&gt;alert(1)</title>", "&lt;/code&gt;&lt;img src=x&gt;", "run.&lt;b&gt;"],
    );
    assert_eq!(page.matches("<script").count(), 1, "the page's own");
    for markup in ["<img", "<b>", "<i>"] {
        assert!(!page.contains(markup), "{markup}");
    }
}

#[test]
fn the_page_of_a_long_run_is_small() {
    let scene = Scene::new();
    write_records(&scene, "runs/long", 100_000);
    let outcome = scene.run("report html runs/long --out long.html");
    assert_eq!(outcome.stdout, "written: long.html\n", "{outcome:?}");
    tells(&outcome.stderr, &["warning: runs/long has no config.toml"]);
    let page = scene.read("long.html");
    assert!((10_000..2_000_000).contains(&page.len()), "{}", page.len());
    tells(&page, &["the mean of up to 334 values", "samples a second", "100k", "long has no config.toml"]);
    loads_nothing(&page);
}

#[test]
fn only_pages_are_replaced() {
    let scene = Scene::new();
    write_records(&scene, "runs/a", 2);
    std::fs::create_dir(scene.path("folder")).unwrap();
    scene.write("mine.html", "<!doctype html>\n<html lang=\"en\">\nmine\n");
    let error = scene.refused_without_trace("report html runs/a --out mine.html");
    tells(&error, &["mine.html exists and was not written by `trireme report html`", "--force"]);
    tells(&scene.refused_without_trace("report html runs/a --out folder --force"), &["folder is not a file"]);
    tells(
        &scene.refused_without_trace("report html runs/a --out none/page.html"),
        &["cannot write none/page.html"],
    );
    assert_eq!(scene.run("report html runs/a --out mine.html --force").code, Some(0));
    tells(&scene.read("mine.html"), &["<title>a</title>"]);
    assert_eq!(scene.run("report html runs/a --out mine.html").code, Some(0));
}

#[test]
fn what_is_no_run_is_refused() {
    let scene = Scene::new();
    write_records(&scene, "runs/a", 2);
    tells(&scene.refused_without_trace("report html runs/a nowhere"), &["nowhere has no metrics.jsonl"]);
    let many = "report html ".to_owned() + &"runs/a ".repeat(11);
    tells(&scene.refused_without_trace(&many), &["11 runs are given", "at most 10"]);
    scene.write("runs/a/metrics.jsonl", "no record\n");
    tells(&scene.refused_without_trace("report html runs/a"), &["skipped 1 line of runs/a/metrics.jsonl"]);
    let help = scene.run("report html --help").succeeded();
    assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    tells(&help, &["Examples:", "trireme report html runs/quickstart"]);
}
