//! Reads configs.

use super::mistake::FILE_BYTES_MAX;
use super::reader::{self, Loose};
use super::sections::Sections;
use super::{Config, ConfigError, Subject, file_values, given, validate};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

impl Config {
    /// Reads the file `path`, applies `overrides` (each `section.key=value`, the value in TOML or a bare
    /// string), and checks the whole.
    ///
    /// `world_size` is the number of workers where the environment has given one; without it,
    /// `[launch] workers` counts.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn load(path: &Path, overrides: &[String], world_size: Option<usize>) -> Result<Self, ConfigError> {
        Config::load_as(Subject::LanguageModel, path, overrides, world_size)
    }

    /// As [`Config::load`], for any subject.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn load_as(
        subject: Subject,
        path: &Path,
        overrides: &[String],
        world_size: Option<usize>,
    ) -> Result<Self, ConfigError> {
        Config::parse_as(subject, &read_file(path)?, path, overrides, world_size)
    }

    /// The file that this config was loaded from, with its overrides and the run's name in it: it reads as the same config, also where
    /// another number of workers follows.
    ///
    /// # Errors
    /// If the file cannot be read any more.
    pub fn given(&self, path: &Path, overrides: &[String]) -> Result<String, ConfigError> {
        let text = read_file(path)?;
        Ok(given::given(self, &text, path, overrides).unwrap_or(text))
    }

    /// Every key of the file `path` as `section.key`, with its value in TOML, whether or not this version knows the key; nothing of a
    /// file that is not TOML.
    ///
    /// # Errors
    /// If the file cannot be read, or is too large for a config.
    pub fn file_values(path: &Path) -> Result<BTreeMap<String, String>, ConfigError> {
        Ok(file_values(&read_file(path)?))
    }

    /// The key with this name, or the one that another system calls so, as `section.key`. Dashes count as underscores.
    pub fn key_named(name: &str) -> Option<String> {
        reader::key_named(&Sections::default(), name)
    }

    /// As [`Config::load`], for a file `path` whose content is `text`.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn parse(
        text: &str,
        path: &Path,
        overrides: &[String],
        world_size: Option<usize>,
    ) -> Result<Self, ConfigError> {
        Config::parse_as(Subject::LanguageModel, text, path, overrides, world_size)
    }

    /// As [`Config::parse`], for any subject.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn parse_as(
        subject: Subject,
        text: &str,
        path: &Path,
        overrides: &[String],
        world_size: Option<usize>,
    ) -> Result<Self, ConfigError> {
        assert!(world_size != Some(0), "a world has at least one worker");
        let loose = Loose::read(text, path, overrides);
        validate::validate(loose, subject, path, world_size)
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
