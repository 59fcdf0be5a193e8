use super::finding::Finding;
use super::rust_text::{Line, RustFile, contains_word};

/// Crates whose functions depend on nothing but their arguments.
const PURE_CRATES: [&str; 4] = ["codec", "plan", "planner", "schedule"];

/// Crates that print. `testkit` reports skipped tests, and `fake_cuda` the cause of an error that CUDA reports as a number.
const COMMAND_CRATES: [&str; 4] = ["cli", "fake_cuda", "testkit", "xtask"];

/// Crates that know the config.
const CONFIG_CRATES: [&str; 3] = ["cli", "testkit", "train"];

/// A test whose child process sleeps until it is killed, because no event ends its wait.
const CHILD_TO_BE_KILLED: &str = "crates/cli/src/launch/worker_processes.rs";

/// Words that are not allowed in some part of the sources.
struct Rule {
    words: &'static [&'static str],
    within: SourcePart,
    /// Whether the rule applies to the line with this index.
    applies: fn(&RustFile, usize) -> bool,
    remedy: &'static str,
}

#[derive(Clone, Copy)]
enum SourcePart {
    Code,
    CodeAndComments,
    Strings,
}

const RULES: &[Rule] = &[
    Rule {
        words: &["todo!", "unimplemented!", "dbg!"],
        within: SourcePart::Code,
        applies: |_, _| true,
        remedy: "write what is missing, or return an error",
    },
    Rule {
        words: &["TODO", "FIXME", "XXX", "for now", "placeholder"],
        within: SourcePart::CodeAndComments,
        applies: |_, _| true,
        remedy: "do it now, or open an issue; the sources say what is",
    },
    Rule {
        words: &["thread::sleep", "sleep("],
        within: SourcePart::Code,
        applies: |file, index| file.is_test(index) && file.path != CHILD_TO_BE_KILLED,
        remedy: "wait for the event itself: a join, a message, the end of a file",
    },
    Rule {
        words: &["print!", "println!", "eprint!", "eprintln!"],
        within: SourcePart::Code,
        applies: |file, index| !COMMAND_CRATES.contains(&file.crate_name()) && !file.is_test(index),
        remedy: "return it, or hand it to an observer",
    },
    Rule {
        words: &["eprint!", "eprintln!"],
        within: SourcePart::Code,
        applies: |file, index| file.is_test(index),
        remedy: "to skip a test, call testkit::or_skip, which CI can forbid; a failing test says why in its panic",
    },
    Rule {
        words: &["Instant", "SystemTime", "SystemClock", "env::", "fs::", "net::", "process::", "thread::"],
        within: SourcePart::Code,
        applies: is_pure,
        remedy: "take it as an argument: this crate reads no clock, environment or file and starts nothing",
    },
    Rule {
        words: &["HashMap", "HashSet"],
        within: SourcePart::Code,
        applies: is_pure,
        remedy: "use a BTreeMap, BTreeSet or Vec: what this crate makes has one order",
    },
    Rule {
        words: &[
            "[activation_checkpoint]",
            "[checkpoint]",
            "[comm]",
            "[data]",
            "[experts]",
            "[generate]",
            "[launch]",
            "[lr_scheduler]",
            "[memory]",
            "[metrics]",
            "[model]",
            "[offload]",
            "[optimizer]",
            "[parallelism]",
            "[run]",
            "[training]",
        ],
        within: SourcePart::Strings,
        applies: knows_no_config,
        remedy: "say it in the terms of this crate, and name the key in cli/src/hints.rs",
    },
];

fn knows_no_config(file: &RustFile, index: usize) -> bool {
    let is_library = file.path.starts_with("crates/") && file.path.contains("/src/");
    is_library && !CONFIG_CRATES.contains(&file.crate_name()) && !file.is_test(index)
}

fn is_pure(file: &RustFile, _: usize) -> bool {
    PURE_CRATES.contains(&file.crate_name())
}

/// Checks that no source contains a word or call that is not allowed there.
pub(crate) fn check(file: &RustFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in file.lines.iter().enumerate() {
        for rule in RULES.iter().filter(|rule| (rule.applies)(file, index)) {
            if let Some(word) = rule.words.iter().find(|word| occurs_in(line, word, rule.within)) {
                findings.push(Finding::violation(&file.path, index + 1, format!("'{word}'"), rule.remedy));
            }
        }
    }
    findings
}

fn occurs_in(line: &Line, word: &str, within: SourcePart) -> bool {
    match within {
        SourcePart::Code => contains_word(&line.code, word),
        SourcePart::CodeAndComments => contains_word(&line.comment, word) || contains_word(&line.code, word),
        SourcePart::Strings => line.literal.contains(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        check(&RustFile::parse(path, text).unwrap()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn unfinished_work_is_refused_everywhere() {
        for text in ["todo!()", "dbg!(x);", "fn f() {} // TODO", "/// A placeholder.", "// Enough for now."] {
            for path in ["crates/cli/src/main.rs", "crates/comm/tests/a.rs", "xtask/src/main.rs"] {
                let found = findings(path, &format!("\n{text}"));
                assert_eq!(found.len(), 1, "{text}");
                assert!(found[0].starts_with(&format!("{path}:2: '")), "{found:?}");
            }
        }
        assert!(findings("a.rs", "let todo = \"TODO: placeholder\"; // for nowhere").is_empty());
    }

    #[test]
    fn tests_do_not_sleep_and_other_code_may() {
        let sleep = "std::thread::sleep(pause);";
        assert_eq!(findings("crates/comm/tests/a.rs", sleep).len(), 1);
        assert_eq!(
            findings("crates/comm/src/a.rs", &format!("#[cfg(test)]\nmod tests {{\n{sleep}\n}}")).len(),
            1
        );
        assert!(findings("crates/comm/src/a.rs", sleep).is_empty());
    }

    #[test]
    fn tests_are_skipped_by_the_test_kit_alone() {
        let skips = "eprintln!(\"skipped: no such device\");";
        assert_eq!(findings("crates/comm/tests/a.rs", skips).len(), 1);
        assert!(findings("crates/testkit/src/skipping.rs", skips).is_empty());
    }

    #[test]
    fn libraries_do_not_print() {
        for call in ["println!(\"\");", "eprint!(\"\");"] {
            assert_eq!(findings("crates/train/src/a.rs", call).len(), 1);
            for path in ["crates/cli/src/a.rs", "xtask/src/a.rs"] {
                assert!(findings(path, call).is_empty(), "{path}");
            }
        }
        assert!(findings("crates/train/tests/a.rs", "println!(\"\");").is_empty());
    }

    #[test]
    fn libraries_name_no_sections_of_the_config() {
        let text = "#[error(\"too large; lower [training] seq_len\")]\n// [training] may be named here\nlet a = b[training];";
        assert_eq!(findings("crates/tensor/src/a.rs", text).len(), 1);
        for path in ["crates/train/src/a.rs", "crates/cli/src/a.rs", "crates/tensor/tests/a.rs"] {
            assert!(findings(path, text).is_empty(), "{path}");
        }
    }

    #[test]
    fn pure_crates_reach_for_nothing() {
        for text in ["use std::time::Instant;", "std::env::var(\"A\")", "fs::read(path)", "HashMap::new()"] {
            assert_eq!(findings("crates/plan/src/a.rs", text).len(), 1, "{text}");
            assert_eq!(findings("crates/schedule/src/a.rs", text).len(), 1, "{text}");
            assert!(findings("crates/train/src/a.rs", text).is_empty(), "{text}");
        }
    }
}
