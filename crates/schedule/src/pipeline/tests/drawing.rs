//! Pictures of schedules.

use super::*;

fn picture(kind: ScheduleKind, sizes: Sizes, stage: StageCosts, columns_max: usize) -> String {
    let (schedule, timeline) = validated(kind, sizes, stage);
    draw_text(&schedule, &timeline, columns_max)
}

#[test]
fn a_grid_is_to_scale() {
    let text = picture(ScheduleKind::OneFOneB, sizes(2, 2, 1), EQUAL, 80);
    let expected = "\
rank 0 |F0F1····B0──··B1──|
rank 1 |··F0B0──F1B1──····|
F forward; B backward; · idle; 1 tick: 2 columns
";
    assert_eq!(text, expected);
    let scaled = picture(ScheduleKind::OneFOneB, sizes(2, 2, 1), StageCosts::of(100, 100, 100), 80);
    assert_eq!(text.lines().next(), scaled.lines().next());
}

#[test]
fn a_grid_that_is_too_wide_leaves_numbers_out() {
    let text = picture(ScheduleKind::GPipe, sizes(2, 11, 1), EQUAL, 18);
    let expected = "\
rank 0 |FFFFF··BBBBBBBBBBB|
rank 1 |FFFFFFBBBBBBBBBBB·|
F forward; B backward; · idle; 2 ticks: 1 column
";
    assert_eq!(text, expected);
}

#[test]
fn a_mark_stands_under_the_pass() {
    let (schedule, _) = validated(ScheduleKind::GPipe, sizes(2, 3, 1), EQUAL);
    let costs = Costs::equal(2, EQUAL).expect("possible costs");
    let error = validate(&schedule, &costs, Some(&[3, 2])).expect_err("too many");
    let text = draw_error(&schedule, &costs, &error, 80);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "rank 1, pass 2: 'F 1 2' raises the activations on this rank to 3; the bound is 2");
    assert!(lines[2].starts_with("rank 1 |··F0F1F2B0──"), "{text}");
    assert_eq!(lines[3], "              ^^ F 1 2");
    let missing = ScheduleError::Missing { rank: 0, missing: Pass::forward(0, 0) };
    assert_eq!(
        draw_error(&schedule, &costs, &missing, 80),
        "rank 0 lacks the pass 'F 0 0'; add it to that rank\n"
    );
}

/// Returns the values of a numeric attribute, in document order.
fn attribute(svg: &str, name: &str) -> Vec<f64> {
    let begin = format!(" {name}=\"");
    svg.split(&begin).skip(1).filter_map(|rest| rest.split('"').next()?.parse().ok()).collect()
}

#[test]
fn an_svg_has_all_passes_to_scale() {
    let (schedule, timeline) = validated(ScheduleKind::ZeroBubbleV, sizes(2, 4, 2), EQUAL);
    let svg = draw_svg(&schedule, &timeline, "zb-v");
    assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" ") && svg.ends_with("</svg>\n"));
    let passes: Vec<&str> = svg.lines().filter(|line| line.contains("<title>")).collect();
    assert_eq!(passes.len(), schedule.num_passes());
    let span = timeline.ranks[1][0];
    let first_of_rank_1 = passes[schedule.ranks[0].len()];
    assert!(first_of_rank_1.contains(&format!("<title>F 1 0, ticks {} to {}</title>", span.start, span.end)));
    let tick = attribute(first_of_rank_1, "width")[0];
    assert!((attribute(first_of_rank_1, "x")[0] - 70.0 - tick).abs() < 0.02, "{first_of_rank_1}");
    // Stages of a rank differ in lightness.
    let fill = |pass: &str| {
        let line = passes.iter().find(|line| line.contains(&format!("<title>{pass},"))).expect("a pass");
        line.split("fill=\"").nth(1).and_then(|rest| rest.split('"').next()).map(str::to_owned)
    };
    assert_ne!(fill("F 0 0"), fill("F 3 0"));
    assert_eq!(fill("F 0 0"), fill("F 1 0"));
    assert_ne!(fill("F 0 0"), fill("I 0 0"));
    for name in [
        "forward",
        "backward, input half",
        "backward, weight half",
        "idle",
        "lighter: later stages of the rank",
    ] {
        assert!(svg.contains(&format!(">{name}</text>")), "{name}");
    }
}

/// Returns a schedule of a forward pass, a backward pass and an update, each from one of these times to the next.
fn one_step(times: [u64; 4]) -> (Schedule, Timeline) {
    let (mut schedule, mut timeline) = validated(ScheduleKind::GPipe, sizes(1, 1, 1), EQUAL);
    schedule.ranks[0].push(Pass::update(0, 0));
    let spans = times.windows(2).map(|pair| PassInterval { start: pair[0], end: pair[1] }).collect();
    timeline.ranks = vec![spans];
    timeline.makespan = times[3];
    (schedule, timeline)
}

#[test]
fn pictures_together_have_one_scale() {
    let (slow, quick) = (one_step([100, 300, 700, 1000]), one_step([0, 200, 500, 600]));
    let picture = |title, (schedule, timeline)| Picture { title, schedule, timeline };
    let pictures = [picture("slow", (&slow.0, &slow.1)), picture("quick", (&quick.0, &quick.1))];
    let expected = "\
slow
rank 0 |··F0──B0──────U─────|
quick
rank 0 |F0──B0────U─|
F forward; B backward; U update; · idle
";
    assert_eq!(draw_text_together(&pictures, 20), expected);
    let svg = draw_svg_together("both", &pictures, "us");
    for text in ["both", "slow", "quick", "update"] {
        assert_eq!(svg.matches(&format!(">{text}</text>")).count(), 1, "{text}");
    }
    let width = |tip: &str| {
        let line = svg.lines().find(|line| line.contains(tip)).expect("a pass");
        attribute(line, "width")[0]
    };
    assert!((width("F 0 0, us 100 to 300") - width("F 0 0, us 0 to 200")).abs() < 0.02);
    assert!((width("B 0 0, us 300 to 700") - 2.0 * width("F 0 0, us 0 to 200")).abs() < 0.04);
}
