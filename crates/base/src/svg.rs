use std::fmt::Write as _;

/// An SVG document on a white background, or an SVG element within a page. Coordinates and sizes are in pixels.
#[derive(Debug)]
pub struct Svg {
    text: String,
}

/// The part of a text that is placed at the given position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// The left end.
    Start,
    /// The middle.
    Middle,
    /// The right end.
    End,
}

impl Svg {
    /// Creates an empty document of this size. Shapes are drawn in the order of the calls.
    pub fn new(width: f64, height: f64) -> Self {
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        Svg { text }
    }

    /// Creates an empty element for an HTML page. `attributes` are inserted verbatim. The page determines the width of the element, and its
    /// style sheet determines the color of text.
    pub fn within_page(width: f64, height: f64, attributes: &str) -> Self {
        Svg { text: format!("<svg viewBox=\"0 0 {width} {height}\" {attributes}>\n") }
    }

    /// Begins a group for the shapes that follow. `attributes` are inserted verbatim.
    pub fn begin_group(&mut self, attributes: &str) {
        self.push(format_args!("<g {attributes}>"));
    }

    /// Ends the innermost open group.
    pub fn end_group(&mut self) {
        self.push(format_args!("</g>"));
    }

    /// Adds definitions, such as a pattern that shapes use as their fill. `xml` is inserted verbatim.
    pub fn definitions(&mut self, xml: &str) {
        self.push(format_args!("<defs>{xml}</defs>"));
    }

    /// Draws a rectangle with its upper left corner at `(x, y)`. A `tip` is shown while the pointer is over it.
    pub fn rect(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), fill: &str, tip: Option<&str>) {
        let shape =
            format!("x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\"");
        match tip.map(escape_markup) {
            None => self.push(format_args!("<rect {shape}/>")),
            Some(tip) => self.push(format_args!(
                "<rect {shape} stroke=\"#ffffff\" stroke-width=\"0.5\"><title>{tip}</title></rect>"
            )),
        }
    }

    /// Draws a line of text whose `anchor` is at `(x, y)`, where `y` is the baseline.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        self.push(format_args!("<text x=\"{x:.2}\" y=\"{y:.2}\"{anchor}>{}</text>", escape_markup(text)));
    }

    /// Draws a line through `points` with the attributes in `style`, such as `stroke="#888888"`.
    pub fn line(&mut self, points: &[(f64, f64)], style: &str) {
        self.push(format_args!("<polyline points=\"{}\" fill=\"none\" {style}/>", format_points(points)));
    }

    /// Draws the polygon with the corners `points`, with the attributes in `style`.
    pub fn area(&mut self, points: &[(f64, f64)], style: &str) {
        self.push(format_args!("<polygon points=\"{}\" {style}/>", format_points(points)));
    }

    /// Draws a dot with its center at `(x, y)`.
    pub fn dot(&mut self, (x, y): (f64, f64), fill: &str) {
        self.push(format_args!("<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"3.5\" fill=\"{fill}\"/>"));
    }

    /// Returns the complete document.
    pub fn finish(self) -> String {
        self.text + "</svg>\n"
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{element}").expect("a string takes all");
    }
}

fn format_points(points: &[(f64, f64)]) -> String {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.2},{y:.2}")).collect();
    points.join(" ")
}

/// Escapes text for XML and HTML, including quoted attributes. Control characters, which XML does not allow, become spaces.
pub fn escape_markup(text: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text((1.0, 2.0), Anchor::End, "a<b & \"c\"\u{7}\u{ffff}");
        svg.rect((0.0, 0.0), (5.0, 5.0), "#000000", Some("1 > 0"));
        let svg = svg.finish();
        assert!(svg.contains(" text-anchor=\"end\">a&lt;b &amp; &quot;c&quot;  </text>"), "{svg}");
        assert!(svg.contains("<title>1 &gt; 0</title>") && svg.ends_with("</svg>\n"), "{svg}");
    }

    #[test]
    fn an_element_within_a_page_has_no_background_of_its_own() {
        let mut svg = Svg::within_page(10.0, 5.0, "class=\"chart\"");
        svg.begin_group("class=\"run\"");
        svg.area(&[(0.0, 0.0), (1.0, 0.0), (1.0, 2.5)], "class=\"band\"");
        svg.end_group();
        let expected = "<svg viewBox=\"0 0 10 5\" class=\"chart\">\n<g class=\"run\">\n\
                        <polygon points=\"0.00,0.00 1.00,0.00 1.00,2.50\" class=\"band\"/>\n</g>\n</svg>\n";
        assert_eq!(svg.finish(), expected);
    }
}
