//! Import edges between the top-level modules of a crate, read from its tokens. The root package includes this file by path.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Path of a module or an item, from the crate root.
type Names = Vec<String>;

/// Returns every import edge (importing module, imported module) between the top-level modules below `src_root`.
///
/// A folder or a top-level file is one module, named by its stem. Paths from `crate`, `super` and `self` count, in `use` trees and
/// in expressions. A name that is no module is an item of the crate root, `lib`, unless it is an exported macro: that belongs to
/// the module that defines it. `mod tests { .. }` and files of `#[cfg(test)] mod tests;` do not count.
pub fn edges(src_root: &Path) -> BTreeSet<(String, String)> {
    let mut files = Vec::new();
    walk(src_root, &mut files);
    let scans: Vec<(Names, Scan)> = files
        .iter()
        .map(|file| {
            let module = module_of(file.strip_prefix(src_root).expect("a file below the root"));
            let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            let inside = if is_root(&module) { Names::new() } else { module.clone() };
            let scan = Scan::of(&text, inside).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            (module, scan)
        })
        .collect();
    let tests: BTreeSet<&Names> = scans.iter().flat_map(|(_, scan)| &scan.tests).collect();
    let is_test = |module: &Names| (1..=module.len()).any(|n| tests.contains(&module[..n].to_vec()));
    let modules: BTreeSet<&String> = scans.iter().filter_map(|(module, _)| module.first()).collect();
    let macros: BTreeMap<&String, &String> =
        scans.iter().flat_map(|(module, scan)| scan.macros.iter().map(|name| (name, &module[0]))).collect();
    let root = "lib".to_owned();
    let mut edges = BTreeSet::new();
    for (module, scan) in scans.iter().filter(|(module, _)| !is_test(module)) {
        for path in &scan.paths {
            let to = match path.first() {
                Some(name) if modules.contains(name) => name,
                Some(name) => macros.get(name).copied().unwrap_or(&root),
                None => &root,
            };
            if *to != module[0] {
                edges.insert((module[0].clone(), to.clone()));
            }
        }
    }
    edges
}

/// Returns a cycle of edges, if there is one.
pub fn cycle(edges: &BTreeSet<(String, String)>) -> Option<Vec<String>> {
    let mut left = edges.clone();
    loop {
        // An edge into a module that imports nothing is in no cycle.
        let importing: BTreeSet<String> = left.iter().map(|(from, _)| from.clone()).collect();
        let before = left.len();
        left.retain(|(_, to)| importing.contains(to));
        if left.len() == before {
            break;
        }
    }
    let mut path = vec![left.first()?.0.clone()];
    loop {
        let last = path.last()?;
        let next = left.iter().find(|(from, _)| from == last)?.1.clone();
        let seen = path.iter().position(|name| *name == next);
        path.push(next);
        if let Some(start) = seen {
            return Some(path.split_off(start));
        }
    }
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry of a folder").path();
        match path.is_dir() {
            true => walk(&path, files),
            false if path.extension().is_some_and(|e| e == "rs") => files.push(path),
            false => {}
        }
    }
}

/// Returns the module path of a file; `lib` and `main` for the crate roots.
fn module_of(file: &Path) -> Names {
    let mut names: Names = file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if names.last().is_some_and(|name| name == "mod") {
        names.pop();
    }
    names
}

fn is_root(module: &[String]) -> bool {
    matches!(module, [name] if name == "lib" || name == "main")
}

/// Paths and declarations in one file.
#[derive(Debug, Default)]
pub struct Scan {
    /// Resolved paths from the crate root.
    pub paths: BTreeSet<Names>,
    /// Exported macros.
    pub macros: Vec<String>,
    /// Test modules in files of their own.
    pub tests: Vec<Names>,
}

impl Scan {
    /// Scans the text of the file of `module`.
    ///
    /// # Errors
    ///
    /// Fails if the text has no valid tokens.
    pub fn of(text: &str, module: Names) -> Result<Scan, String> {
        let stream: TokenStream = text.parse().map_err(|e| format!("{e}"))?;
        let mut scan = Scan::default();
        scan.tokens(stream, &module);
        Ok(scan)
    }

    fn tokens(&mut self, stream: TokenStream, module: &Names) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        // Attributes of the next item.
        let (mut for_tests, mut exported) = (false, false);
        let mut i = 0;
        while i < tokens.len() {
            match (&tokens[i], tokens.get(i + 1), tokens.get(i + 2)) {
                (TokenTree::Punct(hash), Some(TokenTree::Group(attribute)), _) if hash.as_char() == '#' => {
                    let text: String = attribute.stream().to_string().split_whitespace().collect();
                    for_tests |= text == "cfg(test)" || text.starts_with("cfg(all(test,");
                    exported |= text == "macro_export";
                    i += 2;
                    continue;
                }
                (TokenTree::Ident(word), Some(TokenTree::Ident(name)), Some(body)) if word == "mod" => {
                    let mut inner = module.clone();
                    inner.push(name.to_string());
                    match body {
                        TokenTree::Group(block) if name != "tests" => self.tokens(block.stream(), &inner),
                        TokenTree::Punct(_) if name == "tests" && for_tests => self.tests.push(inner),
                        _ => {}
                    }
                    i += 3;
                    (for_tests, exported) = (false, false);
                    continue;
                }
                (TokenTree::Ident(word), _, Some(TokenTree::Ident(name))) if word == "macro_rules" && exported => {
                    self.macros.push(name.to_string());
                }
                (TokenTree::Ident(word), _, _) if separator(&tokens, i + 1) => {
                    let from_root = module.is_empty() && !separator(&tokens, i.wrapping_sub(2));
                    let start = match word.to_string().as_str() {
                        "crate" => Some(Names::new()),
                        "self" => Some(module.clone()),
                        "super" => Some(parent(module)),
                        // In the crate root, a path may begin with a module.
                        name if from_root => Some(vec![name.to_owned()]),
                        _ => None,
                    };
                    if let Some(start) = start {
                        i = self.follow(&tokens, i + 3, start);
                        continue;
                    }
                }
                (TokenTree::Group(group), _, _) => self.tokens(group.stream(), module),
                _ => {}
            }
            if !matches!(&tokens[i], TokenTree::Ident(word) if word == "pub") {
                (for_tests, exported) = (false, false);
            }
            i += 1;
        }
    }

    /// Follows a path from its `prefix`, whose separator ends before token `i`. Returns the index after the path.
    fn follow(&mut self, tokens: &[TokenTree], i: usize, mut prefix: Names) -> usize {
        match tokens.get(i) {
            Some(TokenTree::Ident(name)) => {
                match name.to_string().as_str() {
                    "self" => {}
                    "super" => prefix = parent(&prefix),
                    name => prefix.push(name.to_owned()),
                }
                if separator(tokens, i + 1) {
                    return self.follow(tokens, i + 3, prefix);
                }
                self.paths.insert(prefix);
                i + 1
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let branches: Vec<TokenTree> = group.stream().into_iter().collect();
                for branch in branches.split(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ',')) {
                    if !branch.is_empty() {
                        self.follow(branch, 0, prefix.clone());
                    }
                }
                i + 1
            }
            _ => {
                self.paths.insert(prefix);
                i
            }
        }
    }
}

fn parent(module: &[String]) -> Names {
    module[..module.len().saturating_sub(1)].to_vec()
}

/// Returns true if tokens `i` and `i + 1` are `::`.
fn separator(tokens: &[TokenTree], i: usize) -> bool {
    let colon = |i: usize| matches!(tokens.get(i), Some(TokenTree::Punct(p)) if p.as_char() == ':');
    colon(i) && colon(i.wrapping_add(1))
}
