//! A chart of curves over steps, as a figure of a page or as a standalone picture.

use super::downsampling::{CurvePoint, DownsampledCurve};
use super::hues::run_color_attributes;
use std::fmt::Write as _;
use trireme_base::{Anchor, Svg, Ticks, escape_markup};

// Sizes in pixels, before the page scales the chart.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 290.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 42.0;

/// Height of the title and the legend above the chart in a standalone picture.
const HEAD: f64 = 48.0;

/// Style of a standalone picture of one run, for programs that do not support CSS variables.
const PICTURE_STYLE: &str = "<style>.grid{stroke:#e6e6e6} .level{stroke:#888888;stroke-dasharray:6 4} .run{color:#1f4e9c;stroke:#1f4e9c} \
                             .thin{stroke-width:1.3;opacity:0.6} .thick{stroke-width:2.4} .band{stroke:none;fill:#1f4e9c;opacity:0.15} \
                             text{stroke:none}</style>";

/// A curve with more points is drawn without dots.
const DOTS_MAX: usize = 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CurveStyle {
    Thin,
    /// A thick line with a dot at each point, if they are few.
    Dotted,
}

pub(super) struct Curve {
    /// Index of the run, which selects the color.
    pub(super) run: usize,
    pub(super) name: String,
    pub(super) style: CurveStyle,
    pub(super) points: DownsampledCurve,
}

/// A value that is the same at all steps.
pub(super) struct HorizontalLine {
    pub(super) name: String,
    pub(super) value: f64,
}

pub(super) struct Chart {
    pub(super) title: &'static str,
    pub(super) unit: String,
    /// End of the axis of steps. No point is beyond it.
    pub(super) last_step: u64,
    /// Whether the axis shows zero, so that heights can be compared.
    pub(super) is_from_zero: bool,
    pub(super) curves: Vec<Curve>,
    pub(super) horizontal_lines: Vec<HorizontalLine>,
}

impl Chart {
    /// Returns the figure; `None` if no curve has a point.
    pub(super) fn to_html(&self) -> Option<String> {
        self.drawn().next()?;
        let frame = self.frame();
        let label = escape_markup(&format!("{}, {}", self.title, self.unit));
        let attributes = format!(
            "class=\"chart\" role=\"img\" aria-label=\"{label}\" data-left=\"{LEFT}\" data-right=\"{}\" data-top=\"{TOP}\" \
             data-bottom=\"{}\" data-last-step=\"{}\"",
            WIDTH - RIGHT,
            HEIGHT - BOTTOM,
            frame.steps.high
        );
        let mut svg = Svg::within_page(WIDTH, HEIGHT, &attributes);
        self.push(&mut svg, &frame);
        let (title, svg, legend) = (escape_markup(self.title), svg.finish(), self.legend());
        Some(format!("<figure>\n<h3>{title}</h3>\n{svg}<figcaption>{legend}</figcaption>\n</figure>\n"))
    }

    /// Returns a standalone SVG document with this `title`, for a chart of one run.
    pub(super) fn to_svg(&self, title: &str) -> String {
        let mut svg = Svg::new(WIDTH, HEAD + HEIGHT);
        svg.definitions(PICTURE_STYLE);
        svg.text((LEFT, 18.0), Anchor::Start, title);
        let curves = self.drawn().map(|curve| (curve.style.class(), &curve.name));
        let levels = self.horizontal_lines.iter().map(|level| ("level", &level.name));
        for (index, (class, name)) in curves.chain(levels).enumerate() {
            let x = LEFT + 140.0 * index as f64;
            svg.begin_group("class=\"run\"");
            svg.line(&[(x, 36.0), (x + 18.0, 36.0)], &format!("class=\"{class}\""));
            svg.text((x + 24.0, 40.0), Anchor::Start, name);
            svg.end_group();
        }
        svg.begin_group(&format!("transform=\"translate(0 {HEAD})\""));
        self.push(&mut svg, &self.frame());
        svg.end_group();
        svg.finish()
    }

    fn push(&self, svg: &mut Svg, frame: &Frame) {
        frame.push_axes(svg, &self.unit);
        for curve in self.drawn() {
            frame.push_band(svg, curve);
        }
        for HorizontalLine { value, .. } in &self.horizontal_lines {
            let y = frame.y(*value);
            svg.line(&[(LEFT, y), (WIDTH - RIGHT, y)], "class=\"level\"");
        }
        for curve in self.drawn() {
            frame.push_curve(svg, curve);
        }
    }

    fn drawn(&self) -> impl Iterator<Item = &Curve> {
        self.curves.iter().filter(|curve| !curve.points.parts.is_empty())
    }

    fn frame(&self) -> Frame {
        let points = self.drawn().flat_map(|curve| curve.points.parts.iter().flatten());
        let ends = points.flat_map(|point| [point.low, point.high]);
        let ends = ends.chain(self.horizontal_lines.iter().map(|level| level.value));
        let ends = ends.chain(self.is_from_zero.then_some(0.0));
        let (low, high) =
            ends.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), end| (low.min(end), high.max(end)));
        Frame { steps: Ticks::of_steps(self.last_step, 8), values: Ticks::around(low, high, 8) }
    }

    fn legend(&self) -> String {
        let mut html = "<ul class=\"legend\">".to_owned();
        let mut push = |color: &str, look: &str, name: &str| {
            html += &format!("<li {color}><span class=\"swatch {look}\"></span>{}</li>", escape_markup(name));
        };
        for curve in self.drawn() {
            push(&run_color_attributes(curve.run), curve.style.class(), &curve.name);
        }
        self.horizontal_lines.iter().for_each(|level| push("", "level", &level.name));
        html += "</ul>";
        let longest = self.drawn().map(|curve| curve.points.steps_per_point).max().unwrap_or(1);
        if longest > 1 {
            html += &format!(
                "<p class=\"note\">A point is the mean of up to {longest} values; the band around it reaches from the lowest to the \
                 highest.</p>"
            );
        }
        html
    }
}

impl CurveStyle {
    fn class(self) -> &'static str {
        match self {
            CurveStyle::Thin => "thin",
            CurveStyle::Dotted => "thick",
        }
    }
}

struct Frame {
    steps: Ticks,
    values: Ticks,
}

impl Frame {
    fn x(&self, step: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * self.steps.fraction(step)
    }

    fn y(&self, value: f64) -> f64 {
        TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - self.values.fraction(value))
    }

    fn push_axes(&self, svg: &mut Svg, unit: &str) {
        svg.text((8.0, TOP - 14.0), Anchor::Start, unit);
        for value in self.values.values() {
            let y = self.y(value);
            svg.line(&[(LEFT, y), (WIDTH - RIGHT, y)], "class=\"grid\"");
            svg.text((LEFT - 8.0, y + 4.0), Anchor::End, &self.values.label(value));
        }
        for step in self.steps.values() {
            let x = self.x(step);
            svg.line(&[(x, TOP), (x, HEIGHT - BOTTOM)], "class=\"grid\"");
            svg.text((x, HEIGHT - BOTTOM + 18.0), Anchor::Middle, &self.steps.label(step));
        }
        svg.text(((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 6.0), Anchor::Middle, "step");
    }

    /// Draws the band from the lowest to the highest of the values that each point combines.
    fn push_band(&self, svg: &mut Svg, curve: &Curve) {
        if curve.points.steps_per_point == 1 {
            return;
        }
        svg.begin_group(&run_color_attributes(curve.run));
        for part in &curve.points.parts {
            let at = |point: &CurvePoint, value: f64| (self.x(point.step as f64), self.y(value));
            let above = part.iter().map(|point| at(point, point.high));
            let below = part.iter().rev().map(|point| at(point, point.low));
            let outline: Vec<(f64, f64)> = above.chain(below).collect();
            svg.area(&outline, "class=\"band\"");
        }
        svg.end_group();
    }

    fn push_curve(&self, svg: &mut Svg, curve: &Curve) {
        let points = || curve.points.parts.iter().flatten();
        let mut data = String::new();
        for point in points() {
            let _ = write!(data, "{} {:.4e} ", point.step, point.mean);
        }
        let (color, name) = (run_color_attributes(curve.run), escape_markup(&curve.name));
        svg.begin_group(&format!("{color} data-name=\"{name}\" data-points=\"{}\"", data.trim_end()));
        let has_dots = curve.style == CurveStyle::Dotted && points().count() <= DOTS_MAX;
        for part in &curve.points.parts {
            let places: Vec<(f64, f64)> =
                part.iter().map(|point| (self.x(point.step as f64), self.y(point.mean))).collect();
            svg.line(&places, &format!("class=\"{}\"", curve.style.class()));
            // A line of one point cannot be seen.
            if has_dots || places.len() == 1 {
                places.iter().for_each(|&place| svg.dot(place, "currentColor"));
            }
        }
        svg.end_group();
    }
}

#[cfg(test)]
mod tests {
    use super::super::downsampling::downsampled;
    use super::*;

    fn chart(curves: &[&[(u64, Option<f64>)]]) -> Chart {
        let curve = |(run, values): (usize, &&[(u64, Option<f64>)])| Curve {
            run,
            name: format!("run <{run}>"),
            style: CurveStyle::Thin,
            points: downsampled(values),
        };
        let levels = vec![HorizontalLine { name: "baseline".to_owned(), value: 9.5 }];
        let curves = curves.iter().enumerate().map(curve).collect();
        let unit = "nats".to_owned();
        Chart { title: "loss", unit, last_step: 1000, is_from_zero: false, curves, horizontal_lines: levels }
    }

    /// Coordinates of all lines and areas of a figure.
    fn places(html: &str) -> Vec<(f64, f64)> {
        let lists = html.split(" points=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        let place = |pair: &str| {
            let (x, y) = pair.split_once(',').unwrap();
            (x.parse().unwrap(), y.parse().unwrap())
        };
        lists.flat_map(|list| list.split(' ').map(place).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn all_points_lie_in_the_frame_and_gaps_stay() {
        let values = [(1, Some(5.0)), (2, None), (3, Some(4.0)), (4, Some(-3.0))];
        let html = chart(&[&values, &[(1, None)]]).to_html().unwrap();
        for (x, y) in places(&html) {
            assert!((LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y), "{x} {y}");
        }
        assert_eq!(
            html.matches("class=\"thin\"").count(),
            2,
            "a line before the gap, and one behind it: {html}"
        );
        assert_eq!(html.matches("<circle").count(), 1, "{html}");
        assert!(html.contains("data-points=\"1 5.0000e0 3 4.0000e0 4 -3.0000e0\""), "{html}");
        // The legend names only what is drawn.
        assert!(
            html.contains("run &lt;0&gt;") && html.contains("baseline") && !html.contains("run &lt;1&gt;")
        );
        assert!(!html.contains("class=\"band\""), "{html}");
    }

    #[test]
    fn a_long_curve_has_a_band_and_says_so() {
        let values: Vec<(u64, Option<f64>)> =
            (1..=1000).map(|step| (step, Some((step % 7) as f64))).collect();
        let html = chart(&[&values]).to_html().unwrap();
        assert_eq!(html.matches("class=\"band\"").count(), 1);
        assert!(html.contains("the mean of up to 4 values"), "{html}");
    }

    #[test]
    fn without_points_there_is_an_svg_but_no_html() {
        let chart = chart(&[&[(1, None)], &[]]);
        assert!(chart.to_html().is_none());
        let svg = Chart { horizontal_lines: Vec::new(), ..chart }.to_svg("");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_picture_has_a_title_and_a_legend() {
        let values: Vec<(u64, Option<f64>)> = (1..=1000).map(|step| (step, Some(step as f64))).collect();
        let svg = chart(&[&values]).to_svg("runs/a<b");
        for part in [">runs/a&lt;b<", ">run &lt;0&gt;<", ">baseline<", "class=\"band\"", "</svg>"] {
            assert!(svg.contains(part), "{part}");
        }
        assert!(!svg.contains("var("), "{svg}");
    }
}
