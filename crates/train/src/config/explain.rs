//! Writes configs: an explanation of every key, and the resolved config of a run.

use super::aliases;
use super::mistake::ConfigError;
use super::reader::section_hint;
use super::section::{Key, Section};
use super::sections::{FP8_KEYS, LOSS_SCALE_KEYS, Sections};
use super::validate::{is_language_model_key, model_shape_keys};
use super::{Config, Fp8, ModelSource, TaskKind};
use super::{compression, optimizer};
use trireme_tensor::Precision;

impl Config {
    /// Returns every key of a section, or of all sections if `section` is `None`, with its type, default and meaning, as the text of a
    /// config file. Also accepts the name of a key, such as `optimizer.lr`. For any other word, returns the keys whose name, documentation
    /// or values contain it, and the keys that have this name in another system.
    ///
    /// # Errors
    /// [`ConfigError::UnknownSection`] if no section and no key fits.
    pub fn explain(section: Option<&str>) -> Result<String, ConfigError> {
        let defaults = Sections::default();
        let Some(name) = section else {
            let all: Vec<String> =
                defaults.all().map(|(name, section)| explain_section(name, section)).collect();
            return Ok(all.join("\n"));
        };
        match (defaults.get(name), explain_dotted(&defaults, name)) {
            (Some(section), _) => Ok(explain_section(name, section)),
            (None, Some(key)) => Ok(key),
            (None, None) => match search(&defaults, name) {
                found if found.is_empty() => {
                    Err(ConfigError::UnknownSection { section: name.to_owned(), hint: section_hint(name) })
                }
                found => Ok(found),
            },
        }
    }

    /// Returns the config as the text of a file that [`Config::load`] reads as the same config.
    pub fn to_toml(&self) -> String {
        let sections = self.sections.all().map(|(name, section)| {
            let keys = section.keys();
            let lines = keys.iter().filter(|key| has_effect(self, name, key)).filter_map(assignment);
            format!("\n[{name}]\n{}{}", lines.collect::<String>(), write_lists(name, section))
        });
        format!(
            "# The resolved config of this run; `trireme config --explain` describes the keys.\n{}",
            sections.collect::<String>()
        )
    }

    /// Returns every key that has an effect, as `section.key`, with its value.
    pub fn values(&self) -> Vec<(String, String)> {
        let mut values = Vec::new();
        let text = |key: Key| key.value.map_or_else(|| "not set".to_owned(), |value| value.to_string());
        for (name, section) in self.sections.all() {
            let keys = section.keys().into_iter().filter(|key| has_effect(self, name, key));
            values.extend(keys.map(|key| (format!("{name}.{}", key.name), text(key))));
            for (list, tables) in section.lists() {
                for (index, table) in tables.tables().into_iter().enumerate() {
                    let keys = table.keys().into_iter();
                    values
                        .extend(keys.map(|key| (format!("{name}.{list}[{index}].{}", key.name), text(key))));
                }
            }
        }
        values
    }
}

/// Returns the keys that a word may refer to: by their names here and in other systems, by their documentation, and by the values that they
/// accept.
fn search(sections: &Sections, word: &str) -> String {
    let lower = word.to_lowercase();
    let mut text = String::new();
    for (foreign, key, difference) in aliases::search_aliases(word) {
        let difference = if difference.is_empty() { String::new() } else { format!(": {difference}") };
        text += &format!("# `{foreign}` in other systems is {key} here{difference}\n");
    }
    let foreign: Vec<&str> = aliases::search_aliases(word).map(|(_, key, _)| key).collect();
    let is_named = |key: &Key| key.name == lower;
    let is_found = |name: &str, key: &Key| {
        let is_documented = key.docs.iter().any(|line| line.to_lowercase().contains(&lower));
        let is_value = key.expected.contains(&format!("\"{lower}"));
        key.name.contains(&lower)
            || is_documented
            || is_value
            || foreign.contains(&&*format!("{name}.{}", key.name))
    };
    // Keys of exactly this name come first.
    text += &explain_keys(sections, |_, key| is_named(key));
    text += &explain_keys(sections, |name, key| !is_named(key) && is_found(name, key));
    text
}

fn explain_keys(sections: &Sections, fits: impl Fn(&str, &Key) -> bool) -> String {
    let of_section = |(name, section): (&str, &dyn Section)| {
        let keys: Vec<String> =
            section.keys().iter().filter(|key| fits(name, key)).map(explain_key).collect();
        (!keys.is_empty()).then(|| format!("\n[{name}]\n{}", keys.concat()))
    };
    sections.all().filter_map(of_section).collect()
}

/// Explains the key of a name such as `optimizer.lr`.
fn explain_dotted(sections: &Sections, name: &str) -> Option<String> {
    let (section, key) = name.split_once('.')?;
    let key = sections.get(section)?.keys().into_iter().find(|own| own.name == key)?;
    Some(format!("[{section}]\n{}", explain_key(&key)))
}

fn explain_section(name: &str, section: &dyn Section) -> String {
    let keys: Vec<String> = section.keys().iter().map(explain_key).collect();
    let lists = section.lists().into_iter().map(|(list, tables)| {
        // The list is empty by default, so the lines of the example table are commented out.
        let table = explain_section(&format!("[{name}.{list}]"), &*tables.default_table());
        let lines = table.lines().map(|line| match line {
            line if line.is_empty() || line.starts_with('#') => format!("{line}\n"),
            line => format!("# {line}\n"),
        });
        format!("\n{}", lines.collect::<String>())
    });
    format!("{}[{name}]\n{}{}", comment(section.docs()), keys.concat(), lists.collect::<String>())
}

fn explain_key(key: &Key) -> String {
    let docs = comment(key.docs);
    let Key { name, expected, .. } = key;
    match assignment(key) {
        Some(default) => format!("\n{docs}# Expected: {expected}.\n{default}"),
        None => format!("\n{docs}# Expected: {expected}. Not set by default.\n# {name} =\n"),
    }
}

/// Returns the line that sets the key to its value, if it has one.
fn assignment(key: &Key) -> Option<String> {
    let value = match key.value.as_ref()? {
        // Writes `1e-8`, not `0.00000001`.
        toml::Value::Float(number) if *number != 0.0 && number.abs() < 1e-3 => format!("{number:e}"),
        value => value.to_string(),
    };
    Some(format!("{} = {value}\n", key.name))
}

fn comment(docs: &[&str]) -> String {
    docs.iter().map(|line| format!("#{line}\n")).collect()
}

fn write_lists(name: &str, section: &dyn Section) -> String {
    let mut text = String::new();
    for (list, tables) in section.lists() {
        for table in tables.tables() {
            let lines: String = table.keys().iter().filter_map(assignment).collect();
            text += &format!("\n[[{name}.{list}]]\n{lines}");
        }
    }
    text
}

/// Returns whether a key has an effect in this config. The following keys have none: keys of language models for another task, keys of
/// `[model]` that a `config.json` replaces, keys of loss scaling without f16, keys of fp8 without fp8, and options of another optimizer or
/// codec.
fn has_effect(config: &Config, section: &str, key: &Key) -> bool {
    if config.task_kind() == TaskKind::CustomTask {
        if is_language_model_key(section, key.name) {
            return false;
        }
        if section == "model" {
            return true;
        }
    }
    match section {
        "model" => {
            matches!(config.model_source(), ModelSource::Inline(_))
                || model_shape_keys(config.model()).all(|name| name != key.name)
        }
        "training" => {
            let training = config.training();
            (training.dtype == Precision::F16 || !LOSS_SCALE_KEYS.contains(&key.name))
                && (training.fp8 != Fp8::Off || !FP8_KEYS.contains(&key.name))
        }
        "optimizer" => optimizer::has_effect(config.optimizer().name, key.name),
        "comm" => compression::has_effect(config.comm().compression, key.name),
        _ => true,
    }
}
