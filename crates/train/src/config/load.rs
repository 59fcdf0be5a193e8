//! Reads configs.

use super::mistake::FILE_BYTES_MAX;
use super::reader::{self, UncheckedConfig};
use super::sections::Sections;
use super::{Config, ConfigError, TaskKind, file_values, original, validate};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

impl Config {
    /// Reads the file `path`, applies `overrides` (each `section.key=value`, the value in TOML or a bare string), and validates the result.
    ///
    /// `world_size` is the number of workers if the environment gives it. Otherwise, `[launch] workers` counts.
    ///
    /// # Errors
    /// The file cannot be read, or [`ConfigError::Invalid`] with all mistakes.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn load(path: &Path, overrides: &[String], world_size: Option<usize>) -> Result<Self, ConfigError> {
        Config::load_for_task(TaskKind::LanguageModel, path, overrides, world_size)
    }

    /// Like [`Config::load`], for any kind of task.
    ///
    /// # Errors
    /// As [`Config::load`].
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn load_for_task(
        task_kind: TaskKind,
        path: &Path,
        overrides: &[String],
        world_size: Option<usize>,
    ) -> Result<Self, ConfigError> {
        Config::parse_for_task(task_kind, &read_file(path)?, path, overrides, world_size)
    }

    /// Returns the text of the file that this config was loaded from, edited to contain the overrides and the run's name. The text loads as
    /// the same config. Because its values are not resolved, it can also be loaded for another number of workers.
    ///
    /// # Errors
    /// If the file cannot be read any more.
    pub fn original_toml(&self, path: &Path, overrides: &[String]) -> Result<String, ConfigError> {
        let text = read_file(path)?;
        Ok(original::edited_text(self, &text, path, overrides).unwrap_or(text))
    }

    /// Returns every key of the file `path` as `section.key`, with its value in TOML, including keys that this version does not know. Empty
    /// for a file that is not TOML.
    ///
    /// # Errors
    /// If the file cannot be read, or is too large for a config.
    pub fn file_values(path: &Path) -> Result<BTreeMap<String, String>, ConfigError> {
        Ok(file_values(&read_file(path)?))
    }

    /// Returns, as `section.key`, the key with this name here or in another system. Dashes count as underscores.
    pub fn key_named(name: &str) -> Option<String> {
        reader::key_named(&Sections::default(), name)
    }

    /// Like [`Config::load`], for a file `path` whose content is `text`.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all mistakes.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn parse(
        text: &str,
        path: &Path,
        overrides: &[String],
        world_size: Option<usize>,
    ) -> Result<Self, ConfigError> {
        Config::parse_for_task(TaskKind::LanguageModel, text, path, overrides, world_size)
    }

    /// Like [`Config::parse`], for any kind of task.
    ///
    /// # Errors
    /// As [`Config::parse`].
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn parse_for_task(
        task_kind: TaskKind,
        text: &str,
        path: &Path,
        overrides: &[String],
        world_size: Option<usize>,
    ) -> Result<Self, ConfigError> {
        assert!(world_size != Some(0), "a world has at least one worker");
        let unchecked = UncheckedConfig::read(text, path, overrides);
        validate::validate(unchecked, task_kind, path, world_size)
            .map_err(|mistakes| ConfigError::Invalid { mistakes })
    }
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    let unreadable = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(ConfigError::TooLarge { path: path.to_owned() });
    }
    Ok(text)
}
