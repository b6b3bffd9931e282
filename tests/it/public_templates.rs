//! Public chat templates against transformers: text and supervised ranges of each conversation, or a reason that names the
//! difference. tests/data/templates/public.py writes the table and states its format.

use draftmill::{
    common::hash::sha256,
    data::{
        Change,
        chat::{ChatError, ChatTemplate, Rendered},
        row::{ParsedRow, RowNotes, RowPolicy, parse},
    },
};
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

/// Folder of the templates, or `None` outside of CI if the variable is not set.
fn folder() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("DRAFTMILL_TEMPLATES") {
        return Some(folder.into());
    }
    let how = "DRAFTMILL_TEMPLATES does not name the folder of public templates: run `make test`, which fetches them, or set \
               it to what `python3 scripts/fetch.py templates` prints";
    assert!(std::env::var_os("CI").is_none(), "{how}");
    eprintln!("not tested: {how}");
    None
}

fn read(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// Expectation of a template and a conversation.
struct Expected<'a> {
    /// First digits of the text's SHA-256.
    hash: &'a str,
    /// Supervised ranges; `None` if none is certain.
    spans: Option<Vec<Range<usize>>>,
    hidden: bool,
    /// Ranges inside `{% generation %}`, for templates that have it.
    marked: Option<Vec<Range<usize>>>,
}

fn ranges(text: &str) -> Vec<Range<usize>> {
    let range = |part: &str| {
        let (start, end) = part.split_once('-').unwrap();
        start.parse().unwrap()..end.parse().unwrap()
    };
    text.split(',').filter(|part| *part != "none").map(range).collect()
}

/// Expectation of a row of the table; `None` if transformers refuses the conversation.
fn expected(row: &str) -> Option<Expected<'_>> {
    if row.starts_with("raises:") {
        return None;
    }
    let mut fields = row.split(' ');
    let hash = fields.next().unwrap();
    let spans = fields.next().unwrap();
    let (hidden, spans) = spans.strip_prefix("hidden:").map_or((false, spans), |spans| (true, spans));
    let spans = (spans != "?").then(|| ranges(spans));
    Some(Expected { hash, spans, hidden, marked: fields.next().map(ranges) })
}

/// Rendering of a row, or the reason of its rejection.
fn rendered(template: &ChatTemplate, row: &str) -> Result<Rendered, &'static str> {
    let mut notes = RowNotes::default();
    let parsed =
        parse(row.as_bytes(), false, RowPolicy::default(), &mut notes).map_err(|reject| reject.reason.word())?;
    let ParsedRow::Chat(conversation) = parsed else { panic!("{row} is a conversation") };
    template.render(&conversation).map_err(|error| match error {
        ChatError::Refused(_) => "refused",
        ChatError::Uncertain { .. } => "uncertain",
        ChatError::UnopenedThinking { .. } => "unopened_thinking",
        other => panic!("{row}: {other}"),
    })
}

/// Result of a pair, as the summary names it, or the difference that no reason names.
fn judged(expected: Option<&Expected<'_>>, got: Result<&Rendered, &'static str>) -> Result<String, String> {
    let (expected, got) = match (expected, got) {
        (None, Err(_)) => return Ok("refused by both".into()),
        (Some(expected), Err("uncertain")) if expected.spans.is_none() => return Ok("uncertain for both".into()),
        (Some(_), Err(reason)) => return Ok(format!("rejected: {reason}")),
        (None, Ok(got)) => {
            // Transformers hands over tool arguments as they are; the template takes them in the other form only.
            let fitted = [Change::ArgumentsParsed, Change::ArgumentsText, Change::RawThinking];
            let change = fitted.iter().find(|change| got.notes.changes.contains(change));
            return change.map(|change| format!("only transformers refuses: {}", change.word())).ok_or_else(|| {
                format!("transformers refuses, and the text is {:?}", got.text.chars().take(200).collect::<String>())
            });
        }
        (Some(expected), Ok(got)) => (expected, got),
    };
    if !got.notes.hidden.is_empty() {
        return Ok("rejected: hidden_by_template".into());
    }
    if sha256(&got.text)[..16] != *expected.hash {
        let named = [Change::ArgumentsParsed, Change::ArgumentsText, Change::RawThinking];
        let change = named.iter().find(|change| got.notes.changes.contains(change));
        return change.map(|change| format!("changed: {}", change.word())).ok_or_else(|| "another text".into());
    }
    let supervised = merged(&got.supervised);
    match &expected.spans {
        // The rule of the table does not part a raw completion.
        None if got.notes.changes.contains(&Change::RawThinking) => Ok("changed: thinking_split".into()),
        None => Err(format!("no range is certain, and {supervised:?} are supervised")),
        Some(spans) if *spans != supervised => Err(format!("{supervised:?} instead of {spans:?}")),
        Some(_) if expected.hidden && got.notes.changes.contains(&Change::EarlierReasoning) => {
            Ok("equal, earlier reasoning hidden".into())
        }
        Some(_) if expected.hidden => Err("a field is hidden, and no reason names it".into()),
        Some(_) => Ok("equal".into()),
    }
}

/// Ranges with those that touch as one, as in the table.
fn merged(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => out.push(range.clone()),
        }
    }
    out
}

/// Relation of supervised ranges to those inside `{% generation %}`.
fn inclusion(spans: &[Range<usize>], marked: &[Range<usize>], text: &str) -> &'static str {
    let inside = |at: usize| marked.iter().any(|range| range.contains(&at));
    let outside: Vec<usize> = spans.iter().cloned().flatten().filter(|&at| !inside(at)).collect();
    let ends = |&at: &usize| {
        spans.iter().any(|span| {
            let last =
                marked.iter().filter(|range| range.start < span.end && span.start < range.end).map(|r| r.end).max();
            span.contains(&at) && last.is_some_and(|last| at >= last)
        })
    };
    match () {
        () if outside.is_empty() => "inside",
        () if outside.iter().all(ends) => "inside but for the end token",
        () if outside.iter().all(|&at| text.as_bytes()[at].is_ascii_whitespace()) => "inside but for white space",
        () => "outside",
    }
}

/// Numbers of pairs by their result, and of those with `{% generation %}` by their relation to it.
#[derive(Default)]
struct Summary {
    pairs: BTreeMap<String, usize>,
    marked: BTreeMap<&'static str, usize>,
    differences: String,
}

fn compared(folder: &Path, table: &Path) -> Summary {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates");
    let conversations = read(&data.join("conversations.json"));
    let table = read(table);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let (bos, eos) = (text(&table["bos"]), text(&table["eos"]));
    let cases: Vec<String> = table["cases"].as_array().unwrap().iter().map(text).collect();
    let rows: Map<String, Value> = conversations.as_object().unwrap().clone();
    assert_eq!(cases.len(), rows.len());
    let mut summary = Summary::default();
    for entry in table["templates"].as_array().unwrap() {
        let name = text(&entry["name"]);
        let file = folder.join(format!("{name}.jinja"));
        let source = fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}; fetch the templates again", file.display()));
        assert_eq!(sha256(&source), text(&entry["sha256"]), "{} is another template", file.display());
        let end = Some(text(&entry["end"])).filter(|end| !end.is_empty());
        let template =
            ChatTemplate::from_text(std::str::from_utf8(&source).unwrap(), &bos, &eos, end.into_iter().collect());
        for (case, row) in cases.iter().zip(entry["rows"].as_array().unwrap()) {
            let expected = expected(row.as_str().unwrap());
            let got = match &template {
                Ok(template) => rendered(template, &rows[case].to_string()),
                Err(_) => Err("template"),
            };
            let result = judged(expected.as_ref(), got.as_ref().map_err(|reason| *reason));
            if let (Ok(result), Some(marked), Ok(got)) = (&result, expected.and_then(|e| e.marked), &got)
                && result.starts_with("equal")
            {
                *summary.marked.entry(inclusion(&got.supervised, &marked, &got.text)).or_default() += 1;
            }
            match result {
                Ok(result) => *summary.pairs.entry(result).or_default() += 1,
                Err(difference) => writeln!(summary.differences, "{name}, {case}: {difference}").unwrap(),
            }
        }
    }
    summary
}

#[test]
fn public_templates_render_and_supervise_as_transformers() {
    let Some(folder) = folder() else { return };
    let own = std::env::var_os("DRAFTMILL_TEMPLATES_TABLE");
    let table = own
        .clone()
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates/public.json"), PathBuf::from);
    let summary = compared(&folder, &table);
    println!("{:#?}\n{:#?}", summary.pairs, summary.marked);
    let number = summary.differences.lines().count();
    assert_eq!(summary.differences, "", "{number} pairs differ without a reason");
    if own.is_some() {
        return;
    }
    let pairs: Vec<_> = summary.pairs.iter().map(|(result, count)| (result.as_str(), *count)).collect();
    assert_eq!(pairs, PAIRS);
    assert_eq!(pairs.iter().map(|(_, count)| count).sum::<usize>(), 184 * 26);
    assert_eq!(summary.marked.into_iter().collect::<Vec<_>>(), MARKED);
}

/// Results of all pairs. Any change of a number is a change of what people's data become.
const PAIRS: [(&str, usize); 9] = [
    ("changed: thinking_split", 26),
    ("changed: tool_arguments_parsed", 21),
    ("equal", 3496),
    ("only transformers refuses: tool_arguments_as_text", 5),
    ("only transformers refuses: tool_arguments_parsed", 33),
    ("refused by both", 219),
    ("rejected: hidden_by_template", 563),
    ("rejected: unopened_thinking", 134),
    ("uncertain for both", 287),
];
/// Results of the equal pairs whose template has `{% generation %}`.
const MARKED: [(&str, usize); 2] = [("inside", 681), ("inside but for the end token", 1)];
