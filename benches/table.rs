//! Results with their limits and whether they are met, as a table and as JSON.

use serde_json::{Map, Value, json};

/// Limit of a result.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    AtLeast(f64),
    Below(f64),
    /// No limit: the result is only reported.
    None,
}

#[derive(Default)]
pub struct Table {
    rows: Vec<(String, f64, Target, String)>,
}

impl Table {
    pub fn row(&mut self, name: &str, value: f64, target: Target, note: String) {
        eprintln!("bench: {name} = {value:.4}");
        self.rows.push((name.to_owned(), value, target, note));
    }

    /// Returns the object of `target/bench.json`: each result by its name, then `targets` with the limits.
    pub fn json(&self, machine: Value, details: Value) -> Value {
        let mut object: Map<String, Value> =
            self.rows.iter().map(|(name, value, ..)| (name.clone(), json!(value))).collect();
        let targets: Map<String, Value> = self
            .rows
            .iter()
            .filter(|row| !matches!(row.2, Target::None))
            .map(|(name, value, target, _)| {
                (name.clone(), json!({ "target": words(*target), "reached": reached(*target, *value) }))
            })
            .collect();
        object.insert("targets".into(), targets.into());
        object.insert("machine".into(), machine);
        object.insert("details".into(), details);
        object.into()
    }

    /// Returns the table in Markdown.
    pub fn text(&self) -> String {
        let mut text =
            String::from("| figure | measured | target | reached | note |\n| --- | ---: | --- | --- | --- |\n");
        for (name, value, target, note) in &self.rows {
            let verdict = match target {
                Target::None => "",
                _ if reached(*target, *value) => "yes",
                _ => "**no**",
            };
            text += &format!("| `{name}` | {} | {} | {verdict} | {note} |\n", number(*value), words(*target));
        }
        text
    }
}

fn reached(target: Target, value: f64) -> bool {
    match target {
        Target::AtLeast(least) => value >= least,
        Target::Below(limit) => value < limit,
        Target::None => true,
    }
}

fn words(target: Target) -> String {
    match target {
        Target::AtLeast(least) => format!("at least {}", number(least)),
        Target::Below(limit) => format!("below {}", number(limit)),
        Target::None => String::new(),
    }
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "-".to_owned()
    } else if value.abs() >= 100.0 {
        format!("{value:.0}")
    } else if value.abs() >= 10.0 {
        format!("{value:.1}")
    } else if value != 0.0 && value.abs() < 1e-3 {
        format!("{value:.1e}")
    } else {
        format!("{value:.4}").trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}
