use super::{Picture, kinds, label_number, longest, stage_indices_on_rank};
use crate::pipeline::clock;
use crate::pipeline::costs::Costs;
use crate::pipeline::error::{PassIndex, ScheduleError};
use crate::pipeline::pass::Pass;
use crate::pipeline::range_checks;
use crate::pipeline::schedule::Schedule;
use crate::pipeline::timeline::{PassInterval, Timeline};

/// Draws a grid of ranks and time of at most `columns_max` columns, as text:
/// ```text
/// rank 0 |F0F1····B0──··B1──|
/// rank 1 |··F0B0──F1B1──····|
/// F forward; B backward; · idle; 1 tick: 2 columns
/// ```
/// The width of a pass is proportional to its time. A pass begins with its letter and microbatch if they fit. The letters of every second
/// stage of a rank are lowercase.
///
/// # Panics
/// If the timeline does not belong to the schedule.
pub fn draw_text(schedule: &Schedule, timeline: &Timeline, columns_max: usize) -> String {
    draw(schedule, timeline, columns_max, None)
}

/// Draws the grids of several timelines under their titles, the longest `num_columns` wide, and a line that explains the letters.
///
/// # Panics
/// If a timeline does not belong to its schedule.
pub fn draw_text_together(pictures: &[Picture<'_>], num_columns: usize) -> String {
    let scale = Scale::of(num_columns as u64, longest(pictures));
    let mut text = String::new();
    for Picture { title, schedule, timeline } in pictures {
        text += &format!("{title}\n{}", rows(schedule, timeline, &scale, None));
    }
    let schedule = pictures.first().map(|picture| picture.schedule);
    text + &schedule.map(|schedule| format!("{}\n", legend(schedule))).unwrap_or_default()
}

/// Returns the text of an error, followed by a drawing of the schedule as far as it runs, with a mark under the place of the error. Returns
/// the text alone if no place is known or the schedule cannot be drawn.
pub fn draw_error(schedule: &Schedule, costs: &Costs, error: &ScheduleError, columns_max: usize) -> String {
    let text = format!("{error}\n");
    let Some(place) = error.place().filter(|_| range_checks::check(schedule, costs).is_ok()) else {
        return text;
    };
    let (timeline, _) = clock::run(schedule, costs);
    text + &draw(schedule, &timeline, columns_max, Some(place))
}

/// Columns per tick, as a fraction.
struct Scale {
    columns: u64,
    ticks: u64,
}

impl Scale {
    /// Returns the scale at which the shortest pass has room for its letter and number, if the picture then fits. Otherwise returns the
    /// scale at which the picture is `columns_max` wide.
    fn new(schedule: &Schedule, timeline: &Timeline, columns_max: usize) -> Scale {
        let spans = timeline.ranks.iter().flatten();
        let shortest = spans.map(|span| span.ticks()).filter(|&ticks| ticks > 0).min().unwrap_or(1);
        let label = 1 + schedule.total_microbatches().saturating_sub(1).to_string().len() as u64;
        let wanted = u128::from(timeline.makespan) * u128::from(label) / u128::from(shortest);
        let (columns, ticks) = if wanted <= columns_max as u128 {
            (label, shortest)
        } else {
            (columns_max as u64, timeline.makespan)
        };
        Scale::of(columns, ticks)
    }

    fn of(columns: u64, ticks: u64) -> Scale {
        let ticks = ticks.max(1);
        let common = greatest_common_divisor(columns, ticks);
        Scale { columns: columns / common, ticks: ticks / common }
    }

    fn column(&self, tick: u64) -> usize {
        (u128::from(tick) * u128::from(self.columns) / u128::from(self.ticks)) as usize
    }

    fn describe(&self) -> String {
        let counted =
            |number: u64, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
        format!("{}: {}", counted(self.ticks, "tick"), counted(self.columns, "column"))
    }
}

fn greatest_common_divisor(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

fn draw(schedule: &Schedule, timeline: &Timeline, columns_max: usize, mark: Option<PassIndex>) -> String {
    let scale = Scale::new(schedule, timeline, columns_max);
    format!("{}{}; {}\n", rows(schedule, timeline, &scale, mark), legend(schedule), scale.describe())
}

fn rows(schedule: &Schedule, timeline: &Timeline, scale: &Scale, mark: Option<PassIndex>) -> String {
    let turns = stage_indices_on_rank(schedule);
    let label_len = (schedule.num_ranks() - 1).to_string().len();
    let mut text = String::new();
    for (rank, passes) in schedule.ranks.iter().enumerate() {
        let mut row = vec!['·'; scale.column(timeline.makespan)];
        for (pass, &span) in passes.iter().zip(&timeline.ranks[rank]) {
            let letter = letter(*pass, turns[pass.stage]);
            draw_pass(&mut row, format!("{letter}{}", label_number(schedule, *pass)), span, scale);
        }
        let label = format!("rank {rank:label_len$} |");
        text += &format!("{label}{}|\n", row.into_iter().collect::<String>());
        if let Some(place) = mark.filter(|place| place.rank == rank) {
            let (column, width) = mark_position(timeline, place, scale);
            let what = passes.get(place.index).map_or(String::new(), |pass| format!(" {pass}"));
            text += &format!("{}{}{what}\n", " ".repeat(label.len() + column), "^".repeat(width));
        }
    }
    text
}

/// Returns the letter of a pass, lowercase in every other stage of its rank.
fn letter(pass: Pass, turn: usize) -> String {
    let letter = pass.kind.name();
    if turn % 2 == 1 { letter.to_ascii_lowercase() } else { letter.to_owned() }
}

/// Returns the column and the width of the mark of a place: under its pass, or after the last pass that ran.
fn mark_position(timeline: &Timeline, place: PassIndex, scale: &Scale) -> (usize, usize) {
    let spans = &timeline.ranks[place.rank];
    match spans.get(place.index) {
        Some(span) => {
            let column = scale.column(span.start);
            (column, scale.column(span.end).saturating_sub(column).max(1))
        }
        None => (spans.last().map_or(0, |span| scale.column(span.end)), 1),
    }
}

fn draw_pass(row: &mut [char], label: String, span: PassInterval, scale: &Scale) {
    let cells = &mut row[scale.column(span.start)..scale.column(span.end)];
    let mut label: Vec<char> = label.chars().collect();
    // A truncated number would read as another number.
    if label.len() > cells.len() {
        label.truncate(1);
    }
    label.resize(label.len().max(cells.len()), '─');
    cells.iter_mut().zip(label).for_each(|(cell, character)| *cell = character);
}

fn legend(schedule: &Schedule) -> String {
    let mut parts: Vec<String> = kinds(schedule).map(|kind| format!("{kind} {}", kind.words())).collect();
    parts.push("· idle".to_owned());
    let has_small = stage_indices_on_rank(schedule).contains(&1);
    let small = if has_small { "; lowercase letters: every second stage of a rank" } else { "" };
    parts.join("; ") + small
}
