//! Rust source split into code, comments and literals, line by line.

use anyhow::{Result, anyhow};
use proc_macro2::{LexError, TokenStream, TokenTree};

/// A Rust source file. Its literals are not part of the code, so that a word in a literal does not count as a call or a keyword.
#[derive(Debug)]
pub(crate) struct RustFile {
    /// Path relative to the workspace.
    pub(crate) path: String,
    pub(crate) lines: Vec<Line>,
    /// Index of the first line of a test module within the file; the number of lines if there is none.
    first_test_line: usize,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Line {
    pub(crate) code: String,
    pub(crate) comment: String,
    /// Literals as they are written, with their quotes.
    pub(crate) literal: String,
    pub(crate) num_columns: usize,
}

impl RustFile {
    pub(crate) fn parse(path: &str, text: &str) -> Result<Self> {
        let lines = split(text).map_err(|error| anyhow!("{path}: {error}"))?;
        let first_test_line = first_test_line(&lines);
        Ok(RustFile { path: path.to_owned(), lines, first_test_line })
    }

    /// Returns the name of the folder under `crates`, or of the folder in the root.
    pub(crate) fn crate_name(&self) -> &str {
        let within = self.path.strip_prefix("crates/").unwrap_or(&self.path);
        within.split('/').next().unwrap_or_default()
    }

    /// Returns whether the line with this index is in a test file, or in a test module at the end of a file.
    pub(crate) fn is_test(&self, index: usize) -> bool {
        let is_test_file = self.path.contains("/tests/") || self.path.ends_with("tests.rs");
        is_test_file || index >= self.first_test_line
    }
}

/// Returns the index of the first line of the test module. By convention, this module is the last item of its file.
fn first_test_line(lines: &[Line]) -> usize {
    let opens_module = |line: &Line| line.code.starts_with("mod ") && line.code.trim_end().ends_with('{');
    let is_start = |pair: &[Line]| pair[0].code.trim_end() == "#[cfg(test)]" && opens_module(&pair[1]);
    lines.windows(2).position(is_start).unwrap_or(lines.len())
}

/// The kind of text that a byte belongs to.
#[derive(Clone, Copy)]
enum Part {
    Code,
    Literal,
    /// Comments, including doc comments, and whitespace.
    BetweenTokens,
}

fn split(text: &str) -> Result<Vec<Line>, LexError> {
    let mut parts = vec![Part::BetweenTokens; text.len()];
    mark_tokens(text, text.parse()?, &mut parts);
    let mut lines = vec![Line::default()];
    for (index, next) in text.char_indices() {
        let line = lines.last_mut().expect("there is always a line");
        line.num_columns += usize::from(next != '\n');
        match parts[index] {
            _ if next == '\n' => lines.push(Line::default()),
            Part::Code => line.code.push(next),
            Part::Literal => line.literal.push(next),
            Part::BetweenTokens if next.is_whitespace() => {
                line.code.push(next);
                line.comment.push(next);
            }
            Part::BetweenTokens => line.comment.push(next),
        }
    }
    Ok(lines)
}

fn mark_tokens(text: &str, stream: TokenStream, parts: &mut [Part]) {
    for token in stream {
        let range = token.span().byte_range();
        // To the compiler, a doc comment is an attribute, whose tokens have the span of the comment.
        if ["//", "/*"].iter().any(|start| text[range.clone()].starts_with(start)) {
            continue;
        }
        match token {
            TokenTree::Group(group) => {
                parts[group.span_open().byte_range()].fill(Part::Code);
                mark_tokens(text, group.stream(), parts);
                parts[group.span_close().byte_range()].fill(Part::Code);
            }
            TokenTree::Literal(_) => parts[range].fill(Part::Literal),
            TokenTree::Ident(_) | TokenTree::Punct(_) => parts[range].fill(Part::Code),
        }
    }
}

/// Returns whether a character may occur in a name.
pub(crate) fn is_word_character(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Returns whether `pattern` occurs in `text`, not as a part of a longer name.
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
        split(text).unwrap().into_iter().map(|line| line.code.trim_end().to_owned()).collect()
    }

    #[test]
    fn comments_are_told_from_code() {
        let lines =
            split("let a = 1; // one\n/* two /* three */\nfour */ let b;\n/// Five.\nfn f() { //! six\n}")
                .unwrap();
        let code: Vec<&str> = lines.iter().map(|line| line.code.trim()).collect();
        assert_eq!(code, ["let a = ;", "", "let b;", "", "fn f() {", "}"]);
        let comments: Vec<&str> = lines.iter().map(|line| line.comment.trim()).collect();
        assert_eq!(comments, ["// one", "/* two /* three */", "four */", "/// Five.", "//! six", ""]);
        assert_eq!(lines[0].literal, "1");
    }

    #[test]
    fn literals_hide_their_contents() {
        assert_eq!(code_of(r#"f("a // \" b", x) // c"#), ["f(, x)"]);
        assert_eq!(code_of("f(r#\"a \" b\"#, br\"c\")"), ["f(, )"]);
        assert_eq!(code_of("let s = \"a\nb\\\n  c\"; d"), ["let s =", "", "; d"]);
        assert_eq!(code_of(r"m('\'', '/', '\u{7f}', x)"), ["m(, , , x)"]);
        assert_eq!(code_of("fn f<'a>(x: &'a str) { x }"), ["fn f<'a>(x: &'a str) { x }"]);
        let lines = split("f(\"a\nb\", 'c')").unwrap();
        assert_eq!((lines[0].literal.as_str(), lines[1].literal.as_str()), ("\"a", "b\"'c'"));
        assert!(split("f(").is_err());
    }

    #[test]
    fn words_are_found_whole() {
        assert!(contains_word("an unsafe block", "unsafe"));
        assert!(!contains_word("unsafe_code", "unsafe") && !contains_word("not_unsafe", "unsafe"));
        assert!(contains_word("std::env::var", "env::") && !contains_word("my_env::var", "env::"));
    }

    #[test]
    fn tests_are_the_module_at_the_end_or_a_file_of_their_own() {
        let file = RustFile::parse("crates/a/src/b.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n}\n").unwrap();
        assert_eq!((0..4).map(|index| file.is_test(index)).collect::<Vec<_>>(), [false, true, true, true]);
        let declared =
            RustFile::parse("crates/a/src/lib.rs", "#[cfg(test)]\nmod tests;\nfn f() {}\n").unwrap();
        assert!(!declared.is_test(2));
        assert!(RustFile::parse("crates/a/tests/b.rs", "fn f() {}").unwrap().is_test(0));
        assert_eq!(file.crate_name(), "a");
        assert_eq!(RustFile::parse("xtask/src/main.rs", "").unwrap().crate_name(), "xtask");
    }
}
