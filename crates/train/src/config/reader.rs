//! Reads the file and the `--set` options key by key, and collects the mistakes that concern single keys.

use super::aliases::key_for_alias;
use super::mistake::{KeyPosition, Mistake, nearest};
use super::section::{KeyError, Section, TableList};
use super::sections::Sections;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Number of mistakes that get a specific explanation, which takes time to find. It exceeds the number that a message lists.
const EXPLAINED_MAX: usize = 100;

/// A config whose keys have been read one by one, but not yet checked against each other.
pub(super) struct UncheckedConfig {
    pub(super) sections: Sections,
    /// The position and text of each key that was set, by its dotted name, such as `training.seq_len`.
    pub(super) origins: BTreeMap<String, KeyOrigin>,
    /// Keys with an invalid value, and sections with a part that was not understood. Such keys keep their defaults, which the user may not
    /// have meant, so checks that involve several keys skip them.
    pub(super) doubtful: BTreeSet<String>,
    pub(super) mistakes: Vec<Mistake>,
}

/// The position and the text with which a key was set.
#[derive(Debug, Clone)]
pub(super) struct KeyOrigin {
    pub(super) position: KeyPosition,
    pub(super) text: String,
}

impl UncheckedConfig {
    /// Reads `text`, the content of the file `path`, then the overrides.
    pub(super) fn read(text: &str, path: &Path, overrides: &[String]) -> Self {
        let mut unchecked = UncheckedConfig {
            sections: Sections::default(),
            origins: BTreeMap::new(),
            doubtful: BTreeSet::new(),
            mistakes: Vec::new(),
        };
        unchecked.read_file(&Source::new(text, path));
        for (index, option) in overrides.iter().enumerate() {
            unchecked.read_override(option, index);
        }
        unchecked
    }

    fn read_file(&mut self, source: &Source<'_>) {
        let (document, errors) = DeTable::parse_recoverable(source.text);
        for (section, keys) in in_text_order(document.get_ref()) {
            self.read_section(source, section, keys);
        }
        let broken = errors.into_iter().map(|error| {
            let given = source.origin_of_line(error.span().map_or(0, |span| span.start));
            Mistake { position: given.position, text: given.text, explanation: error.message().to_owned() }
        });
        let mut broken: Vec<Mistake> = broken.collect();
        // The first error of a line tends to cause the others.
        broken.sort_by(|a, b| a.position.cmp(&b.position));
        broken.dedup_by(|next, first| next.position == first.position);
        if !broken.is_empty() {
            // A broken line may have set any key.
            self.doubtful.extend(Sections::NAMES.iter().map(|name| name.to_string()));
            // Values that the parser invents to recover from a broken line are no mistakes of the user.
            let places: BTreeSet<&KeyPosition> = broken.iter().map(|mistake| &mistake.position).collect();
            self.mistakes.retain(|mistake| !places.contains(&mistake.position));
        }
        self.mistakes.extend(broken);
    }

    fn read_section(
        &mut self,
        source: &Source<'_>,
        section: &Spanned<impl AsRef<str>>,
        keys: &Spanned<DeValue<'_>>,
    ) {
        let name = section.get_ref().as_ref();
        let Some(table) = keys.get_ref().as_table() else {
            let explanation = if Sections::NAMES.contains(&name) {
                format!("expected a section: a line [{name}] followed by its keys")
            } else {
                explain_key_outside_of_sections(&self.sections, name)
            };
            return self.refuse(source.origin_of_span(section.span().start..keys.span().end), explanation);
        };
        if !Sections::NAMES.contains(&name) {
            return self.refuse_section(source.origin_of_line(section.span().start), name);
        }
        for (key, value) in in_text_order(table) {
            let given = source.origin_of_span(key.span().start..value.span().end);
            let place = |span: Range<usize>| source.origin_of_span(span);
            self.read_value(name, key.get_ref(), value.get_ref(), given, &place);
        }
    }

    /// Reads a key of a section, or a list of tables. `place` returns the position and text of a span.
    fn read_value(
        &mut self,
        section: &str,
        key: &str,
        value: &DeValue<'_>,
        given: KeyOrigin,
        place: &dyn Fn(Range<usize>) -> KeyOrigin,
    ) {
        let target = self.sections.get_mut(section).expect("the section's name was checked");
        if target.list_mut(key).is_none() {
            let path = KeyPath { section, list: None };
            return self.read_key(path, key, given, |target, key| target.read_key(key, value));
        }
        self.clear_list(section, key);
        let tables = value.as_array().map(|tables| tables.iter().map(|table| table.get_ref().as_table()));
        let Some(tables) = tables.and_then(Iterator::collect::<Option<Vec<_>>>) else {
            self.doubtful.insert(section.to_owned());
            let explanation =
                format!("expected tables: for each, a line [[{section}.{key}]] followed by its keys");
            return self.refuse(given, explanation);
        };
        for (index, table) in tables.into_iter().enumerate() {
            self.list_mut(section, key).push();
            for (name, value) in table {
                let given = place(name.span().start..value.span().end);
                let path = KeyPath { section, list: Some((key, index)) };
                self.read_key(path, name.get_ref(), given, |target, name| {
                    target.read_key(name, value.get_ref())
                });
            }
        }
    }

    fn list_mut(&mut self, section: &str, list: &str) -> &mut dyn TableList {
        let section = self.sections.get_mut(section).expect("the section's name was checked");
        section.list_mut(list).expect("the list's name was checked")
    }

    /// Empties a list, because a list that is set again replaces its earlier tables.
    fn clear_list(&mut self, section: &str, list: &str) {
        self.list_mut(section, list).clear();
        let start = format!("{section}.{list}[");
        self.origins.retain(|name, _| !name.starts_with(&start));
    }

    fn read_override(&mut self, option: &str, index: usize) {
        let given = KeyOrigin { position: KeyPosition::Override { index }, text: option.to_owned() };
        let parts = option.split_once('=').and_then(|(name, raw)| Some((name.split_once('.')?, raw)));
        let Some(((section, key), raw)) = parts else {
            let explanation = explain_undotted(&self.sections, option);
            return self.refuse(given, explanation);
        };
        let (section, key, raw) = (section.trim(), key.trim(), raw.trim());
        if !Sections::NAMES.contains(&section) {
            return self.refuse_section(given, section);
        }
        let lists = self.sections.get(section).expect("the section's name was checked").lists();
        if lists.iter().any(|(name, _)| *name == key) {
            let value = DeValue::parse(raw).ok();
            let value = value.as_ref().map_or(&DeValue::Boolean(false), |value| value.get_ref());
            return self.read_value(section, key, value, given.clone(), &|_| given.clone());
        }
        self.read_key(KeyPath { section, list: None }, key, given, |target, key| {
            let bare = DeValue::String(raw.into());
            match DeValue::parse(raw) {
                // TOML parses the value of `--set run.name=7` as a number. The bare string may still be valid.
                Ok(value) => target
                    .read_key(key, value.get_ref())
                    .or_else(|error| target.read_key(key, &bare).map_err(|_| error)),
                Err(_) => target.read_key(key, &bare),
            }
        });
    }

    fn read_key(
        &mut self,
        path: KeyPath<'_>,
        key: &str,
        given: KeyOrigin,
        read: impl FnOnce(&mut dyn Section, &str) -> Result<(), KeyError>,
    ) {
        let is_explained = self.mistakes.len() < EXPLAINED_MAX;
        let target = match path.list {
            Some((list, _)) => self.list_mut(path.section, list).last_mut(),
            None => self.sections.get_mut(path.section).expect("the section's name was checked"),
        };
        let name = path.name_of(key);
        match read(target, key) {
            Ok(()) => {
                self.origins.insert(name, given);
            }
            Err(KeyError::Unknown) => {
                let explanation = match path.list {
                    _ if !is_explained => "unknown key".to_owned(),
                    Some((list, _)) => {
                        explain_unknown_key_in(target, &format!("[[{}.{list}]]", path.section), key)
                    }
                    None => explain_unknown_key(&self.sections, path.section, key),
                };
                self.doubtful.insert(path.section.to_owned());
                self.refuse(given, explanation);
            }
            Err(KeyError::InvalidValue(expected)) => {
                self.doubtful.insert(name);
                self.refuse(given, format!("expected {expected}"));
            }
        }
    }

    fn refuse_section(&mut self, given: KeyOrigin, name: &str) {
        self.doubtful.extend(nearest(name, Sections::NAMES).map(str::to_owned));
        self.refuse(given, format!("unknown section; {}", section_hint(name)));
    }

    fn refuse(&mut self, given: KeyOrigin, explanation: String) {
        self.mistakes.push(Mistake { position: given.position, text: given.text, explanation });
    }
}

/// Returns a hint about sections for a user who wrote `name`.
pub(super) fn section_hint(name: &str) -> String {
    match nearest(name, Sections::NAMES) {
        Some(section) => format!("did you mean [{section}]?"),
        None => format!("the sections are [{}]", Sections::NAMES.join("], [")),
    }
}

fn explain_key_outside_of_sections(sections: &Sections, key: &str) -> String {
    match (section_with_key(sections, key), explain_alias(key)) {
        (Some(section), _) => format!("the key belongs in section [{section}]"),
        (None, Some(own)) => own,
        (None, None) => format!("unknown key outside of a section; {}", section_hint(key)),
    }
}

/// Returns the explanation for a key that other systems use, or `None` if no system does.
fn explain_alias(key: &str) -> Option<String> {
    let (own, difference) = key_for_alias(key)?;
    let (section, own) = own.split_once('.').expect("keys are dotted");
    let difference = if difference.is_empty() { String::new() } else { format!(" ({difference})") };
    Some(format!("unknown key; it is called '{own}' here, in [{section}]{difference}"))
}

/// Returns the dotted name of the key called `name` in any section, or in another system.
pub(super) fn key_named(sections: &Sections, name: &str) -> Option<String> {
    let own = name.replace('-', "_");
    let section = section_with_key(sections, &own).map(|section| format!("{section}.{own}"));
    section.or_else(|| key_for_alias(name).map(|(key, _)| key.to_owned()))
}

/// Returns the explanation for a `--set` option whose name has no section.
fn explain_undotted(sections: &Sections, option: &str) -> String {
    let name = option.split('=').next().unwrap_or_default().trim();
    let hint = key_named(sections, name).map_or_else(String::new, |key| format!("; did you mean {key}?"));
    format!("expected section.key=value{hint}")
}

fn explain_unknown_key(sections: &Sections, section: &str, key: &str) -> String {
    if let Some(other) = section_with_key(sections, key) {
        return format!("unknown key in [{section}]; it belongs in [{other}]");
    }
    if let Some(own) = explain_alias(key) {
        return own;
    }
    let target = sections.get(section).expect("the section's name was checked");
    explain_unknown_key_in(target, &format!("[{section}]"), key)
}

fn explain_unknown_key_in(target: &dyn Section, place: &str, key: &str) -> String {
    let known = key_names(target);
    match nearest(key, &known) {
        Some(key) => format!("unknown key in {place}; did you mean '{key}'?"),
        None => format!("unknown key in {place}; the keys are {}", known.join(", ")),
    }
}

/// The section, or the table of one of its lists, that a key belongs to.
#[derive(Clone, Copy)]
struct KeyPath<'a> {
    section: &'a str,
    /// The list and the index of its last table.
    list: Option<(&'a str, usize)>,
}

impl KeyPath<'_> {
    /// Returns the key's dotted name, such as `training.seq_len` or `optimizer.groups[0].match`.
    fn name_of(self, key: &str) -> String {
        let section = self.section;
        match self.list {
            Some((list, index)) => format!("{section}.{list}[{index}].{key}"),
            None => format!("{section}.{key}"),
        }
    }
}

fn section_with_key(sections: &Sections, key: &str) -> Option<&'static str> {
    sections.all().find(|(_, section)| key_names(*section).contains(&key)).map(|(name, _)| name)
}

fn key_names(section: &dyn Section) -> Vec<&'static str> {
    let lists = section.lists().into_iter().map(|(name, _)| name);
    section.keys().iter().map(|key| key.name).chain(lists).collect()
}

/// Returns the keys of a table in the order of the text, so that mistakes are found in the order of lines.
fn in_text_order<'a, 'i>(
    table: &'a DeTable<'i>,
) -> Vec<(&'a Spanned<Cow<'i, str>>, &'a Spanned<DeValue<'i>>)> {
    let mut keys: Vec<_> = table.iter().collect();
    keys.sort_by_key(|(key, _)| key.span().start);
    keys
}

/// The text of the config file, with the index that maps offsets to lines.
struct Source<'a> {
    text: &'a str,
    path: &'a Path,
    /// The offset at which each line but the first begins.
    line_starts: Vec<usize>,
}

impl<'a> Source<'a> {
    fn new(text: &'a str, path: &'a Path) -> Self {
        let line_starts = text.match_indices('\n').map(|(newline, _)| newline + 1).collect();
        Source { text, path, line_starts }
    }

    /// Returns the position and text of `span`, truncated to one line.
    fn origin_of_span(&self, span: Range<usize>) -> KeyOrigin {
        const SHOWN_CHARS_MAX: usize = 80;
        let line = self.line_starts.partition_point(|start| *start <= span.start) + 1;
        let text = self.text.get(span).unwrap_or_default().trim();
        let first = text.lines().next().unwrap_or_default();
        let mut shown: String = first.chars().take(SHOWN_CHARS_MAX).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        KeyOrigin { position: KeyPosition::File { path: self.path.to_owned(), line }, text: shown }
    }

    /// Returns the position and text of the line that contains `offset`.
    fn origin_of_line(&self, offset: usize) -> KeyOrigin {
        let next = self.line_starts.partition_point(|start| *start <= offset);
        let start = next.checked_sub(1).map_or(0, |own| self.line_starts[own]);
        let end = self.line_starts.get(next).map_or(self.text.len(), |next| next - 1);
        self.origin_of_span(start..end)
    }
}
