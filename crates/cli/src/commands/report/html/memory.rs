//! Memory by category, measured and predicted, as a figure of a page.

use super::hues::run_color_attributes;
use super::loaded_run::LoadedRun;
use trireme_base::{Anchor, Bytes, Svg, Ticks, escape_markup};
use trireme_train::metrics::MemoryPeakBytes;

// Sizes in pixels, before the page scales the chart.
const WIDTH: f64 = 640.0;
const LEFT: f64 = 116.0;
/// Leaves room for the number next to the longest bar.
const RIGHT: f64 = 84.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 30.0;
const MEASURED_HEIGHT: f64 = 11.0;
const PREDICTED_HEIGHT: f64 = 5.0;
/// Height of a run's bars in a category.
const RUN_HEIGHT: f64 = MEASURED_HEIGHT + PREDICTED_HEIGHT + 3.0;
/// Gap between categories.
const GAP: f64 = 8.0;

struct Bars<'a> {
    name: &'a str,
    color: String,
    measured: MemoryPeakBytes,
    predicted: Option<MemoryPeakBytes>,
}

/// Returns a group of bars for each category; `None` if no run has recorded its memory.
pub(super) fn memory_chart<'a>(runs: &'a [LoadedRun]) -> Option<String> {
    let bars = |(index, run): (usize, &'a LoadedRun)| {
        let last = run.records.last();
        let (measured, predicted) = (last.memory_peak_bytes, last.memory_predicted_bytes);
        Bars { name: &run.name, color: run_color_attributes(index), measured, predicted }
    };
    let bars: Vec<Bars<'a>> = runs.iter().enumerate().map(bars).collect();
    figure(&bars)
}

fn figure(runs: &[Bars<'_>]) -> Option<String> {
    let peaks = runs.iter().flat_map(|run| [Some(run.measured), run.predicted]).flatten();
    let largest = peaks.flat_map(|peak| peak.named()).map(|(_, bytes)| bytes).max()?;
    if largest == 0 {
        return None;
    }
    let (unit, unit_bytes) = Bytes(largest).unit();
    let scale = Scale { unit_bytes, ticks: Ticks::around(0.0, largest as f64 / unit_bytes as f64, 6) };
    let category_height = RUN_HEIGHT * runs.len() as f64 + GAP;
    let bottom = TOP + category_height * MemoryPeakBytes::default().named().count() as f64;
    let attributes = "class=\"chart\" role=\"img\" aria-label=\"Memory by category\"";
    let mut svg = Svg::within_page(WIDTH, bottom + BOTTOM, attributes);
    svg.text((8.0, TOP - 14.0), Anchor::Start, unit);
    for value in scale.ticks.values() {
        let x = scale.at(value);
        svg.line(&[(x, TOP), (x, bottom)], "class=\"grid\"");
        svg.text((x, bottom + 18.0), Anchor::Middle, &scale.ticks.label(value));
    }
    for (category, (name, _)) in MemoryPeakBytes::default().named().enumerate() {
        let top = TOP + GAP / 2.0 + category_height * category as f64;
        svg.text((LEFT - 8.0, top + (category_height - GAP) / 2.0 + 3.0), Anchor::End, name);
        for (index, run) in runs.iter().enumerate() {
            push_bars(&mut svg, &scale, run, category, top + RUN_HEIGHT * index as f64);
        }
    }
    let (svg, legend) = (svg.finish(), legend(runs));
    Some(format!("<figure>\n<h3>Memory</h3>\n{svg}<figcaption>{legend}</figcaption>\n</figure>\n"))
}

struct Scale {
    unit_bytes: u64,
    ticks: Ticks,
}

impl Scale {
    /// Returns the x coordinate of a value in the unit.
    fn at(&self, value: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * self.ticks.fraction(value)
    }

    fn x(&self, bytes: u64) -> f64 {
        self.at(bytes as f64 / self.unit_bytes as f64)
    }
}

/// Draws the wide bar of the measured peak, and below it the narrow bar of the predicted peak.
fn push_bars(svg: &mut Svg, scale: &Scale, run: &Bars<'_>, category: usize, top: f64) {
    let of_category = |peaks: MemoryPeakBytes| peaks.named().nth(category).expect("a category or the total");
    let (name, measured) = of_category(run.measured);
    let tip = |what: &str, bytes: u64| format!("{}: {name}, {what} {}", run.name, Bytes(bytes));
    let size = |bytes: u64, height: f64| (scale.x(bytes) - LEFT, height);
    svg.begin_group(&run.color);
    svg.rect((LEFT, top), size(measured, MEASURED_HEIGHT), "currentColor", Some(&tip("measured", measured)));
    if let Some(predicted) = run.predicted.map(|peaks| of_category(peaks).1) {
        svg.begin_group("class=\"predicted\"");
        let place = (LEFT, top + MEASURED_HEIGHT);
        let size = size(predicted, PREDICTED_HEIGHT);
        svg.rect(place, size, "currentColor", Some(&tip("predicted", predicted)));
        svg.end_group();
    }
    svg.end_group();
    svg.text((scale.x(measured) + 6.0, top + 10.0), Anchor::Start, &Bytes(measured).to_string());
}

fn legend(runs: &[Bars<'_>]) -> String {
    let mut html = "<ul class=\"legend\">".to_owned();
    for Bars { name, color, .. } in runs {
        html += &format!("<li {color}><span class=\"swatch\"></span>{}</li>", escape_markup(name));
    }
    html += "</ul><p class=\"note\">The highest on rank 0 until the last recorded step";
    if runs.iter().any(|run| run.predicted.is_some()) {
        html += "; the narrow, fainter bars are what was predicted";
    }
    html + ".</p>"
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::CategoryBytes;

    fn bars(measured: MemoryPeakBytes, predicted: Option<MemoryPeakBytes>) -> Bars<'static> {
        Bars { name: "a & b", color: run_color_attributes(0), measured, predicted }
    }

    #[test]
    fn bars_are_as_long_as_their_memory() {
        let measured = MemoryPeakBytes { categories: CategoryBytes([2 << 20, 0, 0, 0, 0]), total: 4 << 20 };
        let predicted = MemoryPeakBytes { categories: CategoryBytes([1 << 20, 0, 0, 0, 0]), total: 4 << 20 };
        let html = figure(&[bars(measured, Some(predicted)), bars(measured, None)]).unwrap();
        assert_eq!(html.matches("<rect").count(), 6 * 3);
        let scale = (WIDTH - LEFT - RIGHT) / 4.0;
        for (length, number) in [(4.0, 3), (2.0, 2), (1.0, 1), (0.0, 12)] {
            let width = format!("width=\"{:.2}\"", scale * length);
            assert_eq!(html.matches(&width).count(), number, "{width} {html}");
        }
        assert!(
            html.contains("a &amp; b: parameters, predicted 1.00MiB") && html.contains(">MiB<"),
            "{html}"
        );
    }

    #[test]
    fn memory_that_was_not_recorded_is_not_drawn() {
        assert!(figure(&[bars(MemoryPeakBytes::default(), None)]).is_none());
        let html =
            figure(&[bars(MemoryPeakBytes { total: usize::MAX, ..Default::default() }, None)]).unwrap();
        assert!(!html.contains("NaN") && !html.contains("inf") && !html.contains("predicted"), "{html}");
    }
}
