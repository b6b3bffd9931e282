//! Writes a configuration as TOML with the comment of every key.

use super::wire::{Apply, FIELDS, Field, SECTIONS, Wire};
use draftmill_actors::planner::ledger::Change;
use std::fmt::Write;
use toml::Table;

/// Head of `configs/example.toml`.
pub const EXAMPLE_HEAD: &str = "\
# Every key with its default. Generated from src/config/wire.rs, do not edit: UPDATE_EXPECT=1 cargo test example_is_true
# Sizes have units (\"2 GiB\"), and so have times (\"30s\"). \"auto\" means: derived as the comment says.
# On the command line: --set section.key=value
# A running service takes up changes of \"live\" keys when the file is saved; \"restart\" keys hold from the next start.
";

/// The text of `configs/example.toml`.
pub fn example() -> String {
    format!("{EXAMPLE_HEAD}{}", annotated(&Wire::default()))
}

/// The values of `wire` in the order of the declarations, each under its comment. Reading it gives `wire` again.
pub fn annotated(wire: &Wire) -> String {
    let values = Table::try_from(wire).unwrap_or_default();
    let mut text = String::new();
    for (section, doc) in SECTIONS {
        text.push('\n');
        comment(&mut text, doc);
        let _ = writeln!(text, "[{section}]");
        for field in FIELDS.iter().filter(|field| field.section == *section) {
            comment(&mut text, field.doc);
            if let Some(value) = values.get(*section).and_then(|keys| keys.get(field.key)) {
                let _ = writeln!(text, "{} = {value}  # {}", field.key, field.apply);
            }
        }
    }
    text
}

/// The keys in which two configurations differ, those that need a restart first.
pub fn differences(old: &Wire, new: &Wire) -> Vec<&'static Field> {
    let (old, new) = (Table::try_from(old).unwrap_or_default(), Table::try_from(new).unwrap_or_default());
    let value = |table: &Table, field: &Field| table.get(field.section).and_then(|keys| keys.get(field.key)).cloned();
    let mut differing: Vec<_> = FIELDS.iter().filter(|field| value(&old, field) != value(&new, field)).collect();
    differing.sort_by_key(|field| field.apply == Apply::Live);
    differing
}

/// The keys in which two configurations differ, with both values, those that need a restart first.
pub fn changes(old: &Wire, new: &Wire) -> Vec<Change> {
    let tables = [old, new].map(|wire| Table::try_from(wire).unwrap_or_default());
    let value = |table: &Table, field: &Field| {
        let value = table.get(field.section).and_then(|keys| keys.get(field.key));
        value.map_or_else(|| "nothing".into(), ToString::to_string)
    };
    let changed = differences(old, new).into_iter().map(|field| Change {
        key: format!("{}.{}", field.section, field.key),
        old: value(&tables[0], field),
        new: value(&tables[1], field),
    });
    changed.collect()
}

fn comment(text: &mut String, doc: &str) {
    for line in doc.lines() {
        let _ = writeln!(text, "#{line}");
    }
}
