//! The whole page.

use super::super::breakdown::Breakdown;
use super::charts::charts;
use super::configs::configs;
use super::facts::facts_table;
use super::hues::run_color_attributes;
use super::loaded_run::{LoadedRun, TraceDrawing};
use trireme_base::escape_markup;

/// The beginning of every page, by which an earlier page is recognized. Its Content-Security-Policy keeps browsers from loading anything.
pub(super) const BEGINNING: &str = "<!doctype html>
<html lang=\"en\">
<head>
<meta charset=\"utf-8\">
<meta name=\"generator\" content=\"trireme report html\">
<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">
";

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

pub(super) fn page(runs: &[LoadedRun]) -> String {
    let names: Vec<String> = runs.iter().map(|run| escape_markup(&run.name)).collect();
    let title = names.join(", ");
    let mut html = format!("{BEGINNING}<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n");
    html += &format!("<h1>{title}</h1>\n{}", facts_table(runs));
    let class = if runs.len() > 3 { "charts many" } else { "charts" };
    html += &format!("<h2>Charts</h2>\n<div class=\"{class}\">\n{}</div>\n", charts(runs));
    html += &drawings(runs);
    let heading = if runs.len() > 1 { "Where the configs differ" } else { "Config" };
    html += &format!("<h2>{heading}</h2>\n{}", configs(runs));
    html + &format!("<script>\n{SCRIPT}</script>\n</body>\n</html>\n")
}

fn times_table(breakdown: &Breakdown) -> String {
    let row = |(name, part): (&str, f64)| format!("<tr><th>{name}</th><td>{:.1} %</td></tr>\n", 100.0 * part);
    let rows: String = breakdown.parts().into_iter().map(row).collect();
    let title = format!("time of step {}, all workers{}", breakdown.step, breakdown.mfu());
    format!(
        "<div class=\"wide\"><table>\n<thead><tr><th>{title}</th><th></th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )
}

/// Returns the last traced step of each run that has traced steps.
fn drawings(runs: &[LoadedRun]) -> String {
    let mut html = String::new();
    for (index, run) in runs.iter().enumerate() {
        let content = match &run.drawing {
            None => continue,
            Some(TraceDrawing::Svg(svg)) => format!("<div class=\"drawing\">{svg}</div>"),
            Some(TraceDrawing::Missing(why)) => format!("<p class=\"note\">{}</p>", escape_markup(why)),
        };
        let (color, name) = (run_color_attributes(index), escape_markup(&run.name));
        let times = run.breakdown.as_ref().map_or_else(String::new, times_table);
        html += &format!("<h3 {color}><span class=\"swatch\"></span>{name}</h3>\n{content}\n{times}");
    }
    if html.is_empty() { html } else { format!("<h2>The last traced step</h2>\n{html}") }
}
