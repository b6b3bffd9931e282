//! Import direction: the folders of `src` and of `actors/src` import each other in one direction only, and so do their files.
//!
//! Paths are read from the tokens of each file, so nested `use` groups, paths in expressions and macro arguments count.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Folder of `src`, its content, and the folders that it imports. A folder imports only folders of earlier rows.
const SRC: &[(&str, &str, &[&str])] = &[
    ("common", "ground floor: atomic files, JSONL logs, host limits, devices, exit codes, number formats", &[]),
    (
        "hf",
        "Hugging Face folders: configurations, mapped weights, drafter layouts and their strict check; no libtorch",
        &["common"],
    ),
    ("config", "configuration: declared keys with comments, resolved type, rules", &["common", "hf"]),
    ("model", "target, drafter, loss and AdamW in tch (feature `torch`)", &["config", "hf"]),
    ("collective", "NCCL, copies between GPUs and their self-test (feature `torch`)", &["model"]),
    ("run_dir", "the run folder: checkpoints, retention, logs, and the database in `db/`", &["common", "config", "hf"]),
    ("data", "conversations in, one memory-mapped store out", &["common", "config", "hf"]),
    ("inference", "plain and speculative decoding (feature `torch`)", &["data", "hf", "model"]),
    (
        "export",
        "model folders in both layouts, and their self-test",
        &["common", "config", "hf", "inference", "model", "run_dir"],
    ),
    (
        "eval",
        "acceptance of a drafter: `draftmill eval`, and evaluations alongside the steps",
        &["common", "config", "data", "export", "hf", "inference", "model", "run_dir"],
    ),
    ("import", "GGUF to a Hugging Face folder", &["common", "hf"]),
    (
        "generate",
        "the target's own answers to prompts",
        &["common", "config", "data", "eval", "hf", "inference", "model"],
    ),
    (
        "check",
        "validation and forecast of a run, without running it",
        &["common", "config", "data", "eval", "hf", "run_dir"],
    ),
    (
        "engines",
        "engines behind the actors' traits: libtorch on blocking threads, and simulated ones with real checkpoints",
        &["collective", "config", "eval", "hf", "model", "run_dir"],
    ),
    (
        "doctor",
        "checks of the machine: devices, copies, memory, limits",
        &["check", "collective", "common", "config", "engines", "model"],
    ),
    ("admin", "the HTTP port: metrics, status, commands, the status page", &["common", "run_dir"]),
    (
        "simulate",
        "a whole node on a paused clock: scenario, report, sweep",
        &["check", "common", "config", "data", "engines"],
    ),
    (
        "service",
        "one run from start to summary: preparation, execution, configuration controller, signals, service manager",
        &[
            "admin",
            "check",
            "collective",
            "common",
            "config",
            "data",
            "engines",
            "eval",
            "export",
            "hf",
            "model",
            "run_dir",
        ],
    ),
    (
        "cli",
        "the command line: data on stdout, everything else on stderr",
        &[
            "admin", "check", "common", "config", "data", "doctor", "eval", "export", "generate", "hf", "import",
            "model", "run_dir", "service", "simulate",
        ],
    ),
];

/// The same for `actors/src`.
const ACTORS: &[(&str, &[&str])] = &[
    ("runtime", &[]),
    ("messages", &[]),
    ("pool", &["messages", "runtime"]),
    ("dispatcher", &["messages", "pool", "runtime"]),
    ("planner", &["dispatcher", "messages", "pool", "runtime"]),
    ("target", &["dispatcher", "messages", "pool", "runtime"]),
    ("trainer", &["messages", "planner", "runtime"]),
    ("drafter", &["messages", "pool", "runtime", "trainer"]),
    ("pipeline", &["dispatcher", "drafter", "messages", "planner", "pool", "runtime", "target", "trainer"]),
    ("simulated", &["messages", "pipeline", "planner", "runtime"]),
];

type Edges = BTreeMap<String, BTreeSet<String>>;

#[test]
fn folders_of_src_import_in_one_direction() {
    let table: Vec<_> = SRC.iter().map(|&(folder, _, imports)| (folder, imports)).collect();
    holds(&table, "src");
    let rows = SRC.iter().map(|(folder, content, imports)| {
        let imports: Vec<_> = imports.iter().map(|name| format!("`{name}`")).collect();
        format!("| `{folder}/` | {content} | {} |\n", imports.join(" "))
    });
    let table = format!("| folder | content | imports |\n| --- | --- | --- |\n{}", rows.collect::<String>());
    let path = root().join("ARCHITECTURE.md");
    let mut text = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- begin imports -->\n", "<!-- end imports -->");
    let from = text.find(begin).expect("ARCHITECTURE.md has a place for the imports") + begin.len();
    let to = from + text[from..].find(end).unwrap();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        text.replace_range(from..to, &table);
        fs::write(&path, &text).unwrap();
    }
    assert!(
        text.contains(&table),
        "the imports in ARCHITECTURE.md are stale: UPDATE_EXPECT=1 cargo test folders_of_src"
    );
}

#[test]
fn folders_of_actors_import_in_one_direction() {
    holds(ACTORS, "actors/src");
}

#[test]
fn no_two_files_import_each_other() {
    for package in ["src", "actors/src"] {
        let edges = files(package);
        for (file, imports) in &edges {
            for other in imports {
                let path = path_between(&edges, other, file);
                assert!(path.is_none(), "{package}/{file} and {package}/{other} import each other, via {path:?}");
            }
        }
    }
}

#[test]
fn every_way_to_write_an_import_is_seen() {
    let text = "use crate::{a::X, b::{self, c::Y}};\nfn f() { crate::d::g(); println!(\"{}\", super::super::e::Z) }\n\
                mod inner { use super::h; }\n#[cfg(test)]\nmod tests { use crate::hidden::T; }";
    let seen: BTreeSet<_> = imports(text, &["m".into(), "n".into()]).into_iter().map(|path| path.join("::")).collect();
    assert_eq!(seen, ["a::X", "b", "b::c::Y", "d::g", "e::Z", "m::n::h"].map(String::from).into());
}

/// Checks that the folders of `package` import what the table allows, all of it, and earlier rows only.
fn holds(table: &[(&str, &[&str])], package: &str) {
    let mut found = Edges::new();
    for (file, imports) in files(package) {
        let folder = |file: &str| file.split_once('/').map(|(folder, _)| folder.to_owned());
        if let Some(from) = folder(&file) {
            let others = imports.iter().filter_map(|file| folder(file)).filter(|to| *to != from).collect::<Vec<_>>();
            found.entry(from).or_default().extend(others);
        }
    }
    let allowed: Edges = table
        .iter()
        .map(|(folder, imports)| ((*folder).to_owned(), imports.iter().map(|&name| name.to_owned()).collect()))
        .collect();
    for (row, (folder, imports)) in table.iter().enumerate() {
        for import in *imports {
            let stands = table.iter().position(|(name, _)| name == import);
            assert!(stands.is_some_and(|at| at < row), "{package}: {folder} may not import {import}, a later row");
        }
    }
    assert_eq!(found, allowed, "imports found in {package}, and those that the table allows");
}

/// The files of a package, each with the files that it imports. A file and its child modules count as importing nothing of
/// each other by re-exports.
fn files(package: &str) -> Edges {
    let folder = root().join(package);
    let mut modules = BTreeMap::new();
    let mut open = vec![folder.clone()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => open.push(path),
                false if path.extension().is_some_and(|ending| ending == "rs") => {
                    modules.insert(module_of(path.strip_prefix(&folder).unwrap()), path);
                }
                false => {}
            }
        }
    }
    let name = |path: &PathBuf| path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned();
    let mut edges = Edges::new();
    for (module, path) in modules.iter().filter(|(module, _)| !module.iter().any(|part| part == "tests")) {
        let imports = imports(&fs::read_to_string(path).unwrap(), module);
        let targets = imports.iter().filter_map(|import| {
            let known = (1..=import.len()).rev().find_map(|len| modules.get_key_value(&import[..len]))?;
            (known.0 != module && !module.starts_with(known.0) && !known.0.starts_with(module)).then(|| name(known.1))
        });
        edges.insert(name(path), targets.collect());
    }
    edges
}

fn module_of(file: &Path) -> Vec<String> {
    let mut module: Vec<_> = file.with_extension("").iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if module.last().is_some_and(|last| last == "mod") || ["lib", "main", "build"].contains(&module[0].as_str()) {
        module.pop();
    }
    module
}

/// Paths within the crate that a file names, without its test modules.
fn imports(text: &str, module: &[String]) -> Vec<Vec<String>> {
    let tokens: TokenStream = text.parse().expect("Rust tokens");
    let mut paths = Vec::new();
    walk(&tokens.into_iter().collect::<Vec<_>>(), module, 0, &mut paths);
    paths
}

/// `depth` counts the inline modules around the tokens: `super` leaves these first.
fn walk(tokens: &[TokenTree], module: &[String], depth: usize, paths: &mut Vec<Vec<String>>) {
    let mut at = 0;
    while at < tokens.len() {
        if let TokenTree::Ident(word) = &tokens[at] {
            let word = word.to_string();
            if word == "mod" && matches!(tokens.get(at + 2), Some(TokenTree::Group(_))) {
                let TokenTree::Group(body) = &tokens[at + 2] else { unreachable!() };
                if tokens[at + 1].to_string() != "tests" {
                    walk(&body.stream().into_iter().collect::<Vec<_>>(), module, depth + 1, paths);
                }
                at += 3;
                continue;
            }
            let starts = at < 3 || !separates(&tokens[..at]);
            if ["crate", "super"].contains(&word.as_str()) && starts && separates_after(&tokens[at + 1..]) {
                let (mut base, mut left) = (module.to_vec(), depth);
                if word == "crate" {
                    base.clear();
                } else {
                    leave(&mut base, &mut left);
                }
                at += 3;
                while tokens.get(at).is_some_and(|t| t.to_string() == "super") && separates_after(&tokens[at + 1..]) {
                    leave(&mut base, &mut left);
                    at += 3;
                }
                at += tree(&tokens[at..], base, paths);
                continue;
            }
        }
        if let TokenTree::Group(group) = &tokens[at] {
            walk(&group.stream().into_iter().collect::<Vec<_>>(), module, depth, paths);
        }
        at += 1;
    }
}

fn leave(base: &mut Vec<String>, inline: &mut usize) {
    if *inline > 0 {
        *inline -= 1;
    } else {
        base.pop();
    }
}

/// Reads the rest of a path, or a group of them. Returns the number of its tokens.
fn tree(tokens: &[TokenTree], mut path: Vec<String>, paths: &mut Vec<Vec<String>>) -> usize {
    match tokens.first() {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            let inner: Vec<_> = group.stream().into_iter().collect();
            for part in inner.split(|token| token.to_string() == ",").filter(|part| !part.is_empty()) {
                tree(part, path.clone(), paths);
            }
            1
        }
        Some(TokenTree::Ident(word)) => {
            if word != "self" {
                path.push(word.to_string());
            }
            if separates_after(&tokens[1..]) {
                return 3 + tree(&tokens[3..], path, paths);
            }
            paths.push(path);
            1
        }
        _ => {
            paths.push(path);
            0
        }
    }
}

fn separates(before: &[TokenTree]) -> bool {
    before.len() >= 2 && separates_after(&before[before.len() - 2..])
}

fn separates_after(tokens: &[TokenTree]) -> bool {
    tokens.iter().take(2).filter(|token| token.to_string() == ":").count() == 2
}

/// Files from `from` to `to`, each importing the next.
fn path_between(edges: &Edges, from: &str, to: &str) -> Option<Vec<String>> {
    let mut seen = BTreeSet::from([from.to_owned()]);
    let mut open = vec![vec![from.to_owned()]];
    while let Some(path) = open.pop() {
        for next in edges.get(path.last().unwrap()).into_iter().flatten() {
            if next == to {
                return Some(path);
            }
            if seen.insert(next.clone()) {
                open.push([path.clone(), vec![next.clone()]].concat());
            }
        }
    }
    None
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
