//! Finds files that import from each other in a cycle, so that none of them can be understood before the others.
//!
//! Paths within macro calls are not seen.

use super::finding::Finding;
use super::workspace::TextFile;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// Cycles of at most this many files are allowed: a module and one of its parts.
const IGNORED_SIZE: usize = 2;

/// A path within a crate, such as `device::transfer`.
type Path = Vec<String>;

/// A module, inline ones included.
#[derive(Default)]
struct Module {
    file: String,
    children: BTreeSet<String>,
    items: BTreeSet<String>,
    /// Imported names, with the paths that they stand for.
    imports: BTreeMap<String, Path>,
    /// Modules of which all names are imported.
    globs: Vec<Path>,
    /// Paths of items of other modules that this module uses.
    uses: Vec<Path>,
}

/// Refuses cycles among the files of a crate in `crates/` or of xtask.
pub(crate) fn check(texts: &[TextFile]) -> Vec<Finding> {
    let folders = texts.iter().filter_map(|file| {
        let root = ["/src/lib.rs", "/src/main.rs"].iter().find_map(|root| file.path.strip_suffix(root));
        root.filter(|folder| folder.starts_with("crates/") || *folder == "xtask")
    });
    let folders: BTreeSet<&str> = folders.collect();
    folders.into_iter().flat_map(|folder| check_crate(texts, folder)).collect()
}

fn check_crate(texts: &[TextFile], folder: &str) -> Vec<Finding> {
    let short = |file: &String| file.trim_start_matches(folder).trim_start_matches("/src/").to_owned();
    let refuse = |cycle: Vec<String>| {
        let files = cycle.iter().map(short).collect::<Vec<_>>().join(", ");
        let what = format!("{} files import from each other in a circle: {files}", cycle.len());
        Finding::violation(&cycle[0], 1, what, "move what several of them need into a file below them")
    };
    cycles(&imports(&modules(texts, folder))).into_iter().map(refuse).collect()
}

/// Returns the modules of a crate except those of tests, by path.
fn modules(texts: &[TextFile], folder: &str) -> BTreeMap<Path, Module> {
    let below_src =
        |file: &TextFile| file.path.strip_prefix(folder)?.strip_prefix("/src/").map(str::to_owned);
    let files: BTreeMap<String, &str> =
        texts.iter().filter_map(|file| Some((below_src(file)?, file.text.as_str()))).collect();
    let root = if files.contains_key("lib.rs") { "lib.rs" } else { "main.rs" };
    let mut reader = Reader { files, folder, modules: BTreeMap::new(), current: Vec::new() };
    reader.read(root, Vec::new());
    reader.modules
}

/// Reads modules from the root of a crate down.
struct Reader<'a> {
    /// Texts by their paths below `src`.
    files: BTreeMap<String, &'a str>,
    folder: &'a str,
    modules: BTreeMap<Path, Module>,
    current: Path,
}

impl Reader<'_> {
    fn read(&mut self, file: &str, module: Path) {
        let Some(text) = self.files.get(file) else { return };
        // A file that cannot be parsed does not compile.
        let Ok(parsed) = syn::parse_file(text) else { return };
        self.visit_module(module, format!("{}/src/{file}", self.folder), &parsed.items);
    }

    /// Visits the items of a module after all names that it declares and imports are known.
    fn visit_module(&mut self, path: Path, file: String, items: &[syn::Item]) {
        let before = std::mem::replace(&mut self.current, path);
        self.modules.insert(self.current.clone(), Module { file, ..Module::default() });
        let items: Vec<&syn::Item> =
            items.iter().filter(|item| !is_test(attributes_and_name(item).0)).collect();
        for item in &items {
            if let Some(name) = attributes_and_name(item).1 {
                let module = self.module();
                let is_module = matches!(item, syn::Item::Mod(_));
                let names = if is_module { &mut module.children } else { &mut module.items };
                names.insert(name.to_string());
            }
        }
        for item in &items {
            if let syn::Item::Use(item) = item {
                let is_reexport = !matches!(item.vis, syn::Visibility::Inherited);
                self.import_tree(&Vec::new(), &item.tree, is_reexport);
            }
        }
        items.into_iter().for_each(|item| self.visit_item(item));
        self.current = before;
    }

    fn module(&mut self) -> &mut Module {
        self.modules.get_mut(&self.current).expect("it was added before it is read")
    }

    /// Resolves a path as it is written in the current module; `None` if it leads out of the crate.
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

    /// Records an import. `name` is `None` if all names of a module are imported.
    fn import(&mut self, written: &Path, name: Option<String>, is_facade: bool) {
        let Some(path) = self.absolute(written) else { return };
        // A module that only re-exports its parts does not use them. If it also uses them, another path says so.
        let is_part = path.len() > self.current.len() && path.starts_with(&self.current);
        let module = self.module();
        if !(is_facade && is_part) {
            module.uses.push(path.clone());
        }
        match name {
            Some(name) => {
                module.imports.insert(name, path);
            }
            None => module.globs.push(path),
        }
    }

    fn import_tree(&mut self, prefix: &Path, tree: &syn::UseTree, is_facade: bool) {
        let with = |name: &syn::Ident| [prefix.clone(), Vec::from([name.to_string()])].concat();
        match tree {
            syn::UseTree::Path(path) => self.import_tree(&with(&path.ident), &path.tree, is_facade),
            syn::UseTree::Name(name) if name.ident == "self" => {
                self.import(prefix, prefix.last().cloned(), is_facade);
            }
            syn::UseTree::Name(name) => {
                self.import(&with(&name.ident), Some(name.ident.to_string()), is_facade)
            }
            syn::UseTree::Rename(rename) => {
                self.import(&with(&rename.ident), Some(rename.rename.to_string()), is_facade);
            }
            syn::UseTree::Glob(_) => self.import(prefix, None, is_facade),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.import_tree(prefix, tree, is_facade));
            }
        }
    }
}

/// Returns whether an item is compiled for tests only.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    let is_test = |attribute: &syn::Attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            let mut words = condition.split(|c: char| !c.is_alphanumeric() && c != '_');
            words.any(|word| word == "test") && !condition.contains("not") && !condition.contains("any")
        }
        meta => meta.path().is_ident("test"),
    };
    attributes.iter().any(is_test)
}

/// Returns the attributes of an item, and the name that it declares in its module.
fn attributes_and_name(item: &syn::Item) -> (&[syn::Attribute], Option<&syn::Ident>) {
    match item {
        syn::Item::Const(item) => (&item.attrs, Some(&item.ident)),
        syn::Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        syn::Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        syn::Item::Impl(item) => (&item.attrs, None),
        syn::Item::Macro(item) => (&[], item.ident.as_ref()),
        syn::Item::Mod(item) => (&item.attrs, Some(&item.ident)),
        syn::Item::Static(item) => (&item.attrs, Some(&item.ident)),
        syn::Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        syn::Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        syn::Item::Type(item) => (&item.attrs, Some(&item.ident)),
        syn::Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let path = [self.current.clone(), Vec::from([item.ident.to_string()])].concat();
        if let Some((_, items)) = &item.content {
            let file = self.module().file.clone();
            self.visit_module(path, file, items);
            return;
        }
        let below = path.join("/");
        let mut places = [format!("{below}.rs"), format!("{below}/mod.rs")].into_iter();
        if let Some(file) = places.find(|file| self.files.contains_key(file)) {
            self.read(&file, path);
        }
    }

    fn visit_item_use(&mut self, _: &'ast syn::ItemUse) {}

    /// `pub(in path)` uses nothing.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let written: Path = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if let Some(path) = self.absolute(&written) {
            self.module().uses.push(path);
        }
        visit::visit_path(self, path);
    }
}

/// Returns for each file the other files of its crate that it imports from.
fn imports(modules: &BTreeMap<Path, Module>) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut imports: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for module in modules.values() {
        let from = imports.entry(&module.file).or_default();
        let files = module.uses.iter().filter_map(|path| defined_in(modules, path, 0));
        from.extend(files.filter(|file| *file != module.file));
    }
    imports
}

/// Longest chain of re-exports that is followed.
const DEPTH_MAX: usize = 20;

/// Returns the file that defines the item with this path.
fn defined_in<'a>(modules: &'a BTreeMap<Path, Module>, path: &[String], depth: usize) -> Option<&'a str> {
    if depth == DEPTH_MAX {
        return None;
    }
    let mut current: Path = Vec::new();
    for (index, name) in path.iter().enumerate() {
        let module = modules.get(&current)?;
        let through = |to: &[String], rest: &[String]| defined_in(modules, &[to, rest].concat(), depth + 1);
        if module.children.contains(name) {
            current.push(name.clone());
        } else if let Some(meant) = module.imports.get(name) {
            return through(meant, &path[index + 1..]);
        } else if module.items.contains(name) {
            return Some(&module.file);
        } else {
            let has_name = |glob: &&Path| {
                let target = modules.get(*glob);
                target.is_some_and(|target| {
                    target.items.contains(name)
                        || target.children.contains(name)
                        || target.imports.contains_key(name)
                })
            };
            let glob = module.globs.iter().find(has_name);
            return glob.map_or(Some(&module.file), |glob| through(glob, &path[index..]));
        }
    }
    modules.get(&current).map(|module| module.file.as_str())
}

/// Returns the strongly connected components of more than [`IGNORED_SIZE`] files, the largest first.
fn cycles(imports: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<Vec<String>> {
    let reached = |from| {
        let (mut reached, mut next) = (BTreeSet::new(), Vec::from([from]));
        while let Some(file) = next.pop() {
            let imported = imports.get(file).into_iter().flatten();
            next.extend(imported.filter(|file| reached.insert(**file)));
        }
        reached
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> = imports.keys().map(|file| (*file, reached(file))).collect();
    let mut components: BTreeSet<Vec<String>> = BTreeSet::new();
    for (file, others) in &reached {
        let returns = |other: &&&str| reached.get(**other).is_some_and(|back| back.contains(file));
        components.insert(others.iter().filter(returns).map(|file| (*file).to_owned()).collect());
    }
    let mut components: Vec<Vec<String>> =
        components.into_iter().filter(|cycle| cycle.len() > IGNORED_SIZE).collect();
    components.sort_by_key(|cycle| std::cmp::Reverse(cycle.len()));
    components
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &str, text: &str) -> TextFile {
        TextFile { path: format!("crates/a/src/{path}"), text: text.to_owned() }
    }

    fn found(texts: &[TextFile]) -> Vec<Vec<String>> {
        cycles(&imports(&modules(texts, "crates/a")))
    }

    /// Asserts that these files form the only cycle.
    #[track_caller]
    fn assert_cycle(texts: &[TextFile], files: &[&str]) {
        let expected: Vec<String> = files.iter().map(|file| format!("crates/a/src/{file}")).collect();
        assert_eq!(found(texts), [expected]);
    }

    #[test]
    fn circles_are_found_through_facades_and_paths() {
        let mut texts = Vec::from([
            text("lib.rs", "mod one; mod two; pub use two::Two; #[cfg(test)] mod tests;"),
            text("one.rs", "use crate::Two; fn f() -> two::part::Part { crate::two::part::Part }"),
            text("two/mod.rs", "pub mod part; pub use part::Part; pub struct Two; use crate::one;"),
            text("two/part.rs", "use super::Two; pub struct Part;"),
        ]);
        assert_cycle(&texts, &["one.rs", "two/mod.rs", "two/part.rs"]);
        let finding = check_crate(&texts, "crates/a").remove(0).to_string();
        assert!(finding.contains("a circle: one.rs, two/mod.rs, two/part.rs; move"), "{finding}");
        // A module does not use items that it only re-exports, and tests may use anything.
        texts[2] = text(
            "two/mod.rs",
            "pub mod part; pub use part::Part; pub struct Two; #[cfg(all(test, unix))] mod t { use crate::one; } \
             pub(in crate::one) struct Hidden;",
        );
        assert!(found(&texts).is_empty());
        // A module may also use the items that it re-exports.
        texts[2] = text("two/mod.rs", "pub mod part; mod one; pub use part::Part; pub struct Two(Part);");
        texts[3] = text("two/part.rs", "use super::{Two, one}; pub struct Part;");
        texts.push(text("two/one.rs", "use super::Two;"));
        assert_cycle(&texts, &["two/mod.rs", "two/one.rs", "two/part.rs"]);
    }

    #[test]
    fn names_are_found_through_globs() {
        let texts = [
            text("main.rs", "mod a; mod b; mod c;"),
            text("a/mod.rs", "mod part; pub use part::*;"),
            text("a/part.rs", "use crate::b; pub struct Part;"),
            text("b.rs", "use crate::c::f;"),
            text("c.rs", "pub fn f() -> crate::a::Part { crate::a::Part }"),
        ];
        assert_cycle(&texts, &["a/part.rs", "b.rs", "c.rs"]);
    }
}
