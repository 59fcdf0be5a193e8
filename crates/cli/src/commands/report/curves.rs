//! Losses over steps as an SVG document.

use trireme_base::{Anchor, Svg};

// Sizes in pixels.
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 60.0;
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
        let mut svg = Svg::new(WIDTH, HEIGHT);
        svg.text((LEFT, 18.0), Anchor::Start, &self.title);
        scale.push_axes(&mut svg);
        if let Some(baseline) = self.baseline {
            let y = scale.y(baseline);
            svg.line(&[(LEFT, y), (WIDTH - RIGHT, y)], "stroke=\"#888888\" stroke-dasharray=\"6 4\"");
            svg.text((WIDTH - RIGHT, y - 6.0), Anchor::End, &format!("bigram baseline {baseline:.2}"));
        }
        let places = |points: &[Point]| -> Vec<(f64, f64)> {
            points.iter().map(|point| (scale.x(point.step), scale.y(point.loss))).collect()
        };
        svg.line(&places(&training), "stroke=\"#9db8e8\" stroke-width=\"1.5\"");
        let validation = places(&self.validation);
        svg.line(&validation, "stroke=\"#1f4e9c\" stroke-width=\"2\"");
        for (x, y) in validation {
            svg.dot((x, y), "#1f4e9c");
        }
        let mut legend = vec![("training loss", "#9db8e8")];
        if !self.validation.is_empty() {
            legend.push(("validation loss", "#1f4e9c"));
        }
        for (index, (name, colour)) in legend.into_iter().enumerate() {
            let x = LEFT + 130.0 * index as f64;
            svg.rect((x, 29.0), (14.0, 10.0), colour, None);
            svg.text((x + 20.0, 38.0), Anchor::Start, name);
        }
        svg.finish()
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

    fn push_axes(&self, svg: &mut Svg) {
        let num_ticks = ((self.high - self.low) / self.tick).round() as usize;
        for index in 0..=num_ticks {
            let loss = self.low + self.tick * index as f64;
            let y = self.y(loss);
            svg.line(&[(LEFT, y), (WIDTH - RIGHT, y)], "stroke=\"#e6e6e6\"");
            svg.text((LEFT - 8.0, y + 4.0), Anchor::End, &self.label(loss));
        }
        let tick = round_up(self.last_step as f64 / 8.0).max(1.0) as u64;
        for step in (0..=self.last_step).step_by(tick as usize) {
            svg.text((self.x(step), HEIGHT - BOTTOM + 18.0), Anchor::Middle, &step.to_string());
        }
        svg.text(((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0), Anchor::Middle, "step");
        svg.text((8.0, TOP - 8.0), Anchor::Start, "nats per token");
    }

    /// With as many decimals as tell it from its neighbours.
    fn label(&self, loss: f64) -> String {
        let decimals = (-self.tick.log10().floor()).max(1.0) as usize;
        format!("{loss:.decimals$}")
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
    fn no_two_ticks_have_the_same_label() {
        let losses = [1.71, 1.72, 1.76, 1.79];
        let points: Vec<Point> = losses.iter().map(|&loss| Point { step: 1, loss }).collect();
        let scale = Scale::new(points.iter(), None);
        assert_eq!([0.0, 1.0].map(|index| scale.label(1.7 + scale.tick * index)), ["1.70", "1.72"]);
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!([0.3, 1.0, 3.0, 70.0, 125.0].map(round_up), [0.5, 1.0, 5.0, 100.0, 200.0]);
    }
}
