//! Losses over steps as an SVG document.

use std::fmt::Write;

// Sizes in pixels.
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 44.0;

/// The training loss is drawn as the mean of the steps in each of so many columns.
const COLUMNS_MAX: usize = 280;

/// A loss at a step, in nats a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) step: u64,
    pub(super) loss: f64,
}

/// The losses of a run.
pub(super) struct Curves {
    pub(super) title: String,
    pub(super) training: Vec<Point>,
    pub(super) validation: Vec<Point>,
    /// The loss of counting pairs of tokens.
    pub(super) baseline: Option<f64>,
}

impl Curves {
    /// The document.
    pub(super) fn to_svg(&self) -> String {
        let training = thinned(&self.training);
        let scale = Scale::new(training.iter().chain(&self.validation), self.baseline);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
        );
        push_text(&mut svg, LEFT, 22.0, "start", &self.title);
        scale.push_axes(&mut svg);
        if let Some(baseline) = self.baseline {
            let y = scale.y(baseline);
            push_line(
                &mut svg,
                &[(LEFT, y), (WIDTH - RIGHT, y)],
                "stroke=\"#888888\" stroke-dasharray=\"6 4\"",
            );
            push_text(&mut svg, WIDTH - RIGHT, y - 6.0, "end", &format!("bigram baseline {baseline:.2}"));
        }
        let places = |points: &[Point]| -> Vec<(f64, f64)> {
            points.iter().map(|point| (scale.x(point.step), scale.y(point.loss))).collect()
        };
        push_line(&mut svg, &places(&training), "stroke=\"#9db8e8\" stroke-width=\"1.5\"");
        let validation = places(&self.validation);
        push_line(&mut svg, &validation, "stroke=\"#1f4e9c\" stroke-width=\"2\"");
        for (x, y) in validation {
            push(
                &mut svg,
                format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"#1f4e9c\"/>\n"),
            );
        }
        let mut legend = vec![("training loss", "#9db8e8")];
        if !self.validation.is_empty() {
            legend.push(("validation loss", "#1f4e9c"));
        }
        for (index, (name, color)) in legend.into_iter().enumerate() {
            let x = WIDTH - RIGHT - 250.0 + 130.0 * index as f64;
            push(
                &mut svg,
                format_args!("<rect x=\"{x}\" y=\"13\" width=\"14\" height=\"10\" fill=\"{color}\"/>\n"),
            );
            push_text(&mut svg, x + 20.0, 22.0, "start", name);
        }
        svg + "</svg>\n"
    }
}

/// Means over neighbours, so that there are no more points than columns.
fn thinned(points: &[Point]) -> Vec<Point> {
    let mean = |points: &[Point]| Point {
        step: points[points.len() / 2].step,
        loss: points.iter().map(|point| point.loss).sum::<f64>() / points.len() as f64,
    };
    points.chunks(points.len().div_ceil(COLUMNS_MAX).max(1)).map(mean).collect()
}

/// Where steps and losses lie in the picture.
struct Scale {
    last_step: u64,
    low: f64,
    high: f64,
    tick: f64,
}

impl Scale {
    fn new<'a>(points: impl Iterator<Item = &'a Point>, baseline: Option<f64>) -> Self {
        let (mut last_step, mut low, mut high) = (1, f64::INFINITY, f64::NEG_INFINITY);
        let mut take = |loss: f64| (low, high) = (low.min(loss), high.max(loss));
        baseline.into_iter().for_each(&mut take);
        for point in points {
            last_step = last_step.max(point.step);
            take(point.loss);
        }
        if low >= high {
            (low, high) = (
                if low.is_finite() { low - 0.5 } else { 0.0 },
                if high.is_finite() { high + 0.5 } else { 1.0 },
            );
        }
        let tick = round_up((high - low) / 6.0);
        Scale { last_step, low: (low / tick).floor() * tick, high: (high / tick).ceil() * tick, tick }
    }

    fn x(&self, step: u64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * step as f64 / self.last_step as f64
    }

    fn y(&self, loss: f64) -> f64 {
        TOP + (HEIGHT - TOP - BOTTOM) * (self.high - loss) / (self.high - self.low)
    }

    fn push_axes(&self, svg: &mut String) {
        let num_ticks = ((self.high - self.low) / self.tick).round() as usize;
        for index in 0..=num_ticks {
            let loss = self.low + self.tick * index as f64;
            let y = self.y(loss);
            push_line(svg, &[(LEFT, y), (WIDTH - RIGHT, y)], "stroke=\"#e6e6e6\"");
            push_text(svg, LEFT - 8.0, y + 4.0, "end", &format!("{loss:.1}"));
        }
        let tick = round_up(self.last_step as f64 / 8.0).max(1.0) as u64;
        for step in (0..=self.last_step).step_by(tick as usize) {
            push_text(svg, self.x(step), HEIGHT - BOTTOM + 18.0, "middle", &step.to_string());
        }
        push_text(svg, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0, "middle", "step");
        push_text(svg, 8.0, TOP - 8.0, "start", "nats a token");
    }
}

/// The next number of the form 1, 2 or 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10.0_f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|&round| round >= value)
        .unwrap_or(value)
}

fn push(svg: &mut String, text: std::fmt::Arguments<'_>) {
    svg.write_fmt(text).expect("writing to a string does not fail");
}

fn push_line(svg: &mut String, points: &[(f64, f64)], style: &str) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    push(svg, format_args!("<polyline points=\"{}\" fill=\"none\" {style}/>\n", points.join(" ")));
}

fn push_text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    push(
        svg,
        format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#333333\">{text}</text>\n"
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_lies_in_the_picture_and_a_long_run_is_thinned() {
        let training: Vec<Point> =
            (1..=10_000).map(|step| Point { step, loss: 5.5 - 4.0 * (step as f64 / 1e4).sqrt() }).collect();
        assert!(thinned(&training).len() <= COLUMNS_MAX);
        let scale = Scale::new(training.iter(), Some(2.56));
        for point in &training {
            assert!((LEFT..=WIDTH - RIGHT).contains(&scale.x(point.step)), "{point:?}");
            assert!((TOP..=HEIGHT - BOTTOM).contains(&scale.y(point.loss)), "{point:?}");
        }
        let validation = vec![Point { step: 5000, loss: 3.0 }];
        let svg = Curves { title: "runs/a<b".into(), training, validation, baseline: Some(2.56) }.to_svg();
        for part in ["runs/a&lt;b", "bigram baseline 2.56", "<circle", "validation loss", "</svg>"] {
            assert!(svg.contains(part), "{part}");
        }
    }

    #[test]
    fn runs_of_one_step_or_of_none_that_is_finite_are_drawn() {
        for training in [vec![], vec![Point { step: 1, loss: 2.0 }]] {
            let svg =
                Curves { title: String::new(), training, validation: Vec::new(), baseline: None }.to_svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!([0.3, 1.0, 3.0, 70.0, 125.0].map(round_up), [0.5, 1.0, 5.0, 100.0, 200.0]);
    }
}
