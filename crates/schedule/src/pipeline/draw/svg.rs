use super::{Picture, kinds, longest, number, turns};
use crate::pipeline::pass::PassKind;
use crate::pipeline::schedule::Schedule;
use crate::pipeline::timeline::Timeline;
use std::fmt::Write as _;

// Sizes in pixels.
const WIDTH: f64 = 1200.0;
const LEFT: f64 = 70.0;
const MARGIN: f64 = 12.0;
const TITLE_HEIGHT: f64 = 28.0;
const ROW_HEIGHT: f64 = 24.0;
const ROW_GAP: f64 = 6.0;
const LEGEND_HEIGHT: f64 = 36.0;
/// Of a digit.
const DIGIT_WIDTH: f64 = 7.0;

/// A schedule as an SVG document: a row for each rank, to scale in time, idle time hatched. Colours tell kinds of
/// passes apart, lightness the stages of a rank, the first one darkest; numbers are microbatches. A pass says its
/// name and times when pointed at.
///
/// # Panics
/// If the timeline is not of this schedule.
pub fn draw_svg(schedule: &Schedule, timeline: &Timeline, title: &str) -> String {
    document(title, &[Picture { title: "", schedule, timeline }], "ticks")
}

/// Several timelines below each other in one SVG document, as [`draw_svg`] draws one, to one scale. `unit` is that of their times.
///
/// # Panics
/// If a timeline is not of its schedule.
pub fn draw_svg_together(title: &str, pictures: &[Picture<'_>], unit: &str) -> String {
    document(title, pictures, unit)
}

fn document(title: &str, pictures: &[Picture<'_>], unit: &str) -> String {
    let title_height = |title: &str| if title.is_empty() { 0.0 } else { TITLE_HEIGHT };
    let height_of = |picture: &Picture<'_>| {
        title_height(picture.title) + picture.schedule.num_ranks() as f64 * (ROW_HEIGHT + ROW_GAP)
    };
    let height = MARGIN + title_height(title) + pictures.iter().map(height_of).sum::<f64>() + LEGEND_HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n{HATCH}<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    push_text(&mut svg, MARGIN, MARGIN + 12.0, title);
    let pixels_per_tick = (WIDTH - LEFT - MARGIN) / longest(pictures).max(1) as f64;
    let mut top = MARGIN + title_height(title);
    for picture in pictures {
        if !picture.title.is_empty() {
            push_text(&mut svg, MARGIN, top + 16.0, picture.title);
            top += TITLE_HEIGHT;
        }
        let painter = Painter::new(picture, pixels_per_tick, unit);
        for rank in 0..picture.schedule.num_ranks() {
            painter.push_row(&mut svg, rank, top);
            top += ROW_HEIGHT + ROW_GAP;
        }
    }
    if let Some(picture) = pictures.first() {
        Painter::new(picture, pixels_per_tick, unit).push_legend(&mut svg, top + MARGIN);
    }
    svg + "</svg>\n"
}

const HATCH: &str = "<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
                     patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#eeeeee\"/>\
                     <line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\" stroke=\"#bbbbbb\" stroke-width=\"2\"/></pattern></defs>\n";

struct Painter<'a> {
    schedule: &'a Schedule,
    timeline: &'a Timeline,
    turns: Vec<usize>,
    num_turns: usize,
    pixels_per_tick: f64,
    /// Of times.
    unit: &'a str,
}

impl<'a> Painter<'a> {
    fn new(picture: &Picture<'a>, pixels_per_tick: f64, unit: &'a str) -> Self {
        let &Picture { schedule, timeline, .. } = picture;
        let turns = turns(schedule);
        let num_turns = turns.iter().max().map_or(1, |last| last + 1);
        Painter { schedule, timeline, turns, num_turns, pixels_per_tick, unit }
    }

    fn push_row(&self, svg: &mut String, rank: usize, top: f64) {
        push_text(svg, MARGIN, top + 16.0, &format!("rank {rank}"));
        push_rect(svg, (LEFT, self.x(self.timeline.makespan) - LEFT), (top, ROW_HEIGHT), "url(#idle)", "");
        for (pass, span) in self.schedule.ranks[rank].iter().zip(&self.timeline.ranks[rank]) {
            let (left, width) = (self.x(span.start), self.x(span.end) - self.x(span.start));
            let tip = format!("{pass}, {} {} to {}", self.unit, span.start, span.end);
            let colour = self.colour(pass.kind, self.turns[pass.stage]);
            push_rect(svg, (left, width), (top, ROW_HEIGHT), &colour, &tip);
            let label = number(self.schedule, *pass);
            if label.len() as f64 * DIGIT_WIDTH < width {
                push_text(svg, left + 2.0, top + 16.0, &label);
            }
        }
    }

    fn push_legend(&self, svg: &mut String, top: f64) {
        let mut left = LEFT;
        let mut push = |fill: &str, name: &str| {
            push_rect(svg, (left, 16.0), (top, 16.0), fill, "");
            push_text(svg, left + 22.0, top + 12.0, name);
            left += 40.0 + name.len() as f64 * DIGIT_WIDTH;
        };
        for kind in kinds(self.schedule) {
            push(&self.colour(kind, 0), kind.name());
        }
        push("url(#idle)", "idle");
        if self.num_turns > 1 {
            push(&self.colour(PassKind::Forward, self.num_turns - 1), "lighter: later stages of the rank");
        }
    }

    fn x(&self, tick: u64) -> f64 {
        LEFT + tick as f64 * self.pixels_per_tick
    }

    /// The kind's colour, mixed with the more white the later the stage.
    fn colour(&self, kind: PassKind, turn: usize) -> String {
        let colour: [u64; 3] = match kind {
            PassKind::Forward => [86, 140, 214],
            PassKind::Backward => [92, 172, 96],
            PassKind::BackwardInput => [64, 176, 166],
            PassKind::BackwardWeight => [226, 160, 72],
            PassKind::Update => [205, 92, 92],
        };
        let (turn, num_turns) = (turn as u64, self.num_turns as u64);
        let [red, green, blue] = colour.map(|part| part + (255 - part) * 3 * turn / (4 * num_turns));
        format!("#{red:02x}{green:02x}{blue:02x}")
    }
}

/// `across` and `down` are where it begins, and its size. A `tip` is shown when it is pointed at.
fn push_rect(svg: &mut String, across: (f64, f64), down: (f64, f64), fill: &str, tip: &str) {
    let ((x, width), (y, height)) = (across, down);
    let shape =
        format!("x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\"");
    let written = if tip.is_empty() {
        writeln!(svg, "<rect {shape}/>")
    } else {
        let tip = escaped(tip);
        writeln!(svg, "<rect {shape} stroke=\"#ffffff\" stroke-width=\"0.5\"><title>{tip}</title></rect>")
    };
    written.expect("a string takes all");
}

fn push_text(svg: &mut String, x: f64, y: f64, text: &str) {
    writeln!(svg, "<text x=\"{x:.2}\" y=\"{y:.2}\">{}</text>", escaped(text)).expect("a string takes all");
}

/// Text that means itself in XML. Control characters, which XML has no way to write, become spaces.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&apos;"),
            _ if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => escaped.push(' '),
            _ => escaped.push(character),
        }
    }
    escaped
}
