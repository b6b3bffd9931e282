//! Reads TOML text and `--set` overrides into the wire types, and collects every mistake.

use super::{
    problem::{Problem, Problems},
    values::ByteSize,
    wire::{FIELDS, SECTIONS, Wire},
};
use crate::common::fs::open_input;
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    io::{self, Read},
    path::Path,
};
use toml::{
    Spanned, Table, Value,
    de::{DeTable, DeValue, ValueDeserializer},
};

/// Keys that have a new name: section, old key, new key.
const RENAMED_KEYS: [(&str, &str, &str); 4] = [
    ("pool", "order", "draw_policy"),
    ("drafter", "start", "init_method"),
    ("drafter", "init", "init_from"),
    ("drafter", "exchange", "collectives"),
];

/// Values that have a new name: section, current key, old value, new value.
const RENAMED_VALUES: [(&str, &str, &str, &str); 2] =
    [("drafter", "init_method", "fitted", "least-squares"), ("drafter", "collectives", "copies", "copy")];

/// Maximum length of a configuration file. All keys with their comments take 2 % of it.
const MAX_FILE: u64 = 1 << 20;

/// Wire values with the file, line or override that sets each of them.
#[derive(Clone, Debug, Default)]
pub struct Written {
    pub wire: Wire,
    /// Name of the file, for messages.
    file: String,
    /// Origin of each written key (`section.key`). Absent keys have their default.
    origins: BTreeMap<String, Origin>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Line(usize),
    Set,
}

impl Written {
    /// Returns a problem with the value of `key` (`section.key`).
    pub fn problem(&self, key: &str, message: impl Into<String>, remedy: impl Into<String>) -> Problem {
        let value = key.split_once('.').and_then(|(section, key)| {
            Table::try_from(&self.wire).ok()?.get(section)?.get(key).map(ToString::to_string)
        });
        self.problem_with(key, value.unwrap_or_default(), message, remedy)
    }

    /// Resets these keys to their defaults.
    pub(super) fn reset<'a>(&mut self, keys: impl Iterator<Item = &'a str>) {
        let Ok(mut table) = Table::try_from(&self.wire) else { return };
        for (section, key) in keys.filter_map(|key| key.split_once('.')) {
            if let (Some(entries), Some(value)) =
                (table.get_mut(section).and_then(Value::as_table_mut), default_of(section, key))
            {
                entries.insert(key.into(), value);
            }
        }
        self.wire = Wire::deserialize(table).unwrap_or_default();
    }

    fn problem_with(
        &self,
        key: &str,
        value: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Problem {
        let (file, line) = match self.origins.get(key) {
            Some(Origin::Line(line)) => (self.file.clone(), Some(*line)),
            Some(Origin::Set) => ("--set".into(), None),
            None => ("default".into(), None),
        };
        Problem { file, line, key: key.into(), value: value.into(), message: message.into(), remedy: remedy.into() }
    }
}

/// Reads a file, if one is given, and applies the overrides.
///
/// Returns all readable values next to the problems, so that the caller can continue the check.
pub fn read_file(file: Option<&Path>, sets: &[String]) -> (Written, Problems) {
    let Some(path) = file else { return read("", "", sets) };
    let name = path.display().to_string();
    match read_text(path) {
        Ok(text) => read(&text, &name, sets),
        Err(error) => {
            let (written, mut problems) = read("", &name, sets);
            problems.0.insert(
                0,
                Problem {
                    file: name,
                    line: None,
                    key: String::new(),
                    value: String::new(),
                    message: format!("the configuration cannot be read: {error}"),
                    remedy: "pass a TOML file with --config; configs/example.toml lists every key".into(),
                },
            );
            (written, problems)
        }
    }
}

/// Reads a configuration file as text.
///
/// # Errors
/// If the file cannot be read, or is longer than 1 MiB: parsing it and listing its mistakes would take too long.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let length = open_input(path)?.take(MAX_FILE + 1).read_to_string(&mut text)? as u64;
    if length > MAX_FILE {
        return Err(io::Error::other(format!("it is longer than {}", ByteSize(MAX_FILE))));
    }
    Ok(text)
}

/// Reads TOML text named `file` and applies the overrides.
pub fn read(text: &str, file: &str, sets: &[String]) -> (Written, Problems) {
    let mut written = Written { file: file.into(), ..Written::default() };
    let mut problems = Vec::new();
    let mut table = parse(text, &mut written, &mut problems);
    for set in sets {
        if let Err(message) = apply_set(set, &mut table, &mut written) {
            problems.push(Problem {
                file: "--set".into(),
                line: None,
                key: set.into(),
                value: String::new(),
                message: message.into(),
                remedy: "write --set section.key=value, for example --set run.seed=7".into(),
            });
        }
    }
    let clean = remove_unreadable(table, &written, &mut problems);
    match Wire::deserialize(clean) {
        Ok(wire) => written.wire = wire,
        Err(error) => problems.push(written.problem_with("", "", error.message(), "")),
    }
    (written, Problems(problems))
}

/// Parses the text, records the line of every key, and adds a problem for every syntax error.
fn parse(text: &str, written: &mut Written, problems: &mut Vec<Problem>) -> Table {
    let line_of = |offset: usize| text.as_bytes().iter().take(offset).filter(|&&byte| byte == b'\n').count() + 1;
    let (spanned, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        problems.push(Problem {
            file: written.file.clone(),
            line: error.span().map(|span| line_of(span.start)),
            key: String::new(),
            value: String::new(),
            message: format!("this is not TOML: {}", error.message().replace('\n', ", ")),
            remedy: "compare with configs/example.toml".into(),
        });
    }
    let mut table = Table::new();
    for (section, value) in spanned.into_inner() {
        let name = section.get_ref().to_string();
        written.origins.insert(name.clone(), Origin::Line(line_of(section.span().start)));
        if value.get_ref().as_table().is_none() {
            let line = written.origins[&name];
            take(name.clone(), &name, line, value, &mut table, written, problems);
            continue;
        }
        let DeValue::Table(entries) = value.into_inner() else { continue };
        let mut keys = Table::new();
        for (key, value) in entries {
            let (path, line) = (format!("{name}.{}", key.get_ref()), Origin::Line(line_of(key.span().start)));
            written.origins.insert(path.clone(), line);
            take(key.get_ref().to_string(), &path, line, value, &mut keys, written, problems);
        }
        table.insert(name, Value::Table(keys));
    }
    if errors.is_empty() { table } else { Table::new() }
}

/// Reads one value into `table`. A value that TOML can write and no type can hold, such as 1e400, is a problem of its key.
fn take(
    key: String,
    path: &str,
    origin: Origin,
    value: Spanned<DeValue<'_>>,
    table: &mut Table,
    written: &Written,
    problems: &mut Vec<Problem>,
) {
    let text = value.get_ref().as_integer().map(ToString::to_string);
    let text = text.or_else(|| value.get_ref().as_float().map(ToString::to_string)).unwrap_or_default();
    match Value::deserialize(ValueDeserializer::from(value)) {
        Ok(value) => drop(table.insert(key, value)),
        Err(error) => {
            let line = match origin {
                Origin::Line(line) => Some(line),
                Origin::Set => None,
            };
            problems.push(Problem {
                file: written.file.clone(),
                line,
                key: path.into(),
                value: text,
                message: format!("the value is beyond the range of its type: {}", error.message().replace('\n', ", ")),
                remedy: "write a number between -9223372036854775808 and 9223372036854775807, or a finite decimal"
                    .into(),
            });
        }
    }
}

/// Sets `section.key=value` in the table. The value is TOML. Other text is a string, and a single value for a list key is
/// a list of one.
fn apply_set(set: &str, table: &mut Table, written: &mut Written) -> Result<(), &'static str> {
    let (path, text) = set.split_once('=').ok_or("there is no \"=\" in it")?;
    let (section, key) = path.trim().split_once('.').ok_or("the key has no section")?;
    let text = text.trim();
    let parsed = toml::from_str::<Table>(&format!("value = {text}")).ok().filter(|parsed| parsed.len() == 1);
    let value = parsed.and_then(|mut parsed| parsed.remove("value")).unwrap_or_else(|| Value::String(text.into()));
    let value = match default_of(section, key) {
        Some(Value::Array(_)) if !value.is_array() => Value::Array(vec![value]),
        _ => value,
    };
    let entry = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
    let entry = entry.as_table_mut().ok_or("the file has a value with the name of the section")?;
    entry.insert(key.into(), value);
    written.origins.insert(path.trim().into(), Origin::Set);
    written.origins.entry(section.into()).or_insert(Origin::Set);
    Ok(())
}

/// Removes unknown keys and values of a wrong type from the table, and adds a problem for each.
fn remove_unreadable(table: Table, written: &Written, problems: &mut Vec<Problem>) -> Table {
    let mut clean = Table::new();
    for (section, value) in table {
        if !SECTIONS.iter().any(|(name, _)| *name == section) {
            problems.push(unknown_section(&section, &value, written));
            continue;
        }
        let Value::Table(entries) = value else {
            let message = format!("\"{section}\" is a section, not a key");
            problems.push(written.problem_with(&section, value.to_string(), message, format!("write [{section}]")));
            continue;
        };
        let mut kept = Table::new();
        for (key, value) in entries {
            let path = format!("{section}.{key}");
            if let Some(problem) = renamed(&section, &key, &value, written) {
                problems.push(problem);
                continue;
            }
            if !FIELDS.iter().any(|field| field.section == section && field.key == key) {
                let remedy = suggest_key(&section, &key);
                problems.push(written.problem_with(&path, value.to_string(), "there is no such key", remedy));
                continue;
            }
            let alone = Table::from_iter([(key.clone(), value.clone())]);
            match Wire::deserialize(Table::from_iter([(section.clone(), Value::Table(alone))])) {
                Ok(_) => drop(kept.insert(key, value)),
                Err(error) => {
                    let remedy = default_of(&section, &key).map(|value| format!("the default is {value}"));
                    let message = in_words(&error.message().trim().replace('\n', ", "));
                    problems.push(written.problem_with(&path, value.to_string(), message, remedy.unwrap_or_default()));
                }
            }
        }
        clean.insert(section, Value::Table(kept));
    }
    clean
}

/// Returns the problem of an old key or an old value. The remedy contains the new name.
fn renamed(section: &str, key: &str, value: &Value, written: &Written) -> Option<Problem> {
    let old_key = RENAMED_KEYS.iter().find(|(of, old, _)| *of == section && *old == key);
    let new_key = old_key.map_or(key, |(_, _, new)| new);
    let is_old =
        |(of, at, old, _): &&(&str, &str, &str, &str)| *of == section && *at == new_key && value.as_str() == Some(old);
    let old_value = RENAMED_VALUES.iter().find(is_old);
    let new_value = old_value.map_or_else(|| value.clone(), |(_, _, _, new)| Value::String((*new).into()));
    let path = format!("{section}.{key}");
    let message = match (old_key, old_value) {
        (None, None) => return None,
        (Some(_), _) => format!("{path} is now {section}.{new_key}"),
        (None, Some(_)) => format!("{value} is now {new_value}"),
    };
    let remedy = match written.origins.get(&path) {
        Some(Origin::Set) => match new_value.as_str() {
            Some(word) => format!("write --set {section}.{new_key}={word}"),
            None => format!("write --set '{section}.{new_key}={new_value}'"),
        },
        _ => format!("write {new_key} = {new_value} under [{section}]"),
    };
    Some(written.problem_with(&path, value.to_string(), message, remedy))
}

/// Replaces serde's type names with plain words.
fn in_words(message: &str) -> String {
    let words = [
        ("u16", "a whole number of at least 0"),
        ("u32", "a whole number of at least 0"),
        ("u64", "a whole number of at least 0"),
        ("f64", "a number"),
        ("a sequence", "a list, for example [\"a\", \"b\"]"),
        ("unknown variant", "there is no choice"),
    ];
    words.iter().fold(message.to_owned(), |text, (word, plain)| text.replace(word, plain))
}

fn default_of(section: &str, key: &str) -> Option<Value> {
    Table::try_from(Wire::default()).ok()?.get(section)?.get(key).cloned()
}

fn unknown_section(name: &str, value: &Value, written: &Written) -> Problem {
    let names = SECTIONS.iter().map(|(name, _)| *name);
    if value.is_table() {
        let remedy = match closest(name, names.clone()) {
            Some(close) => format!("did you mean [{close}]?"),
            None => format!("the sections are {}", names.collect::<Vec<_>>().join(", ")),
        };
        return written.problem_with(name, "", "there is no such section", remedy);
    }
    let message = "a key must be in a section";
    let remedy = match FIELDS.iter().find(|field| field.key == name) {
        Some(field) => format!("put it under [{}]", field.section),
        None => "see configs/example.toml".into(),
    };
    written.problem_with(name, value.to_string(), message, remedy)
}

/// Suggests a key: one of the section with a similar spelling, or the same name in another section.
fn suggest_key(section: &str, key: &str) -> String {
    let keys = || FIELDS.iter().filter(move |field| field.section == section).map(|field| field.key);
    if let Some(close) = closest(key, keys()) {
        return format!("did you mean {section}.{close}?");
    }
    if let Some(field) = FIELDS.iter().find(|field| field.key == key) {
        return format!("did you mean {}.{}?", field.section, field.key);
    }
    format!("the keys of [{section}] are {}", keys().collect::<Vec<_>>().join(", "))
}

/// Returns the candidate with the smallest edit distance, if that is at most a third of the length.
fn closest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (edits(word, candidate), candidate))
        .filter(|(edits, candidate)| *edits * 3 <= candidate.len().max(word.len()))
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance in bytes.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests;
