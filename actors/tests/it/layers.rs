//! Direction of the imports between the folders of `actors/src`.

use crate::imports::{Scan, cycle, edges};
use std::{collections::BTreeSet, path::Path};

/// Folders with the folders that they may import, lowest first.
const ALLOWED: &[(&str, &[&str])] = &[
    ("runtime", &[]),
    ("messages", &[]),
    ("pool", &["messages", "runtime"]),
    ("dispatcher", &["messages", "pool", "runtime"]),
    ("target", &["dispatcher", "messages", "pool", "runtime"]),
    ("planner", &["dispatcher", "messages", "pool", "runtime"]),
    ("trainer", &["messages", "planner", "runtime"]),
    ("drafter", &["messages", "pool", "runtime", "trainer"]),
    ("pipeline", &["dispatcher", "drafter", "messages", "planner", "pool", "runtime", "target", "trainer"]),
    ("simulated", &["messages", "pipeline", "planner", "runtime"]),
    ("lib", &[]),
];

fn found() -> BTreeSet<(String, String)> {
    edges(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
}

#[test]
fn folders_import_only_what_the_table_allows_and_without_a_cycle() {
    let found = found();
    let allowed: BTreeSet<(String, String)> =
        ALLOWED.iter().flat_map(|(from, to)| to.iter().map(|to| ((*from).to_owned(), (*to).to_owned()))).collect();
    let new: Vec<_> = found.difference(&allowed).collect();
    assert!(new.is_empty(), "imports that the table does not allow: {new:?}");
    let unused: Vec<_> = allowed.difference(&found).collect();
    assert!(unused.is_empty(), "the table allows imports that do not exist: {unused:?}");
    assert_eq!(cycle(&found), None);
}

#[test]
fn every_folder_is_in_the_table() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in std::fs::read_dir(src).unwrap() {
        let name = entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned();
        assert!(ALLOWED.iter().any(|(folder, _)| *folder == name), "{name} is not in the table");
    }
}

#[test]
fn paths_are_found_in_use_trees_expressions_and_macros_but_not_in_tests() {
    let text = r#"
        //! crate::in_a_comment
        use crate::{a::{self, A}, b::*, c::d::{D, E as F}, invariant};
        use super::{sibling::S, super::e};
        pub(crate) fn f(x: crate::g::G<crate::h::H>) -> self::inner::I {
            self.method();
            super::super::i::j(x, "crate::in_a_text", std::mem::take);
            $crate::k::l!(crate::m::N)
        }
        mod inner { use super::super::super::o; }
        #[macro_export]
        macro_rules! exported { () => {}; }
        #[cfg(test)]
        pub mod tests;
        mod tests { use crate::in_tests; }
    "#;
    let scan = Scan::of(text, vec!["top".into(), "file".into()]).unwrap();
    let paths: Vec<String> = scan.paths.iter().map(|path| path.join("::")).collect();
    let expected = [
        "a",
        "a::A",
        "b",
        "c::d::D",
        "c::d::E",
        "e",
        "g::G",
        "h::H",
        "i::j",
        "invariant",
        "k::l",
        "m::N",
        "o",
        "top::file::inner::I",
        "top::sibling::S",
    ];
    assert_eq!(paths, expected);
    assert_eq!(scan.macros, ["exported"]);
    assert_eq!(scan.tests, [["top", "file", "tests"]]);
}

#[test]
fn a_cycle_is_found() {
    let edges = |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    assert_eq!(cycle(&edges(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    assert_eq!(
        cycle(&edges(&[("x", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "y")])).map(|path| path.len()),
        Some(4)
    );
}
