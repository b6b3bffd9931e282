//! Plain words: counts what docs/STYLE.md bans in comments and documents. The counts may only fall.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// Words that a doc comment does not open with.
const OPENINGS: [&str; 9] = ["what", "who", "whoever", "whom", "whether", "how", "of", "where", "why"];

/// Words and phrases with a plainer replacement in docs/STYLE.md.
const BANNED: [&str; 23] = [
    "nobody",
    "whoever",
    "so many",
    "so much",
    "anew",
    "beside",
    "goes on",
    "go on",
    "going on",
    "gone on",
    "lies",
    "is told",
    "are told",
    "tells",
    "held to",
    "by way of",
    "in vain",
    "for good",
    "its like",
    "the like",
    "one's own",
    "a thing",
    "of its own",
];

/// Occurrences that are left. Lower a number when a change removes some.
const OPENINGS_LEFT: usize = 0;
const BANNED_LEFT: usize = 0;

#[test]
fn banned_openings_and_words_only_become_fewer() {
    let (mut openings, mut banned) = (BTreeMap::new(), BTreeMap::new());
    for path in files() {
        let text = fs::read_to_string(root().join(&path)).unwrap();
        let prose =
            if path.extension().is_some_and(|ending| ending == "md") { document(&text) } else { comments(&text) };
        let name = path.display().to_string();
        let opens = prose.iter().filter(|paragraph| opens_banned(paragraph)).count();
        let words: usize = prose.iter().map(|paragraph| banned_words(paragraph)).sum();
        if opens > 0 {
            openings.insert(name.clone(), opens);
        }
        if words > 0 {
            banned.insert(name, words);
        }
    }
    for (what, found, left) in [("openings", openings, OPENINGS_LEFT), ("words", banned, BANNED_LEFT)] {
        let count: usize = found.values().sum();
        assert!(count <= left, "{count} banned {what}, {left} are allowed; see docs/STYLE.md: {found:#?}");
        assert!(count >= left, "{count} banned {what} are left: lower the limit of {left} in tests/it/style.rs");
    }
}

#[test]
fn a_paragraph_is_judged_by_its_words() {
    let text = "/// What waits.\n/// Goes on for good.\n///\n/// A batch lies here, beside\n/// another.\nlet lies = 1; // nobody\n";
    let prose = comments(text);
    assert_eq!(prose.len(), 3, "{prose:?}");
    assert_eq!(prose.iter().filter(|paragraph| opens_banned(paragraph)).count(), 1);
    assert_eq!(prose.iter().map(|paragraph| banned_words(paragraph)).sum::<usize>(), 5);
    assert_eq!(banned_words("`lies` believes besides"), 0);
}

/// Doc comments by paragraph, and plain comments line by line.
fn comments(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut in_doc = false;
    for line in text.lines() {
        let line = line.trim_start();
        let doc = ["/// ", "//! "].iter().find_map(|mark| line.strip_prefix(mark));
        match doc {
            Some(words) if in_doc => {
                let last = found.last_mut().unwrap();
                last.push(' ');
                last.push_str(words);
            }
            Some(words) => found.push(words.to_owned()),
            None => found.extend(line.split_once("// ").map(|(_, words)| words.to_owned())),
        }
        in_doc = doc.is_some();
    }
    found
}

/// Paragraphs of a document, without code blocks.
fn document(text: &str) -> Vec<String> {
    let outside = text.split("```").step_by(2);
    outside
        .flat_map(|part| part.split("\n\n"))
        .map(|part| part.replace('\n', " "))
        .filter(|part| !part.trim().is_empty())
        .collect()
}

fn opens_banned(paragraph: &str) -> bool {
    let first = paragraph.trim_start_matches(['-', '*', '#', ' ']).split_whitespace().next().unwrap_or_default();
    OPENINGS.contains(&first.to_lowercase().trim_end_matches(','))
}

fn banned_words(paragraph: &str) -> usize {
    // Code in backticks is a name and not a word.
    let prose: String = paragraph.split('`').step_by(2).collect::<Vec<_>>().join(" ").to_lowercase();
    let words: Vec<_> =
        prose.split(|c: char| !c.is_alphanumeric() && c != '\'').filter(|word| !word.is_empty()).collect();
    let text = format!(" {} ", words.join(" "));
    BANNED.iter().map(|banned| text.matches(&format!(" {banned} ")).count()).sum()
}

fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open: Vec<PathBuf> =
        ["src", "actors", "torch-ext", "benches", "tests", "docs", "README.md", "ARCHITECTURE.md"]
            .map(PathBuf::from)
            .into();
    while let Some(path) = open.pop() {
        if root().join(&path).is_dir() {
            open.extend(fs::read_dir(root().join(&path)).unwrap().map(|entry| path.join(entry.unwrap().file_name())));
        } else if path.extension().is_some_and(|ending| ending == "rs" || ending == "md")
            && !["docs/STYLE.md", "tests/it/style.rs"].iter().any(|skipped| path == Path::new(skipped))
        {
            found.push(path);
        }
    }
    found
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
