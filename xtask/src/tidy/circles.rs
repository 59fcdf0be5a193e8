//! Files that import from each other in a circle: none of them can be read before the others.

use super::finding::Finding;
use super::workspace::TextFile;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// Circles of so few files are not counted: a module and one of its parts.
const SMALL: usize = 2;

/// The sizes of the circles that there still are, by crate. They may only shrink.
const CEILINGS: &[(&str, &[usize])] = &[
    ("checkpoint", &[3]),
    ("cli", &[6, 3, 3]),
    ("comm", &[50, 3]),
    ("data", &[22]),
    ("model", &[16]),
    ("optim", &[4]),
    ("parallel", &[19, 4]),
    ("schedule", &[11, 10, 4, 3]),
    ("tensor", &[21, 8, 4]),
    ("testkit", &[3]),
    ("train", &[9, 7, 4, 4]),
];

/// A path within a crate, such as `device::transfer`.
type Path = Vec<String>;

/// A module, inline ones included.
#[derive(Default)]
struct Module {
    /// The file that it lies in.
    file: String,
    children: BTreeSet<String>,
    /// What names mean here that come from elsewhere.
    imports: BTreeMap<String, Path>,
    /// What it takes from other modules, as absolute paths.
    uses: Vec<Path>,
}

/// Compares the circles among the files of each crate in `crates/` and xtask with [`CEILINGS`].
pub(crate) fn check(texts: &[TextFile]) -> Vec<Finding> {
    let roots = texts.iter().filter_map(|file| {
        let folder = file.path.strip_suffix("/src/lib.rs")?;
        Some((folder, folder.rsplit('/').next().unwrap_or(folder)))
    });
    roots.flat_map(|(folder, name)| check_crate(texts, folder, name)).collect()
}

fn check_crate(texts: &[TextFile], folder: &str, name: &str) -> Vec<Finding> {
    let circles = circles(&imports(&modules(texts, folder)));
    let sizes: Vec<usize> = circles.iter().map(Vec::len).collect();
    let ceiling = CEILINGS.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, sizes)| sizes);
    if sizes == ceiling {
        return Vec::new();
    }
    let describe = |circle: &Vec<String>| {
        let files: Vec<&str> = circle
            .iter()
            .map(|file| file.strip_prefix(folder).unwrap_or(file).trim_start_matches("/src/"))
            .collect();
        format!("{} ({})", files.len(), files.join(", "))
    };
    let listed = circles.iter().map(describe).collect::<Vec<_>>().join("; ");
    let what =
        format!("the circles of imports among its files have the sizes {sizes:?}, not {ceiling:?}: {listed}");
    let is_better = sizes.iter().sum::<usize>() < ceiling.iter().sum();
    let remedy = match is_better {
        true => "lower CEILINGS in xtask/src/tidy/circles.rs",
        false => "move what both files need into a third one",
    };
    Vec::from([Finding::refuse(&format!("{folder}/src/lib.rs"), 1, what, remedy)])
}

/// The modules of a crate but those of tests, by their paths.
fn modules(texts: &[TextFile], folder: &str) -> BTreeMap<Path, Module> {
    let files: BTreeMap<&str, &str> = texts
        .iter()
        .filter_map(|file| {
            let path = file.path.strip_prefix(folder)?.strip_prefix("/src/")?;
            Some((path, file.text.as_str()))
        })
        .collect();
    let mut reader =
        Reader { files, folder, modules: BTreeMap::new(), current: Vec::new(), file: String::new() };
    reader.read("lib.rs", Vec::new());
    reader.modules
}

/// Reads modules from the root of a crate down.
struct Reader<'a> {
    /// Texts by their paths below `src`.
    files: BTreeMap<&'a str, &'a str>,
    folder: &'a str,
    modules: BTreeMap<Path, Module>,
    current: Path,
    file: String,
}

impl Reader<'_> {
    fn read(&mut self, file: &str, module: Path) {
        let Some(text) = self.files.get(file) else { return };
        // The compiler refuses what is no Rust.
        let Ok(parsed) = syn::parse_file(text) else { return };
        let before = (
            std::mem::replace(&mut self.current, module),
            std::mem::replace(&mut self.file, file.to_owned()),
        );
        let file = format!("{}/src/{file}", self.folder);
        self.modules.entry(self.current.clone()).or_insert_with(|| Module { file, ..Module::default() });
        self.visit_file(&parsed);
        (self.current, self.file) = before;
    }

    fn module(&mut self) -> &mut Module {
        self.modules.get_mut(&self.current).expect("it was added before it is read")
    }

    /// The absolute path of one that is written here, if it lies in this crate. A first name may be that of a child or an import.
    fn absolute(&self, written: &[String]) -> Option<Path> {
        let mut base = self.current.clone();
        let mut rest = written;
        while let Some((first, others)) = rest.split_first() {
            match first.as_str() {
                "crate" => base.clear(),
                "self" => {}
                "super" => {
                    base.pop()?;
                }
                _ => break,
            }
            rest = others;
        }
        let is_relative = rest.len() < written.len();
        let module = &self.modules[&self.current];
        let is_known = rest
            .first()
            .is_some_and(|first| module.children.contains(first) || module.imports.contains_key(first));
        (is_relative || is_known).then(|| base.into_iter().chain(rest.iter().cloned()).collect())
    }

    fn import(&mut self, written: Path, name: Option<String>, is_facade: bool) {
        let Some(path) = self.absolute(&written) else { return };
        // What a module shows of its parts, it does not use.
        let is_part = path.len() > self.current.len() && path.starts_with(&self.current);
        let module = self.module();
        if let Some(name) = name {
            module.imports.insert(name, path.clone());
        }
        if !(is_facade && is_part) {
            module.uses.push(path);
        }
    }

    fn import_tree(&mut self, prefix: &Path, tree: &syn::UseTree, is_facade: bool) {
        let with = |name: &syn::Ident| [prefix.clone(), Vec::from([name.to_string()])].concat();
        match tree {
            syn::UseTree::Path(path) => self.import_tree(&with(&path.ident), &path.tree, is_facade),
            syn::UseTree::Name(name) if name.ident == "self" => {
                self.import(prefix.clone(), prefix.last().cloned(), is_facade);
            }
            syn::UseTree::Name(name) => {
                self.import(with(&name.ident), Some(name.ident.to_string()), is_facade)
            }
            syn::UseTree::Rename(rename) => {
                self.import(with(&rename.ident), Some(rename.rename.to_string()), is_facade);
            }
            syn::UseTree::Glob(_) => self.import(prefix.clone(), None, is_facade),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import_tree(prefix, tree, is_facade));
            }
        }
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    let is_test = |attribute: &syn::Attribute| match &attribute.meta {
        syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        meta => meta.path().is_ident("test"),
    };
    attributes.iter().any(is_test)
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_file(&mut self, file: &'ast syn::File) {
        // Names first: a path may begin with one that is declared below it.
        for item in &file.items {
            if let syn::Item::Mod(module) = item
                && !is_test(&module.attrs)
            {
                let name = module.ident.to_string();
                self.module().children.insert(name);
            }
        }
        visit::visit_file(self, file);
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let name = item.ident.to_string();
        let path = [self.current.clone(), Vec::from([name.clone()])].concat();
        if item.content.is_some() {
            let file = self.module().file.clone();
            self.modules.entry(path.clone()).or_insert_with(|| Module { file, ..Module::default() });
            let before = std::mem::replace(&mut self.current, path);
            visit::visit_item_mod(self, item);
            self.current = before;
            return;
        }
        let below = path.join("/");
        let file = [format!("{below}.rs"), format!("{below}/mod.rs")]
            .into_iter()
            .find(|file| self.files.contains_key(file.as_str()));
        if let Some(file) = file {
            self.read(&file, path);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let is_facade = !matches!(item.vis, syn::Visibility::Inherited);
        self.import_tree(&Vec::new(), &item.tree, is_facade);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let written: Path = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if written.len() > 1
            && let Some(path) = self.absolute(&written)
        {
            self.module().uses.push(path);
        }
        visit::visit_path(self, path);
    }
}

/// From each file the others of its crate that it imports from.
fn imports(modules: &BTreeMap<Path, Module>) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut imports: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for module in modules.values() {
        let from = imports.entry(&module.file).or_default();
        let files = module.uses.iter().filter_map(|path| defined_in(modules, path, 0));
        from.extend(files.filter(|file| *file != module.file));
    }
    imports
}

/// More imports than lead to one name.
const DEPTH_MAX: usize = 20;

/// The file in which what a path names is defined.
fn defined_in<'a>(modules: &'a BTreeMap<Path, Module>, path: &[String], depth: usize) -> Option<&'a str> {
    let mut current: Path = Vec::new();
    for (index, name) in path.iter().enumerate() {
        let module = modules.get(&current)?;
        if module.children.contains(name) {
            current.push(name.clone());
        } else if let Some(meant) = module.imports.get(name).filter(|_| depth < DEPTH_MAX) {
            let path = [&meant[..], &path[index + 1..]].concat();
            return defined_in(modules, &path, depth + 1);
        } else {
            return Some(&module.file);
        }
    }
    modules.get(&current).map(|module| module.file.as_str())
}

/// Groups of more than [`SMALL`] files each of which leads to all others of its group, the largest first.
fn circles(imports: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<Vec<String>> {
    let reached = |from| {
        let (mut reached, mut next) = (BTreeSet::new(), Vec::from([from]));
        while let Some(file) = next.pop() {
            let imported = imports.get(file).into_iter().flatten();
            next.extend(imported.filter(|file| reached.insert(**file)));
        }
        reached
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> = imports.keys().map(|file| (*file, reached(file))).collect();
    let mut circles: BTreeSet<Vec<String>> = BTreeSet::new();
    for (file, others) in &reached {
        let circle =
            others.iter().filter(|other| reached.get(**other).is_some_and(|back| back.contains(file)));
        circles.insert(circle.map(|file| (*file).to_owned()).collect());
    }
    let mut circles: Vec<Vec<String>> = circles.into_iter().filter(|circle| circle.len() > SMALL).collect();
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &str, text: &str) -> TextFile {
        TextFile { path: format!("crates/a/src/{path}"), text: text.to_owned() }
    }

    fn found(texts: &[TextFile]) -> Vec<Vec<String>> {
        circles(&imports(&modules(texts, "crates/a")))
    }

    #[test]
    fn circles_are_found_through_facades_and_paths() {
        let mut texts = Vec::from([
            text("lib.rs", "mod one; mod two; pub use two::Two; #[cfg(test)] mod tests;"),
            text("one.rs", "use crate::Two; fn f() -> two::part::Part { crate::two::part::Part }"),
            text("two/mod.rs", "pub mod part; pub use part::Part; pub struct Two; use crate::one;"),
            text("two/part.rs", "use super::Two; pub struct Part;"),
        ]);
        let expected = ["one.rs", "two/mod.rs", "two/part.rs"].map(|file| format!("crates/a/src/{file}"));
        assert_eq!(found(&texts), [expected.to_vec()]);
        let finding = check_crate(&texts, "crates/a", "a").remove(0).to_string();
        assert!(finding.contains("[3], not []: 3 (one.rs, two/mod.rs, two/part.rs); move"), "{finding}");
        // A module does not use what it only shows, and tests may use anything.
        texts[2] = text(
            "two/mod.rs",
            "pub mod part; pub use part::Part; pub struct Two; #[cfg(test)] mod t { use crate::one; }",
        );
        assert!(found(&texts).is_empty());
    }
}
