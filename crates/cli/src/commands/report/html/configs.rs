//! Comparison of configs.

use super::loaded_run::LoadedRun;
use std::collections::BTreeSet;
use trireme_base::escape_markup;

/// Returns a table of the keys in which the runs differ, and a folded table of the keys that they share.
pub(super) fn configs(runs: &[LoadedRun]) -> String {
    let mut html = String::new();
    for run in runs.iter().filter(|run| run.keys.is_empty()) {
        let name = escape_markup(&run.name);
        html += &format!("<p class=\"note\">{name} has no config.toml that can be read.</p>\n");
    }
    let compared: Vec<&LoadedRun> = runs.iter().filter(|run| !run.keys.is_empty()).collect();
    let Some(first) = compared.first() else { return html };
    let keys: BTreeSet<&String> = compared.iter().flat_map(|run| run.keys.keys()).collect();
    let (shared, different): (Vec<&String>, Vec<&String>) = keys
        .into_iter()
        .partition(|key| compared.iter().all(|run| run.keys.get(*key) == first.keys.get(*key)));
    if !different.is_empty() {
        html += &table(&different, &compared, true);
    } else if compared.len() > 1 {
        html += "<p class=\"note\">The configs of the runs do not differ.</p>\n";
    }
    let summary = match compared.len() {
        1 => format!("all {} keys", shared.len()),
        _ => format!("{} keys that are the same in all runs", shared.len()),
    };
    if !shared.is_empty() {
        let table = table(&shared, &[first], false);
        html += &format!("<details><summary>{summary}</summary>\n{table}</details>\n");
    }
    html
}

/// Returns a table with a row for each key and a column for each run.
fn table(keys: &[&String], runs: &[&LoadedRun], has_names: bool) -> String {
    let mut html = "<div class=\"wide\"><table>\n".to_owned();
    if has_names {
        let names: String = runs.iter().map(|run| format!("<th>{}</th>", escape_markup(&run.name))).collect();
        html += &format!("<thead><tr><th></th>{names}</tr></thead>\n");
    }
    html += "<tbody>\n";
    for key in keys {
        let value = |run: &&LoadedRun| {
            let value = run.keys.get(*key).map_or_else(|| "–".to_owned(), |value| escape_markup(value));
            format!("<td><code>{value}</code></td>")
        };
        let values: String = runs.iter().map(value).collect();
        html += &format!("<tr><th><code>{}</code></th>{values}</tr>\n", escape_markup(key));
    }
    html + "</tbody></table></div>\n"
}
