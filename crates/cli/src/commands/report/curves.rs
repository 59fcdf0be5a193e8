//! Losses over steps as an SVG document.

use trireme_base::{Anchor, Svg, Ticks};

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

pub(super) struct Curves {
    pub(super) title: String,
    pub(super) training: Vec<Point>,
    pub(super) validation: Vec<Point>,
    /// The loss of counting pairs of tokens.
    pub(super) baseline: Option<f64>,
}

impl Curves {
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
            points.iter().map(|point| (scale.x(point.step as f64), scale.y(point.loss))).collect()
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

struct Scale {
    steps: Ticks,
    losses: Ticks,
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
        Scale { steps: Ticks::of_steps(last_step, 8), losses: Ticks::around(low, high, 6) }
    }

    fn x(&self, step: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * self.steps.part(step)
    }

    fn y(&self, loss: f64) -> f64 {
        TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - self.losses.part(loss))
    }

    fn push_axes(&self, svg: &mut Svg) {
        for loss in self.losses.values() {
            let y = self.y(loss);
            svg.line(&[(LEFT, y), (WIDTH - RIGHT, y)], "stroke=\"#e6e6e6\"");
            svg.text((LEFT - 8.0, y + 4.0), Anchor::End, &self.losses.label(loss));
        }
        for step in self.steps.values() {
            svg.text((self.x(step), HEIGHT - BOTTOM + 18.0), Anchor::Middle, &self.steps.label(step));
        }
        svg.text(((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 8.0), Anchor::Middle, "step");
        svg.text((8.0, TOP - 8.0), Anchor::Start, "nats per token");
    }
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
            assert!((LEFT..=WIDTH - RIGHT).contains(&scale.x(point.step as f64)), "{point:?}");
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
}
