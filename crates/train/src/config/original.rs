//! The config as the user gave it, before it was resolved, to start another run like this one.

use super::Config;
use std::path::Path;
use toml_edit::{DocumentMut, Item, Table, Value};

/// Returns the text of the config file, edited to contain the overrides and the run's name, or `None` if `text` is no TOML.
pub(super) fn edited_text(config: &Config, text: &str, path: &Path, overrides: &[String]) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    let mut has_name = document.get("run").is_some_and(|run| run.get("name").is_some());
    let mut set = |section: &str, key: &str, value: Value| {
        let table = document.entry(section).or_insert_with(|| Item::Table(Table::new()));
        // Text after the value, such as a comment, is preserved.
        match table.get_mut(key).and_then(Item::as_value_mut) {
            Some(old) => {
                let decor = old.decor().clone();
                *old = value;
                *old.decor_mut() = decor;
            }
            None => table[key] = Item::Value(value),
        }
    };
    for option in overrides {
        let (name, raw) = option.split_once('=')?;
        let (section, key) = name.split_once('.')?;
        let (section, key, raw) = (section.trim(), key.trim(), raw.trim());
        has_name |= (section, key) == ("run", "name");
        let value = match raw.parse::<Value>() {
            // TOML may parse a bare string, such as a name that consists of digits, as another type.
            Ok(value) if value.is_str() || !is_text(config, section, key) => value,
            _ => raw.into(),
        };
        set(section, key, value);
    }
    if !has_name {
        set("run", "name", config.run().name.as_str().into());
    }
    // A config may not set both `steps` and `epochs`. An option for one of them replaces the other.
    let unused_length = if config.training().epochs > 0.0 { "steps" } else { "epochs" };
    if let Some(training) = document.get_mut("training").and_then(Item::as_table_like_mut)
        && ["steps", "epochs"].iter().all(|key| training.contains_key(key))
    {
        training.remove(unused_length);
    }
    Some(format!(
        "# The config of this run as it was given in {}, with the options of the command line in it.\n{document}",
        path.display()
    ))
}

/// Returns whether the value of a key is a string.
fn is_text(config: &Config, section: &str, key: &str) -> bool {
    let keys = config.sections.get(section).map(|section| section.keys()).unwrap_or_default();
    keys.iter().any(|own| own.name == key && matches!(own.value, Some(toml::Value::String(_))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# A small model.
[model]
architecture = \"gpt2\" # not llama
[data]
folder = \"corpus\"
[training]
steps = 4 # few
";

    fn given(overrides: &[&str]) -> (Config, String) {
        let overrides: Vec<String> = overrides.iter().map(|text| text.to_string()).collect();
        let path = Path::new("tiny.toml");
        let config = Config::parse(TEXT, path, &overrides, None).unwrap();
        let text = super::edited_text(&config, TEXT, path, &overrides).unwrap();
        (config, text)
    }

    #[test]
    fn options_take_their_place_in_the_file() {
        let (config, text) =
            given(&["training.steps=9", "run.name=7", "optimizer.lr=1e-4", "launch.workers=2"]);
        for part in ["# A small model.", "steps = 9 # few", "[run]\nname = \"7\"", "lr = 1e-4", "# not llama"]
        {
            assert!(text.contains(part), "{text}");
        }
        let read = |set: &[String]| Config::parse(&text, Path::new("config.given.toml"), set, None);
        assert_eq!(read(&[]).unwrap(), config);
        // The config resolved for two workers is invalid for four. The given config is valid.
        assert_eq!(read(&["launch.workers=4".to_owned()]).unwrap().world_size(), 4);
    }

    #[test]
    fn an_option_for_the_length_replaces_the_other_length() {
        for (options, text_has) in [
            (&["training.epochs=2"][..], "epochs = 2"),
            (&["training.epochs=2", "training.steps=9"], "steps = 9"),
        ] {
            let (config, text) = given(options);
            assert!(text.contains(text_has), "{text}");
            let read = Config::parse(&text, Path::new("config.given.toml"), &[], None).unwrap();
            let length = |config: &Config| match config.training() {
                training if training.epochs > 0.0 => (None, training.epochs),
                training => (Some(training.steps), 0.0),
            };
            assert_eq!(length(&read), length(&config));
        }
    }

    #[test]
    fn the_given_config_keeps_the_name_of_the_run() {
        let (config, text) = given(&[]);
        let read = Config::parse(&text, Path::new("config.given.toml"), &[], None).unwrap();
        assert_eq!((read.run_folder(), &read), (config.run_folder(), &config));
    }
}
