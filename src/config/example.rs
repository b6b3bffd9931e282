//! Annotated TOML: writes a configuration with the comment of every key, and compares two configurations.

use super::wire::{Apply, FIELDS, Field, SECTIONS, Wire};
use draftmill_actors::planner::ledger::Change;
use std::fmt::Write;
use toml::Table;

/// Header of `configs/example.toml`.
pub const EXAMPLE_HEAD: &str = "\
# Every key with its default. Generated from src/config/wire.rs, do not edit:
# UPDATE_EXPECT=1 cargo test --no-default-features --test it example_is_true
# Sizes and times have units: \"2 GiB\", \"30s\". \"auto\" = the value is derived as the comment describes.
# To override a key on the command line: --set section.key=value
# A running service applies a change of a \"live\" key when the file is saved. A \"restart\" key needs a new start.
";

/// Returns the text of `configs/example.toml`.
pub fn example() -> String {
    format!("{EXAMPLE_HEAD}{}", annotated(&Wire::default()))
}

/// Writes the values of `wire` in declaration order, each below its comment. The text reads back as `wire`.
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

/// Returns the keys that differ between two configurations, "restart" keys first.
pub fn differences(old: &Wire, new: &Wire) -> Vec<&'static Field> {
    let (old, new) = (Table::try_from(old).unwrap_or_default(), Table::try_from(new).unwrap_or_default());
    let value = |table: &Table, field: &Field| table.get(field.section).and_then(|keys| keys.get(field.key)).cloned();
    let mut differing: Vec<_> = FIELDS.iter().filter(|field| value(&old, field) != value(&new, field)).collect();
    differing.sort_by_key(|field| field.apply == Apply::Live);
    differing
}

/// Returns the keys that differ between two configurations with both values, "restart" keys first.
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
