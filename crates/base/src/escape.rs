//! Sanitizes external strings, such as file names, for terminals and shells.

use std::borrow::Cow;

/// Escapes control characters except tabs and line feeds, so that the text cannot control a terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| matches!(c, '\n' | '\t') || !c.is_control();
    if text.chars().all(is_plain) {
        return text.into();
    }
    text.chars().map(|c| if is_plain(c) { c.to_string() } else { c.escape_default().to_string() }).collect()
}

/// Quotes a word for use in a shell command, if it needs quoting. A word with control characters is written as `$'…'` with escapes, which
/// bash, ksh and zsh understand.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    if !word.contains(char::is_control) {
        return format!("'{}'", word.replace('\'', r"'\''"));
    }
    let escaped = |c: char| match c {
        '\'' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    format!("$'{}'", word.chars().map(escaped).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert!(matches!(printable("runs/größe\tb\n"), Cow::Borrowed("runs/größe\tb\n")));
        assert_eq!(printable("a\u{1b}[2Jb\r\u{9b}c"), r"a\u{1b}[2Jb\r\u{9b}c");
    }

    #[test]
    fn a_shell_reads_a_quoted_word_as_it_was() {
        assert_eq!(quoted("runs/a-1"), "runs/a-1");
        let words = ["", "my runs", "it's", "$HOME;`ls`", "a\nb'\\\u{1b}[2J", "größe", "~/x", "*"];
        let script = format!("printf '%s\\0' {}", words.map(quoted).join(" "));
        assert!(!script.contains(char::is_control));
        let output = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
        let read = String::from_utf8(output.stdout).unwrap();
        assert_eq!(read.split_terminator('\0').collect::<Vec<_>>(), words);
    }
}
