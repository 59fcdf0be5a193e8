//! Checks that involve several keys.

use super::mistake::{KeyPosition, Mistake};
use super::reader::UncheckedConfig;
use super::section::Section;
use std::path::Path;

/// The state of the checks of one config.
pub(super) struct Checks<'a> {
    pub(super) path: &'a Path,
    pub(super) unchecked: &'a UncheckedConfig,
    pub(super) mistakes: Vec<Mistake>,
}

impl Checks<'_> {
    /// Records a mistake unless `holds`, at the first of `keys` that is set. Records no mistake if one of the keys was already refused.
    /// Also records none if no key is set and the section is doubtful, because the user may have set the key in a line that was not
    /// understood.
    pub(super) fn require(&mut self, holds: bool, keys: &[&str], explain: impl FnOnce() -> String) {
        let doubtful = &self.unchecked.doubtful;
        if holds || keys.iter().any(|key| doubtful.contains(*key)) {
            return;
        }
        let (place, text) = match keys.iter().find_map(|key| self.unchecked.origins.get(*key)) {
            Some(given) => (given.position.clone(), given.text.clone()),
            None => {
                let (section, _) = keys[0].split_once('.').expect("keys are dotted");
                if doubtful.contains(section) {
                    return;
                }
                (KeyPosition::File { path: self.path.to_owned(), line: 1 }, format!("[{section}]"))
            }
        };
        self.mistakes.push(Mistake { position: place, text, explanation: explain() });
    }

    /// Like [`require`](Self::require), for a key that has no effect without `other`.
    pub(super) fn only_applies(&mut self, holds: bool, keys: &[&str], other: &str) {
        self.require(holds, keys, || format!("only applies with {other}; set that, or remove this key"));
    }

    pub(super) fn is_given(&self, key: &str) -> bool {
        self.unchecked.origins.contains_key(key)
    }
}

/// Returns the keys of a section whose values differ from their defaults.
pub(super) fn changed_keys<S: Section + Default>(section: &S) -> impl Iterator<Item = &'static str> + use<S> {
    let pairs = section.keys().into_iter().zip(S::default().keys());
    pairs.filter(|(key, default)| key.value != default.value).map(|(key, _)| key.name)
}
