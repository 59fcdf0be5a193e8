//! Pages about runs.

use crate::common::{Fixture, assert_contains};

const CHARTS: [&str; 7] =
    ["Loss", "Learning rate", "Gradient norm", "Speed", "MFU", "Exposed communication", "Memory"];

/// Writes the folder of a run with `num_steps` records of made-up numbers.
fn write_records(fixture: &Fixture, folder: &str, num_steps: usize) {
    std::fs::create_dir_all(fixture.path(folder)).unwrap();
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
    fixture.write(&format!("{folder}/metrics.jsonl"), (1..=num_steps).map(line).collect::<String>());
}

/// Asserts that a browser needs nothing but the page.
fn assert_loads_nothing(page: &str) {
    // Names of the SVG namespace and of a pattern within the page, which are not loaded.
    let page = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "").replace("url(#idle)", "");
    for reference in ["http:", "https:", "src=", "href=", "url(", "@import", "<link", "<iframe", "<img"] {
        assert!(!page.contains(reference), "{reference}");
    }
}

#[test]
fn bad_lines_of_the_metrics_are_skipped_with_a_warning() {
    let fixture = Fixture::new();
    write_records(&fixture, "runs/a", 20);
    fixture.write(
        "runs/a/metrics.jsonl",
        fixture.read("runs/a/metrics.jsonl").replacen("\"step\":7,", "\"step\":\0", 1),
    );
    for (command, printed) in
        [("report run runs/a", "steps: 20"), ("report html runs/a", "written: report.html")]
    {
        let outcome = fixture.run(command);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        assert_contains(&outcome.stdout, &[printed]);
        let warning =
            "warning: skipped 1 line of runs/a/metrics.jsonl without a step record; the first is line 7";
        assert_contains(&outcome.stderr, &[warning]);
    }
}

#[test]
fn a_page_compares_two_runs() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --set training.validation_interval=2 --set metrics.trace_interval=2";
    for (name, lr) in [("slow", "0.0011"), ("fast", "0.0099")] {
        fixture.run(&format!("{train} --set run.name={name} --set optimizer.lr={lr}")).succeeded();
    }
    assert_eq!(fixture.run("report html runs/slow runs/fast").succeeded(), "written: report.html\n");
    let page = fixture.read("report.html");
    assert_contains(
        &page,
        &[
            "<title>slow, fast</title>",
            "gpt2, 1 layers of width 32",
            "<td>4 of 4</td>",
            "<td>512 tokens</td>",
        ],
    );
    assert_contains(&page, &["<th>workers</th><td>2</td><td>2</td>", "best validation loss", "began"]);
    let inspected = fixture.run("checkpoint inspect runs/slow").succeeded();
    let (_, elements) = inspected.split_once("weights: 16 tensors, ").unwrap();
    let parameters = elements.split_once(" elements").unwrap().0;
    assert_contains(&page.replace(',', ""), &[&format!("<th>parameters</th><td>{parameters}</td>")]);
    for title in CHARTS {
        assert_eq!(page.matches(&format!("<h3>{title}</h3>")).count(), 1, "{title}");
    }
    assert_eq!(page.matches("<svg viewBox=").count(), CHARTS.len());
    for curve in ["slow, training", "slow, validation", "fast, training", "fast, validation"] {
        assert_contains(&page, &[&format!("data-name=\"{curve}\"")]);
    }
    assert_contains(
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
    assert_contains(different, &[&row("optimizer.lr", &["0.0011", "0.0099"])]);
    assert_contains(shared, &[&row("training.seq_len", &["16"])]);
    assert!(!different.contains("training.seq_len") && !shared.contains("optimizer.lr"));
    assert_loads_nothing(&page);
    // A later page replaces the earlier one, with the full config of its only run.
    fixture.run("report html runs/slow").succeeded();
    let page = fixture.read("report.html");
    assert_contains(page.split_once("<details>").unwrap().1, &["optimizer.lr", "training.seq_len"]);
    assert!(!page.contains("fast"));
    assert!(!fixture.path(".report.html.partial").exists());
}

#[test]
fn text_of_runs_is_no_markup() {
    let fixture = Fixture::new();
    let folder = "runs/<script>alert(1)";
    write_records(&fixture, folder, 3);
    fixture.write(&format!("{folder}/config.toml"), "[run]\nname = \"</code><img src=x>\"\n\"<b>\" = 1\n");
    fixture.write(&format!("{folder}/trace.json"), "{\"<i>\": 1}");
    let outcome = fixture.run(&format!("report html {folder}"));
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_contains(
        &outcome.stderr,
        &[
            "warning: the last traced step of runs/<script>alert(1) is not drawn: ",
            "trace.json is not a valid trace",
        ],
    );
    let page = fixture.read("report.html");
    assert_contains(
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
    let fixture = Fixture::new();
    write_records(&fixture, "runs/long", 100_000);
    let outcome = fixture.run("report html runs/long --out long.html");
    assert_eq!(outcome.stdout, "written: long.html\n", "{outcome:?}");
    assert_contains(&outcome.stderr, &["warning: runs/long has no config.toml"]);
    let page = fixture.read("long.html");
    assert!((10_000..2_000_000).contains(&page.len()), "{}", page.len());
    assert_contains(
        &page,
        &["the mean of up to 334 values", "samples a second", "100k", "long has no config.toml"],
    );
    assert_loads_nothing(&page);
}

#[test]
fn only_pages_are_replaced() {
    let fixture = Fixture::new();
    write_records(&fixture, "runs/a", 2);
    std::fs::create_dir(fixture.path("folder")).unwrap();
    fixture.write("mine.html", "<!doctype html>\n<html lang=\"en\">\nmine\n");
    let error = fixture.refused_without_changes("report html runs/a --out mine.html");
    assert_contains(&error, &["mine.html exists and was not written by `trireme report html`", "--force"]);
    assert_contains(
        &fixture.refused_without_changes("report html runs/a --out folder --force"),
        &["folder is not a file"],
    );
    assert_contains(
        &fixture.refused_without_changes("report html runs/a --out none/page.html"),
        &["cannot write none/page.html"],
    );
    assert_eq!(fixture.run("report html runs/a --out mine.html --force").code, Some(0));
    assert_contains(&fixture.read("mine.html"), &["<title>a</title>"]);
    assert_eq!(fixture.run("report html runs/a --out mine.html").code, Some(0));
}

#[test]
fn what_is_no_run_is_refused() {
    let fixture = Fixture::new();
    write_records(&fixture, "runs/a", 2);
    assert_contains(
        &fixture.refused_without_changes("report html runs/a nowhere"),
        &["nowhere has no metrics.jsonl"],
    );
    let many = "report html ".to_owned() + &"runs/a ".repeat(11);
    assert_contains(&fixture.refused_without_changes(&many), &["11 runs are given", "at most 10"]);
    fixture.write("runs/a/metrics.jsonl", "no record\n");
    assert_contains(
        &fixture.refused_without_changes("report html runs/a"),
        &["skipped 1 line of runs/a/metrics.jsonl"],
    );
    let help = fixture.run("report html --help").succeeded();
    assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    assert_contains(&help, &["Examples:", "trireme report html runs/quickstart"]);
}
