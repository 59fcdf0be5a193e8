//! `cargo xtask kernels`: the list of kernels that a backend must provide, made from the methods of `Device`, and what tests them.

use anyhow::{Context, Result, ensure};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{fs, iter};

/// Where the list is.
const LIST: &str = "docs/kernels.md";

/// Methods that issue kernels.
const DEVICE: &str = "crates/tensor/src/device";

/// What calls them for operations.
const TAPE: [&str; 4] = [
    "crates/tensor/src/tape",
    "crates/tensor/src/tape/operations",
    "crates/tensor/src/values.rs",
    "crates/tensor/src/fp8.rs",
];

/// The suites that a backend must pass.
const SUITES: [&str; 2] = ["crates/tensor/tests/conformance", "crates/tensor/tests/operations"];

/// Kernels that belong to no result: they measure a machine.
const MEASURES: [&str; 1] = ["stream"];

/// Runs `cargo xtask kernels`.
pub(crate) fn run(root: &Path) -> Result<()> {
    let (list, path) = (list(root)?, root.join(LIST));
    fs::write(&path, list).with_context(|| format!("cannot write {}", path.display()))?;
    println!("{LIST} is up to date");
    Ok(())
}

/// A file of Rust.
struct Source {
    /// Its name within its folder.
    name: String,
    text: String,
    /// Whether it was read as one file, not with its folder.
    is_apart: bool,
}

/// A method of `Device` that issues a kernel.
struct Kernel {
    name: String,
    method: String,
    /// The first paragraph of its documentation.
    what: String,
    elements: Vec<&'static str>,
}

/// The whole page.
fn list(root: &Path) -> Result<String> {
    let mut kernels = Vec::new();
    for source in iter::once(read(&root.join(format!("{DEVICE}.rs")))?).chain(folder(&root.join(DEVICE))?) {
        kernels.extend(methods(&source.text));
    }
    // What has several methods counts as the first of them.
    kernels.sort_by(|left: &Kernel, right| left.name.cmp(&right.name));
    kernels.dedup_by(|later, earlier| later.name == earlier.name);
    let tape = TAPE.map(|place| root.join(place));
    let mut callers = Vec::new();
    for place in &tape {
        callers.extend(if place.is_dir() { folder(place)? } else { vec![read(place)?] });
    }
    let mut tests = Vec::new();
    for suite in SUITES {
        let name = suite.rsplit('/').next().unwrap_or(suite);
        let sources = folder(&root.join(suite))?.into_iter();
        tests.extend(sources.map(|source| Source { name: format!("{name}/{}", source.name), ..source }));
    }
    let mut page = String::from(
        "# Kernels\n\nWhat a backend must provide: the kernels that methods of `Device` issue, with the types of the elements that they read \
         and write, and the\ntests of `crates/tensor/tests` that call them on every backend, or check an operation whose source does. `cargo xtask \
         kernels` makes this list,\nand refuses a kernel without a test.\n\n| kernel | what it does | elements | tests |\n|---|---|---|---|\n",
    );
    for Kernel { name, method, what, elements } in &kernels {
        let found = tests_of(method, &callers, &tests);
        ensure!(!elements.is_empty(), "the types of the elements of the kernel `{name}` are not known");
        ensure!(!found.is_empty(), "no test of {} calls the kernel `{name}`", SUITES.join(" or "));
        writeln!(page, "| `{name}` | {what} | {} | {} |", elements.join(", "), found.join(", "))?;
    }
    Ok(page)
}

/// The test files that call a method of a device, or work with a type that does; of operations, those that check both of their passes.
fn tests_of(method: &str, callers: &[Source], tests: &[Source]) -> Vec<String> {
    let calling = callers.iter().filter(|source| calls(&source.text, method));
    let (mut types, mut operations, mut is_general) = (Vec::new(), Vec::new(), false);
    for source in calling {
        let declared = source.text.lines().filter_map(|line| line.strip_prefix("pub struct "));
        let names = declared.map(|rest| rest.split(['<', '(', ' ', ';']).next().unwrap_or(rest).to_owned());
        let names: Vec<String> = names.collect();
        // What no operation calls, tapes do for all of them.
        is_general |= names.is_empty() || names.iter().any(|name| name == "Tape");
        if source.is_apart { &mut types } else { &mut operations }.extend(names);
    }
    let is_test = |source: &&Source| {
        let mentions_any = |names: &[String]| names.iter().any(|name| mentions(&source.text, name));
        let checks = || source.name.starts_with("operations/") && (is_general || mentions_any(&operations));
        calls(&source.text, method) || mentions_any(&types) || checks()
    };
    let named = tests.iter().filter(|source| !source.name.ends_with("main.rs")).filter(is_test);
    named.map(|source| format!("`{}`", source.name)).collect()
}

/// Whether a text calls a method of a device.
fn calls(text: &str, method: &str) -> bool {
    let text: String = text.split_whitespace().collect();
    ["device", "device()"].iter().any(|device| text.contains(&format!("{device}.{method}(")))
}

/// Whether a word is in a text.
fn mentions(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part))
}

/// The methods in a text that issue or count a kernel under a name.
fn methods(text: &str) -> Vec<Kernel> {
    let (mut found, mut docs, mut method) = (Vec::new(), Vec::new(), None::<(String, String, String)>);
    for line in text.lines() {
        let trimmed = line.trim_start();
        if let Some((name, what, body)) = &mut method {
            body.push_str(trimmed);
            if line == "    }" {
                if let Some(kernel) = kernel_name(body) {
                    let (method, what, elements) = (name.clone(), what.clone(), elements(body));
                    if !MEASURES.contains(&kernel.as_str()) {
                        found.push(Kernel { name: kernel, method, what, elements });
                    }
                }
                method = None;
            }
        } else if let Some(doc) = trimmed.strip_prefix("///") {
            docs.push(doc.trim().to_owned());
        } else if let Some((_, rest)) = trimmed.split_once("fn ").filter(|_| line.starts_with("    ")) {
            let name = rest.split(['(', '<']).next().unwrap_or(rest).to_owned();
            let paragraph = docs.drain(..).take_while(|doc| !doc.is_empty()).collect::<Vec<_>>().join(" ");
            // What a link points to does not exist on this page.
            let what = unlinked(&paragraph).replace('|', "\\|");
            method = Some((name, what, String::new()));
        } else if !trimmed.starts_with("#[") {
            docs.clear();
        }
    }
    found
}

/// The text of links in place of them.
fn unlinked(text: &str) -> String {
    let mut parts = text.split("](");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if let Some(start) = plain.rfind('[') {
            plain.remove(start);
        }
        plain.push_str(part.split_once(')').map_or(part, |(_, rest)| rest));
    }
    plain.replace("[`", "`").replace("`]", "`")
}

/// The name under which a body issues its kernel.
fn kernel_name(body: &str) -> Option<String> {
    let after = ["self.issue(\"", "self.count(\""].iter().find_map(|call| Some(body.split_once(call)?.1))?;
    Some(after.split_once('"')?.0.to_owned())
}

/// The types of elements that a body asks places for.
fn elements(body: &str) -> Vec<&'static str> {
    // Scratch memory holds no elements of tensors.
    let body = ["scratch.", "words."].iter().fold(body.to_owned(), |body, name| body.replace(name, "_"));
    let has = |parts: &[&str]| parts.iter().any(|part| body.contains(part));
    let kinds = [
        ("f32", has(&[".f32s(cpu)", "with_element!", ".floats(cpu)"])),
        ("bf16", has(&["with_element!", ".floats(cpu)"])),
        ("f16", has(&["with_element!", ".floats(cpu)"])),
        ("f64", has(&[".f64s(cpu)"])),
        ("u32", has(&[".u32s(cpu)", "bags.elements(cpu)"])),
        ("any", has(&["with_word!", ".bytes(cpu)", "Pod"])),
    ];
    kinds.into_iter().filter(|(_, is_used)| *is_used).map(|(name, _)| name).collect()
}

fn read(path: &Path) -> Result<Source> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(Source { name, text, is_apart: true })
}

/// The files of Rust in a folder, by name.
fn folder(path: &Path) -> Result<Vec<Source>> {
    let entries = fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    paths.sort();
    paths.iter().map(|path| Ok(Source { is_apart: false, ..read(path)? })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_kernels_is_up_to_date() {
        let root = crate::workspace_root();
        let written = fs::read_to_string(root.join(LIST)).unwrap_or_default();
        assert!(written == list(root).unwrap(), "run `cargo xtask kernels`");
    }

    #[test]
    fn a_method_is_found_with_its_first_paragraph() {
        let text = "impl Device {\n    /// `y = x`, of [`Pieces`](crate::Pieces) at a [cost](Device::cost) of\n    /// one type.\n    ///\n    /// # Panics\n    /// If.\n    \
                    pub fn copy(&self) {\n        self.issue(\"copy\", cost, move |cpu| {\n            y.f32s(cpu);\n        });\n    }\n}\n";
        let [kernel] = &methods(text)[..] else { panic!("one method issues a kernel") };
        assert_eq!((&*kernel.name, &*kernel.method), ("copy", "copy"));
        assert_eq!(
            (&*kernel.what, &kernel.elements[..]),
            ("`y = x`, of `Pieces` at a cost of one type.", &["f32"][..])
        );
        assert!(mentions("Mean { dim: 1 }", "Mean") && !mentions("MeanLoss", "Mean"));
    }
}
