//! `cargo xtask kernels`: the list of kernels that a backend must provide, from the definitions of kernel calls, the other methods of
//! `Device`, and a run of the suites.

use crate::commands;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{fs, iter};

const LIST: &str = "docs/kernels.md";

/// Source of the methods that issue kernels.
const DEVICE: &str = "crates/tensor/src/device";

/// Source of the definitions of calls, which generate most methods.
const CALLS: &str = "crates/tensor/src/kernels/call";

/// Source of the CPU backend that runs the calls.
const RUN: &str = "crates/tensor/src/kernels/cpu/run";

/// The suites of `crates/tensor/tests` that a backend must pass.
const SUITES: [&str; 2] = ["conformance", "operations"];

/// Names of the backends in traces.
const BACKENDS: [&str; 3] = ["cpu", "detached", "cuda"];

/// Kernels that measure a machine and contribute to no result.
const MEASUREMENT_KERNELS: [&str; 1] = ["stream"];

/// The kernel that runs a Rust function, which GPUs refuse.
const RUST_FUNCTION: &str = "for_each_row";

/// Write docs/kernels.md, the list of kernels that a backend must provide.
///
/// Runs the suites of crates/tensor/tests, or reads traces of an earlier run, and lists which of them call each kernel.
#[derive(Debug, clap::Args)]
pub(crate) struct KernelsArgs {
    /// Write nothing, but fail if docs/kernels.md is out of date.
    #[arg(long)]
    check: bool,

    /// Read traces from this folder instead of running the suites. Tests write them if TRIREME_KERNEL_TRACE names the folder; they need
    /// two test threads or more.
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

pub(crate) fn run(args: &KernelsArgs, root: &Path) -> Result<()> {
    let traces = args.traces.as_deref().map_or_else(|| run_and_read_traces(root), read_traces)?;
    let (page, path) = (page(&kernels(root)?, &traces)?, root.join(LIST));
    if args.check {
        let written = fs::read_to_string(&path).unwrap_or_default();
        ensure!(written == page, "{LIST} is out of date: run `cargo xtask kernels`");
    } else {
        fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!("{LIST} is up to date");
    Ok(())
}

/// A method of `Device` that issues a kernel.
struct Kernel {
    name: String,
    /// The first paragraph of the method's documentation.
    what: String,
    element_types: Vec<&'static str>,
}

impl Kernel {
    /// Returns the kernel's row of the list, without the column of tests.
    fn row(&self) -> String {
        format!("| `{}` | {} | {} |", self.name, self.what, self.element_types.join(", "))
    }
}

fn kernels(root: &Path) -> Result<Vec<Kernel>> {
    let read =
        |path: &Path| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let read_folder = |folder: &str| {
        files(&root.join(folder))?.iter().map(|path| read(path)).collect::<Result<Vec<String>>>()
    };
    let definitions: Vec<Definition> =
        read_folder(CALLS)?.iter().flat_map(|text| definitions(text)).collect();
    let arms: CallSources = read_folder(RUN)?.iter().flat_map(|text| arms(text)).collect();
    let device = iter::once(read(&root.join(format!("{DEVICE}.rs"))));
    let device = device.chain(read_folder(DEVICE)?.into_iter().map(Ok)).collect::<Result<Vec<String>>>()?;
    let mut kernels: Vec<Kernel> =
        device.iter().flat_map(|text| methods(text, &definitions, &arms)).collect();
    kernels.extend(definitions.into_iter().filter(|definition| definition.has_method).map(|definition| {
        let Definition { path, name, what, .. } = definition;
        Kernel { name, what, element_types: arms.get(&path).map_or_else(Vec::new, |run| element_types(run)) }
    }));
    kernels.retain(|kernel| !MEASUREMENT_KERNELS.contains(&kernel.name.as_str()));
    // A kernel with several methods is described by the first of them.
    kernels.sort_by(|left: &Kernel, right| left.name.cmp(&right.name));
    kernels.dedup_by(|later, earlier| later.name == earlier.name);
    for Kernel { name, element_types, .. } in &kernels {
        ensure!(!element_types.is_empty(), "the types of the elements of the kernel `{name}` are not known");
    }
    Ok(kernels)
}

/// For each kernel and backend, the test files that call it.
type Traces = BTreeMap<(String, String), BTreeSet<String>>;

/// Runs the suites, which record the kernels that they call.
fn run_and_read_traces(root: &Path) -> Result<Traces> {
    let folder = std::env::temp_dir().join(format!("trireme-kernel-trace-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let found = run_suites(root, &folder).and_then(|()| read_traces(&folder));
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    found
}

fn run_suites(root: &Path, folder: &Path) -> Result<()> {
    let mut tests = commands::cargo(root);
    tests
        .args(["test", "--quiet", "--package", "trireme-tensor"])
        .args(SUITES.iter().flat_map(|suite| ["--test", suite]));
    // With one test thread, tests would run on a thread that does not have their name.
    tests.args(["--", "--test-threads", "2"]).env("TRIREME_KERNEL_TRACE", folder);
    let output = tests.output().context("cannot run cargo")?;
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the suites fail:\n{text}");
    Ok(())
}

fn read_traces(folder: &Path) -> Result<Traces> {
    let mut traces = Traces::new();
    for path in files(folder)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parts: Vec<&str> = name.split('.').collect();
        // A run of the whole workspace leaves traces of other tests, too.
        let [suite, module, backend] = parts[..] else { continue };
        if !SUITES.contains(&suite) {
            continue;
        }
        for kernel in fs::read_to_string(&path)?.lines() {
            let key = (kernel.to_owned(), backend.to_owned());
            traces.entry(key).or_default().insert(format!("`{suite}/{module}.rs`"));
        }
    }
    Ok(traces)
}

fn page(kernels: &[Kernel], traces: &Traces) -> Result<String> {
    let mut page = String::from(
        "# Kernels\n\nWhat a backend must provide: the kernels that methods of `Device` issue, with the types of the elements that they read \
         and write, and the\ntests of `crates/tensor/tests` that were seen to call them. `cargo xtask kernels` runs the tests and makes this \
         list; it refuses a kernel\nthat is not tested on every backend.\n\n| kernel | what it does | elements | tests |\n|---|---|---|---|\n",
    );
    for kernel in kernels {
        let mut tests = BTreeSet::new();
        let is_run = |backend: &&str| *backend != "cuda" || kernel.name != RUST_FUNCTION;
        for backend in BACKENDS.into_iter().filter(is_run) {
            let found = traces.get(&(kernel.name.clone(), backend.to_owned()));
            let what = || {
                format!(
                    "no test of {} calls the kernel `{}` on `{backend}`",
                    SUITES.join(" or "),
                    kernel.name
                )
            };
            tests.extend(found.with_context(what)?.iter().cloned());
        }
        writeln!(page, "{} {} |", kernel.row(), tests.into_iter().collect::<Vec<_>>().join(", "))?;
    }
    Ok(page)
}

/// Source texts by the path of the call, such as `BlockCall::Permute`.
type CallSources = BTreeMap<String, String>;

/// The definition of a call.
#[derive(Debug, PartialEq)]
struct Definition {
    path: String,
    /// Name of the kernel.
    name: String,
    has_method: bool,
    /// The first paragraph of the documentation.
    what: String,
}

/// Returns the calls that a source text defines, from lines such as `pub(crate) fn permute => Permute {` after `BlockCall {`. Without `fn`,
/// the definition generates no method.
fn definitions(text: &str) -> Vec<Definition> {
    let (mut area, mut docs, mut found) = ("", Vec::new(), Vec::new());
    for line in text.lines().map(str::trim) {
        if let Some(doc) = line.strip_prefix("///") {
            docs.push(doc.trim());
            continue;
        }
        let what = first_paragraph(&docs);
        docs.clear();
        if let Some((name, _)) = line.split_once("Call {").filter(|(name, _)| !name.contains(' ')) {
            area = name;
        }
        let Some((method, call)) = line.split_once(" => ") else { continue };
        let (name, has_method) = method.split_once("fn ").map_or((method, false), |(_, name)| (name, true));
        if name.chars().all(|c| c.is_alphanumeric() || c == '_')
            && let Some((call, _)) = call.split_once(" {")
        {
            found.push(Definition {
                path: format!("{area}Call::{call}"),
                name: name.to_owned(),
                has_method,
                what,
            });
        }
    }
    found
}

/// Returns the first paragraph of a documentation as a cell of a table.
fn first_paragraph(docs: &[&str]) -> String {
    let paragraph: Vec<&str> = docs.iter().take_while(|doc| !doc.is_empty()).copied().collect();
    // The targets of links do not exist on this page.
    unlinked(&paragraph.join(" ")).replace('|', "\\|")
}

/// Returns the paths of calls, each with the source text that runs the call: the text up to the next path.
fn arms(text: &str) -> Vec<(String, String)> {
    let starts = text.match_indices("Call::").map(|(at, _)| {
        at - text[..at].chars().rev().take_while(|c| c.is_alphanumeric()).map(char::len_utf8).sum::<usize>()
    });
    let starts: Vec<usize> = starts.collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    starts
        .iter()
        .zip(ends)
        .filter_map(|(&start, end)| Some((path(&text[start..])?, text[start..end].to_owned())))
        .collect()
}

/// Returns the path with which a text begins.
fn path(text: &str) -> Option<String> {
    let (area, rest) = text.split_once("::")?;
    let len = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
    Some(format!("{area}::{}", &rest[..len]))
}

/// Returns the methods in a text that issue a kernel, or that record the cost of one (`Device::count`).
fn methods(text: &str, definitions: &[Definition], arms: &CallSources) -> Vec<Kernel> {
    let (mut found, mut docs, mut method) = (Vec::new(), Vec::new(), None::<(String, String)>);
    for line in text.lines() {
        let trimmed = line.trim_start();
        if let Some((what, body)) = &mut method {
            body.push_str(trimmed);
            if line == "    }" {
                let issued = body.split_once("self.issue(").and_then(|(_, call)| path(call));
                let definition =
                    definitions.iter().find(|definition| Some(&definition.path) == issued.as_ref());
                let call =
                    definition.map(|definition| (definition.name.clone(), &arms[&definition.path][..]));
                // Functions of elements are computed for any float.
                let run = if body.contains("self.issue_expression(") { "with_element!" } else { &body[..] };
                let kernel = call.or_else(|| Some((kernel_name(body)?, run)));
                found.extend(kernel.map(|(name, run)| Kernel {
                    name,
                    what: what.clone(),
                    element_types: element_types(run),
                }));
                method = None;
            }
        } else if let Some(doc) = trimmed.strip_prefix("///") {
            docs.push(doc.trim());
        } else if line.starts_with("    ") && trimmed.contains("fn ") {
            method = Some((first_paragraph(&docs), String::new()));
            docs.clear();
        } else if !trimmed.starts_with("#[") {
            docs.clear();
        }
    }
    found
}

/// Replaces links by their text.
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

/// Returns the kernel's name in the body of a method that calls `issue_function`, `issue_expression` or `count`.
fn kernel_name(body: &str) -> Option<String> {
    let calls = ["self.issue_function(\"", "self.issue_expression(\"", "self.count(\""];
    let after = calls.iter().find_map(|call| Some(body.split_once(call)?.1))?;
    Some(after.split_once('"')?.0.to_owned())
}

/// Returns the element types of the operands that a kernel accesses.
fn element_types(run: &str) -> Vec<&'static str> {
    // Scratch memory does not contain elements of tensors.
    let run = ["scratch.", "words."].iter().fold(run.to_owned(), |run, name| run.replace(name, "_"));
    let has = |parts: &[&str]| parts.iter().any(|part| run.contains(part));
    let kinds = [
        ("f32", has(&[".f32s(", "optional_f32s(", "with_element!", ".floats("])),
        ("bf16", has(&["with_element!", ".floats(", ".elements::<Bf16>("])),
        ("f16", has(&["with_element!", ".floats("])),
        ("f64", has(&[".f64s("])),
        ("u32", has(&[".u32s("])),
        ("any", has(&["with_word!", ".bytes(", "backend.upload(", "backend.download("])),
    ];
    kinds.into_iter().filter(|(_, is_used)| *is_used).map(|(name, _)| name).collect()
}

/// Returns the files in a folder, sorted by name, without those of its subfolders.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    paths.retain(|path| path.is_file());
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The column of tests is checked by `cargo xtask kernels --check`.
    #[test]
    fn the_list_has_all_kernels() {
        let root = crate::workspace_root();
        let written = fs::read_to_string(root.join(LIST)).unwrap();
        let rows: Vec<&str> = written.lines().filter(|line| line.starts_with("| `")).collect();
        let kernels = kernels(root).unwrap();
        assert_eq!(rows.len(), kernels.len());
        for (row, kernel) in rows.into_iter().zip(&kernels) {
            assert!(row.starts_with(&kernel.row()), "{}: run `cargo xtask kernels`", kernel.name);
        }
    }

    #[test]
    fn a_kernel_that_is_not_tested_on_every_backend_is_refused() {
        let kernel = Kernel { name: "zero".to_owned(), what: String::new(), element_types: Vec::new() };
        let test = || BTreeSet::from(["`operations/shapes.rs`".to_owned()]);
        let of = |backend: &str| (("zero".to_owned(), backend.to_owned()), test());
        let traces = Traces::from(BACKENDS.map(of));
        assert!(page(&[kernel], &traces).unwrap().ends_with("| `zero` |  |  | `operations/shapes.rs` |\n"));
        let kernel = Kernel { name: "zero".to_owned(), what: String::new(), element_types: Vec::new() };
        let refused = page(&[kernel], &Traces::from([of("cpu")])).unwrap_err();
        assert!(refused.to_string().ends_with("the kernel `zero` on `detached`"), "{refused}");
    }

    #[test]
    fn a_method_is_found_with_its_first_paragraph() {
        let text = "impl Device {\n    /// `y = x`, of [`Pieces`](crate::Pieces) at a [cost](Device::cost) of\n    /// one type.\n    ///\n    /// # Panics\n    /// If.\n    \
                    pub fn copy(&self) {\n        self.issue(SomeCall::Copy {\n            y });\n    }\n}\n";
        let definitions =
            definitions("    SomeCall {\n    }\n    {\n        copy => Copy { y: ViewMut }\n    }\n");
        let arms = arms("SomeCall::Other { z } => z.u32s(self),\nSomeCall::Copy { y } => y.f32s(self),\n");
        let [kernel] = &methods(text, &definitions, &arms.into_iter().collect())[..] else {
            panic!("one method issues a kernel")
        };
        assert_eq!(kernel.name, "copy");
        assert_eq!(
            (&*kernel.what, &kernel.element_types[..]),
            ("`y = x`, of `Pieces` at a cost of one type.", &["f32"][..])
        );
    }

    #[test]
    fn a_definition_is_found_with_its_first_paragraph() {
        let text = "    /// Calls.\n    SomeCall {\n        /// Sets [all](x) to 0.\n        ///\n        /// # Panics\n        /// If.\n        \
                    pub(crate) fn zero => Zero { x: ViewMut }\n    }\n";
        let (path, name, what) =
            ("SomeCall::Zero".to_owned(), "zero".to_owned(), "Sets all to 0.".to_owned());
        assert_eq!(definitions(text), [Definition { path, name, has_method: true, what }]);
    }
}
