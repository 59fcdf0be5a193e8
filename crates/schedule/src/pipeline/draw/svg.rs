use super::{Picture, kinds, label_number, longest, stage_indices_on_rank};
use crate::pipeline::pass::PassKind;
use crate::pipeline::schedule::Schedule;
use crate::pipeline::timeline::Timeline;
use trireme_base::{Anchor, Svg, Ticks};

// Sizes in pixels.
const WIDTH: f64 = 1200.0;
const LEFT: f64 = 70.0;
const MARGIN: f64 = 12.0;
const TITLE_HEIGHT: f64 = 28.0;
const ROW_HEIGHT: f64 = 24.0;
const ROW_GAP: f64 = 6.0;
const LEGEND_HEIGHT: f64 = 36.0;
/// Height of the axis of times below the rows of a picture.
const AXIS_HEIGHT: f64 = 22.0;
const AXIS_INTERVALS: usize = 10;
const DIGIT_WIDTH: f64 = 7.0;

/// Draws a schedule as an SVG document: one row per rank, to scale in time, with idle time hatched. Colors distinguish kinds of passes;
/// lightness distinguishes the stages of a rank (the first is darkest). Numbers are microbatches. Tool tips show names and times.
///
/// # Panics
/// If the timeline does not belong to the schedule.
pub fn draw_svg(schedule: &Schedule, timeline: &Timeline, title: &str) -> String {
    draw_svg_together(title, &[Picture { title: "", schedule, timeline }], "ticks")
}

/// Draws several timelines below each other in one SVG document, as [`draw_svg`] draws one, with the same scale. `unit` is the name of the
/// unit of their times.
///
/// # Panics
/// If a timeline does not belong to its schedule.
pub fn draw_svg_together(title: &str, pictures: &[Picture<'_>], unit: &str) -> String {
    let title_height = |title: &str| if title.is_empty() { 0.0 } else { TITLE_HEIGHT };
    let height_of = |picture: &Picture<'_>| {
        let rows = picture.schedule.num_ranks() as f64 * (ROW_HEIGHT + ROW_GAP);
        title_height(picture.title) + rows + AXIS_HEIGHT
    };
    let height = MARGIN + title_height(title) + pictures.iter().map(height_of).sum::<f64>() + LEGEND_HEIGHT;
    let mut svg = Svg::new(WIDTH, height);
    svg.definitions(HATCH);
    push_text(&mut svg, MARGIN, MARGIN + 12.0, title);
    if let [only] = pictures
        && only.title.is_empty()
    {
        push_bubble(&mut svg, MARGIN + 12.0, only.timeline);
    }
    let pixels_per_tick = (WIDTH - LEFT - MARGIN) / longest(pictures).max(1) as f64;
    let mut top = MARGIN + title_height(title);
    for picture in pictures {
        if !picture.title.is_empty() {
            push_text(&mut svg, MARGIN, top + 16.0, picture.title);
            push_bubble(&mut svg, top + 16.0, picture.timeline);
            top += TITLE_HEIGHT;
        }
        let painter = Painter::new(picture, pixels_per_tick, unit);
        for rank in 0..picture.schedule.num_ranks() {
            painter.push_row(&mut svg, rank, top);
            top += ROW_HEIGHT + ROW_GAP;
        }
        painter.push_axis(&mut svg, top);
        top += AXIS_HEIGHT;
    }
    if let Some(picture) = pictures.first() {
        Painter::new(picture, pixels_per_tick, unit).push_legend(&mut svg, top + MARGIN);
    }
    svg.finish()
}

const AXIS_STYLE: &str = "stroke=\"#888888\"";

const HATCH: &str = "<pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
                     patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#eeeeee\"/>\
                     <line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\" stroke=\"#bbbbbb\" stroke-width=\"2\"/></pattern>";

struct Painter<'a> {
    schedule: &'a Schedule,
    timeline: &'a Timeline,
    /// Index of each stage among the stages of its rank.
    stage_indices: Vec<usize>,
    stages_per_rank: usize,
    pixels_per_tick: f64,
    unit: &'a str,
}

impl<'a> Painter<'a> {
    fn new(picture: &Picture<'a>, pixels_per_tick: f64, unit: &'a str) -> Self {
        let &Picture { schedule, timeline, .. } = picture;
        let turns = stage_indices_on_rank(schedule);
        let num_turns = turns.iter().max().map_or(1, |last| last + 1);
        Painter {
            schedule,
            timeline,
            stage_indices: turns,
            stages_per_rank: num_turns,
            pixels_per_tick,
            unit,
        }
    }

    fn push_row(&self, svg: &mut Svg, rank: usize, top: f64) {
        push_text(svg, MARGIN, top + 16.0, &format!("rank {rank}"));
        let idle = (self.x(self.timeline.makespan) - LEFT, ROW_HEIGHT);
        svg.rect((LEFT, top), idle, "url(#idle)", None);
        for (pass, span) in self.schedule.ranks[rank].iter().zip(&self.timeline.ranks[rank]) {
            let (left, width) = (self.x(span.start), self.x(span.end) - self.x(span.start));
            let tip = format!("{pass}, {} {} to {}", self.unit, span.start, span.end);
            let color = self.color(pass.kind, self.stage_indices[pass.stage]);
            svg.rect((left, top), (width, ROW_HEIGHT), &color, Some(&tip));
            let label = label_number(self.schedule, *pass);
            if label.len() as f64 * DIGIT_WIDTH < width {
                push_text(svg, left + 2.0, top + 16.0, &label);
            }
        }
    }

    /// Draws the axis of times below the rows.
    fn push_axis(&self, svg: &mut Svg, top: f64) {
        let ticks = Ticks::of_steps(self.timeline.makespan, AXIS_INTERVALS);
        let end = self.x(self.timeline.makespan);
        svg.line(&[(LEFT, top), (end, top)], AXIS_STYLE);
        push_text(svg, MARGIN, top + 15.0, self.unit);
        for value in ticks.values() {
            let x = LEFT + value * self.pixels_per_tick;
            svg.line(&[(x, top), (x, top + 4.0)], AXIS_STYLE);
            svg.text((x, top + 15.0), Anchor::Middle, &ticks.label(value));
        }
    }

    fn push_legend(&self, svg: &mut Svg, top: f64) {
        let mut left = LEFT;
        let mut push = |fill: &str, name: &str| {
            svg.rect((left, top), (16.0, 16.0), fill, None);
            push_text(svg, left + 22.0, top + 12.0, name);
            left += 40.0 + name.len() as f64 * DIGIT_WIDTH;
        };
        for kind in kinds(self.schedule) {
            push(&self.color(kind, 0), kind.words());
        }
        push("url(#idle)", "idle");
        if self.stages_per_rank > 1 {
            push(
                &self.color(PassKind::Forward, self.stages_per_rank - 1),
                "lighter: later stages of the rank",
            );
        }
    }

    fn x(&self, tick: u64) -> f64 {
        LEFT + tick as f64 * self.pixels_per_tick
    }

    /// Returns the color of a kind, mixed with more white for later stages of the rank.
    fn color(&self, kind: PassKind, turn: usize) -> String {
        let color: [u64; 3] = match kind {
            PassKind::Forward => [86, 140, 214],
            PassKind::Backward => [92, 172, 96],
            PassKind::BackwardInput => [64, 176, 166],
            PassKind::BackwardWeight => [226, 160, 72],
            PassKind::Update => [205, 92, 92],
        };
        let (turn, num_turns) = (turn as u64, self.stages_per_rank as u64);
        let [red, green, blue] = color.map(|part| part + (255 - part) * 3 * turn / (4 * num_turns));
        format!("#{red:02x}{green:02x}{blue:02x}")
    }
}

/// Writes the bubble, in percent of the time of all ranks, at the right end of a line.
fn push_bubble(svg: &mut Svg, y: f64, timeline: &Timeline) {
    let text = format!("bubble {:.1} %", 100.0 * timeline.bubble());
    svg.text((WIDTH - MARGIN, y), Anchor::End, &text);
}

fn push_text(svg: &mut Svg, x: f64, y: f64, text: &str) {
    svg.text((x, y), Anchor::Start, text);
}
