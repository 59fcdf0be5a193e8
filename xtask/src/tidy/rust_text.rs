//! Rust source split into code, comments and strings, line by line.

/// A Rust source file. Literals are left out of the code, so that a word in one is not taken for a call or a keyword.
#[derive(Debug)]
pub(crate) struct RustFile {
    /// Relative to the workspace.
    pub(crate) path: String,
    pub(crate) lines: Vec<Line>,
    /// Index of the first line of a test module within the file; the number of lines if there is none.
    first_test_line: usize,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) code: String,
    pub(crate) comment: String,
    /// The contents of string literals, without escaped characters.
    pub(crate) literal: String,
}

impl RustFile {
    pub(crate) fn parse(path: &str, text: &str) -> Self {
        let lines = split(text);
        let first_test_line = first_test_line(&lines);
        RustFile { path: path.to_owned(), lines, first_test_line }
    }

    /// Name of the folder under `crates`, or of the folder in the root.
    pub(crate) fn crate_name(&self) -> &str {
        let within = self.path.strip_prefix("crates/").unwrap_or(&self.path);
        within.split('/').next().unwrap_or_default()
    }

    /// Whether the line of index `index` belongs to tests: those in files of tests, and in a module at the end.
    pub(crate) fn is_test(&self, index: usize) -> bool {
        let is_test_file = self.path.contains("/tests/") || self.path.ends_with("tests.rs");
        is_test_file || index >= self.first_test_line
    }
}

/// By custom a module of tests is the last thing in its file.
fn first_test_line(lines: &[Line]) -> usize {
    let opens_module = |line: &Line| line.code.starts_with("mod ") && line.code.ends_with('{');
    let is_start = |pair: &[Line]| pair[0].code == "#[cfg(test)]" && opens_module(&pair[1]);
    lines.windows(2).position(is_start).unwrap_or(lines.len())
}

/// What the next character belongs to.
enum State {
    Code,
    LineComment,
    BlockComment {
        depth: usize,
    },
    String,
    /// Ends with a quote and this many `#`.
    RawString {
        num_hashes: usize,
    },
}

fn split(text: &str) -> Vec<Line> {
    let mut lines = vec![Line::default()];
    let mut state = State::Code;
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        if next == '\n' {
            if matches!(state, State::LineComment) {
                state = State::Code;
            }
            lines.push(Line::default());
            rest = &rest[1..];
            continue;
        }
        let line = lines.last_mut().expect("there is always a line");
        let num_bytes = match &mut state {
            State::Code => code(rest, line, &mut state),
            State::LineComment => comment(next, line),
            State::BlockComment { depth } if rest.starts_with("*/") => {
                *depth -= 1;
                if *depth == 0 {
                    state = State::Code;
                }
                2
            }
            State::BlockComment { depth } if rest.starts_with("/*") => {
                *depth += 1;
                2
            }
            State::BlockComment { .. } => comment(next, line),
            // A backslash before the end of a line hides only that end.
            State::String if next == '\\' && !rest.starts_with("\\\n") => {
                1 + rest[1..].chars().next().map_or(0, char::len_utf8)
            }
            State::String => {
                match next {
                    '"' => end_literal(line, &mut state),
                    _ => line.literal.push(next),
                }
                next.len_utf8()
            }
            State::RawString { num_hashes } => {
                let num_hashes = *num_hashes;
                if next == '"' && rest[1..].starts_with(&"#".repeat(num_hashes)) {
                    end_literal(line, &mut state);
                    1 + num_hashes
                } else {
                    line.literal.push(next);
                    next.len_utf8()
                }
            }
        };
        rest = &rest[num_bytes..];
    }
    for line in &mut lines {
        line.code.truncate(line.code.trim_end().len());
    }
    lines
}

fn comment(next: char, line: &mut Line) -> usize {
    line.comment.push(next);
    next.len_utf8()
}

fn end_literal(line: &mut Line, state: &mut State) {
    line.code.push('"');
    *state = State::Code;
}

/// Reads what begins at `rest` in code; returns its bytes.
fn code(rest: &str, line: &mut Line, state: &mut State) -> usize {
    if rest.starts_with("//") {
        *state = State::LineComment;
        return 2;
    }
    if rest.starts_with("/*") {
        *state = State::BlockComment { depth: 1 };
        return 2;
    }
    let follows_word = line.code.ends_with(is_word_character);
    if let Some((num_hashes, num_bytes)) = raw_string_start(rest).filter(|_| !follows_word) {
        line.code.push('"');
        *state = State::RawString { num_hashes };
        return num_bytes;
    }
    if let Some(num_bytes) = character_literal(rest) {
        line.code.push_str("' '");
        return num_bytes;
    }
    let next = rest.chars().next().expect("the caller saw a character");
    line.code.push(next);
    if next == '"' {
        *state = State::String;
    }
    next.len_utf8()
}

/// The hashes and the bytes of the beginning of a raw string: `r"`, `br#"`.
fn raw_string_start(rest: &str) -> Option<(usize, usize)> {
    let prefix = ["r", "br", "cr"].into_iter().find(|prefix| {
        rest.strip_prefix(prefix).is_some_and(|rest| rest.trim_start_matches('#').starts_with('"'))
    })?;
    let after = &rest[prefix.len()..];
    let num_hashes = after.len() - after.trim_start_matches('#').len();
    Some((num_hashes, prefix.len() + num_hashes + 1))
}

/// The bytes of a literal such as `'a'` or `'\n'`; none for a lifetime.
fn character_literal(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('\'')?;
    if let Some(escaped) = inner.strip_prefix('\\') {
        let first = escaped.chars().next()?.len_utf8();
        return escaped[first..].find('\'').map(|end| 2 + first + end + 1);
    }
    let first = inner.chars().next().filter(|&first| first != '\'')?.len_utf8();
    inner[first..].starts_with('\'').then_some(1 + first + 1)
}

/// Whether a character may stand within a name.
pub(crate) fn is_word_character(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Whether `pattern` stands in `text`, not as a part of a longer name.
pub(crate) fn contains_word(text: &str, pattern: &str) -> bool {
    let may_continue_before = !pattern.starts_with(is_word_character);
    let may_continue_after = !pattern.ends_with(is_word_character);
    text.match_indices(pattern).any(|(start, _)| {
        let before = text[..start].chars().next_back();
        let after = text[start + pattern.len()..].chars().next();
        (may_continue_before || !before.is_some_and(is_word_character))
            && (may_continue_after || !after.is_some_and(is_word_character))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code_of(text: &str) -> Vec<String> {
        split(text).into_iter().map(|line| line.code).collect()
    }

    #[test]
    fn comments_are_told_from_code() {
        let lines = split("let a = 1; // one\n/* two /* three */\nfour */ let b;");
        assert_eq!(
            lines[0],
            Line { code: "let a = 1;".into(), comment: " one".into(), literal: String::new() }
        );
        assert_eq!((lines[1].code.as_str(), lines[1].comment.trim()), ("", "two  three"));
        assert_eq!((lines[2].code.trim(), lines[2].comment.trim()), ("let b;", "four"));
    }

    #[test]
    fn literals_hide_their_contents() {
        assert_eq!(code_of(r#"f("a // \" b", x) // c"#), [r#"f("", x)"#]);
        assert_eq!(code_of("f(r#\"a \" b\"#, br\"c\")"), ["f(\"\", \"\")"]);
        assert_eq!(code_of("let s = \"a\nb\\\n  c\"; d"), ["let s = \"", "", "\"; d"]);
        assert_eq!(code_of(r"m('\'', '/', '\u{7f}', x)"), ["m(' ', ' ', ' ', x)"]);
        assert_eq!(code_of("fn f<'a>(x: &'a str) { car\"x\" }"), ["fn f<'a>(x: &'a str) { car\"\" }"]);
    }

    #[test]
    fn words_are_found_whole() {
        assert!(contains_word("an unsafe block", "unsafe"));
        assert!(!contains_word("unsafe_code", "unsafe") && !contains_word("not_unsafe", "unsafe"));
        assert!(contains_word("std::env::var", "env::") && !contains_word("my_env::var", "env::"));
    }

    #[test]
    fn tests_are_the_module_at_the_end_or_a_file_of_their_own() {
        let file = RustFile::parse("crates/a/src/b.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n}\n");
        assert_eq!((0..4).map(|index| file.is_test(index)).collect::<Vec<_>>(), [false, true, true, true]);
        let declared = RustFile::parse("crates/a/src/lib.rs", "#[cfg(test)]\nmod tests;\nfn f() {}\n");
        assert!(!declared.is_test(2));
        assert!(RustFile::parse("crates/a/tests/b.rs", "fn f() {}").is_test(0));
        assert_eq!(file.crate_name(), "a");
        assert_eq!(RustFile::parse("xtask/src/main.rs", "").crate_name(), "xtask");
    }
}
