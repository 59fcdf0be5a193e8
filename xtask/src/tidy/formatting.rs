use super::finding::Finding;
use super::workspace::TextFile;

/// Recommended maximum number of lines of a Rust file. A longer file needs a reason.
const NUM_LINES_RECOMMENDED: usize = 400;

/// Maximum number of lines of a Rust file.
const NUM_LINES_MAX: usize = 600;

/// Checks that a file ends with one newline, has no tabs and no spaces at the ends of lines, and, if it is a Rust file, is not too long.
pub(crate) fn check(file: &TextFile) -> Vec<Finding> {
    check_lines(file).into_iter().chain(check_end(file)).chain(check_length(file)).collect()
}

fn check_lines(file: &TextFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in file.text.split('\n').enumerate() {
        let mut refuse = |what: &str, remedy: &str| {
            findings.push(Finding::violation(&file.path, index + 1, what, remedy));
        };
        if line.contains('\t') {
            refuse("a tab", "use spaces");
        }
        if line.ends_with(char::is_whitespace) {
            refuse("whitespace at the end of the line", "remove it");
        }
    }
    findings
}

fn check_end(file: &TextFile) -> Option<Finding> {
    let text = &file.text;
    let problem = match &**text {
        "" => "the file is empty",
        text if !text.ends_with('\n') => "no newline at the end of the file",
        text if text.ends_with("\n\n") => "empty lines at the end of the file",
        _ => return None,
    };
    let line = text.split('\n').count();
    Some(Finding::violation(&file.path, line, problem, "end the file with one newline"))
}

fn check_length(file: &TextFile) -> Option<Finding> {
    let num_lines = file.text.lines().count();
    if !file.path.ends_with(".rs") || num_lines <= NUM_LINES_RECOMMENDED {
        return None;
    }
    let what = format!("{num_lines} lines, where {NUM_LINES_RECOMMENDED} are the rule");
    let finding = if num_lines > NUM_LINES_MAX { Finding::violation } else { Finding::warn };
    Some(finding(&file.path, num_lines, what, "split it by what its parts are about"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let file = TextFile { path: path.to_owned(), text: text.to_owned() };
        check(&file).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_well_formed_file_passes() {
        assert_eq!(findings("a.md", "# A\n\nText.\n"), [""; 0]);
    }

    #[test]
    fn each_fault_of_form_is_found_with_its_line() {
        for (text, expected) in [
            ("a\nb", "a.md:2: no newline"),
            ("a\n\n", "a.md:3: empty lines"),
            ("", "a.md:1: the file is empty"),
            ("a\nb \nc\n", "a.md:2: whitespace"),
            ("a\r\nb\n", "a.md:1: whitespace"),
            ("a\n\tb\n", "a.md:2: a tab"),
        ] {
            let found = findings("a.md", text);
            assert_eq!(found.len(), 1, "{text:?} {found:?}");
            assert!(found[0].starts_with(expected), "{found:?}");
        }
    }

    #[test]
    fn long_rust_files_are_warned_of_then_refused() {
        let of_lines = |num_lines| "x\n".repeat(num_lines);
        assert!(findings("a.rs", &of_lines(400)).is_empty());
        assert!(findings("a.rs", &of_lines(401))[0].contains("warning"));
        assert!(!findings("a.rs", &of_lines(601))[0].contains("warning"));
        assert!(findings("a.md", &of_lines(601)).is_empty());
    }
}
