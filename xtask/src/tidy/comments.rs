use super::finding::Finding;
use super::rust_text::{Line, RustFile, contains_word};

/// Columns that a line with a comment may have.
const NUM_COLUMNS_MAX: usize = 140;

/// Words that begin a sentence whose subject is a clause: the reader must find out what the sentence is about.
const CLAUSE_BEGINNINGS: [&str; 7] = ["Of", "That", "Those", "What", "Who", "Whom", "Whose"];

/// Words and phrases, each with the plainer or more exact words to use instead.
const BANNED: [(&str, &str); 19] = [
    ("anew", "again"),
    ("beside", "next to, in addition to, or concurrently with"),
    ("gave back", "released, freed, or returned"),
    ("give back", "release, free, or return"),
    ("given back", "released, freed, or returned"),
    ("gives back", "releases, frees, or returns"),
    ("heard out", "handshake in progress"),
    ("made again", "recomputed"),
    ("makes again", "recomputes"),
    ("nobody", "no rank, no thread, or whoever it is"),
    ("of now", "current, or recent"),
    ("somebody", "another rank, the caller, or whoever it is"),
    ("taken to cost", "assumed to cost"),
    ("takes in", "records, or accounts for"),
    ("told of", "reported"),
    ("under way", "in flight, or pending"),
    ("what came of", "the result of"),
    ("whoever", "the caller, or the rank that"),
    ("wholes", "full or gathered tensors"),
];

/// Checks that comments name their subject in the field's words, and that their lines are not too long.
pub(crate) fn check(file: &RustFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut marker_before = None;
    for (index, line) in file.lines.iter().enumerate() {
        let comment = comment_alone(line);
        let mut refuse = |what: String, remedy: String| {
            findings.push(Finding::violation(&file.path, index + 1, what, remedy));
        };
        if let Some((marker, text)) = comment
            && marker_before != Some(marker)
            && let Some(word) = CLAUSE_BEGINNINGS.iter().find(|word| text.split(' ').next() == Some(**word))
        {
            refuse(format!("a comment that begins with '{word}'"), "name the subject".to_owned());
        }
        let lower = line.comment.to_lowercase();
        for (phrase, instead) in BANNED.iter().filter(|(phrase, _)| contains_word(&lower, phrase)) {
            refuse(format!("'{phrase}' in a comment"), format!("say {instead}"));
        }
        let num_columns = line.num_columns;
        if !line.comment.trim().is_empty() && num_columns > NUM_COLUMNS_MAX {
            refuse(format!("{num_columns} columns"), format!("wrap the comment at {NUM_COLUMNS_MAX}"));
        }
        marker_before = comment.map(|(marker, _)| marker);
    }
    findings
}

/// Returns the marker and the text of a line that is nothing but a comment.
fn comment_alone(line: &Line) -> Option<(&str, &str)> {
    if !line.code.trim().is_empty() || !line.literal.is_empty() {
        return None;
    }
    let comment = line.comment.trim();
    let marker = ["///", "//!", "//"].into_iter().find(|marker| comment.starts_with(marker))?;
    Some((marker, comment[marker.len()..].trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let file = RustFile::parse("a.rs", text).unwrap();
        check(&file).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn comments_begin_with_their_subject() {
        for comment in
            ["/// What a rank has.", "//! Those of a unit.", "// Of each expert.", "/// Who waits."]
        {
            let found = findings(&format!("{comment}\nfn f() {{}}"));
            assert_eq!(found.len(), 1, "{comment}");
            assert!(found[0].starts_with("a.rs:1: a comment that begins with"), "{found:?}");
        }
        assert!(
            findings("/// Returns the parts\n/// Of a unit, whatever its size.\n// Office hours.").is_empty()
        );
    }

    #[test]
    fn each_banned_word_is_found_in_comments_alone() {
        for (phrase, _) in BANNED {
            assert_eq!(findings(&format!("let a = 1; // It is {phrase}.")).len(), 1, "{phrase}");
            assert!(findings(&format!("let a = \"{phrase}\";")).is_empty(), "{phrase}");
        }
        assert!(findings("// besides, and of nowhere").is_empty());
    }

    #[test]
    fn long_lines_of_comments_are_refused() {
        let of_columns = |num_columns| format!("// {}", "x".repeat(num_columns - 3));
        assert!(findings(&of_columns(NUM_COLUMNS_MAX)).is_empty());
        assert_eq!(findings(&of_columns(NUM_COLUMNS_MAX + 1)).len(), 1);
    }
}
