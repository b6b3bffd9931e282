//! Alerts: limited to existing metrics, each with tests for "fires" and "silent", and with a section in the runbook.

use super::{promql, read, stored};
use std::collections::BTreeMap;

/// Rule of `alerts.yml`, reduced to the fields under test.
#[derive(Debug, Default)]
struct Rule {
    /// "alert" or "record".
    kind: String,
    name: String,
    keys: BTreeMap<String, String>,
}

/// Reads the file's style: a key and its value on one line, or the value folded below.
fn rules() -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    let mut folded: Option<String> = None;
    for line in read("alerts.yml").lines() {
        let text = line.trim();
        let begins = text.strip_prefix("- alert: ").map(|name| ("alert", name));
        if let Some((kind, name)) = begins.or(text.strip_prefix("- record: ").map(|name| ("record", name))) {
            rules.push(Rule { kind: kind.into(), name: name.into(), keys: BTreeMap::new() });
            folded = None;
            continue;
        }
        let Some(rule) = rules.last_mut() else { continue };
        match text.split_once(": ") {
            Some(("expr", ">-")) => folded = Some("expr".into()),
            Some((key @ ("expr" | "for" | "labels" | "summary" | "description" | "runbook"), value)) => {
                rule.keys.insert(key.into(), value.into());
                folded = None;
            }
            _ => {
                if let Some(key) = folded.as_ref().filter(|_| !text.is_empty() && text != "annotations:") {
                    *rule.keys.entry(key.clone()).or_default() += &format!(" {text}");
                }
            }
        }
    }
    rules
}

#[test]
fn every_rule_is_of_metrics_that_exist() {
    let rules = rules();
    let mut known = stored();
    known.insert("up".into());
    known.extend(rules.iter().filter(|rule| rule.kind == "record").map(|rule| rule.name.clone()));
    assert!(rules.len() > 15, "{rules:?}");
    for rule in &rules {
        let names = promql::metrics(&rule.keys["expr"]);
        assert!(!names.is_empty(), "{rule:?}");
        for name in names {
            assert!(known.contains(&name), "{}: there is no {name}", rule.name);
        }
    }
}

#[test]
fn every_alert_says_what_why_and_what_to_do_and_is_tested_both_ways() {
    let (runbook, tests) = (read("../docs/troubleshooting.md"), read("alerts_test.yml"));
    for alert in rules().iter().filter(|rule| rule.kind == "alert") {
        let name = &alert.name;
        for key in ["labels", "summary", "description", "runbook"] {
            assert!(alert.keys.contains_key(key), "{name} has no {key}");
        }
        assert_eq!(alert.keys["runbook"], format!("docs/troubleshooting.md#{}", name.to_lowercase()));
        assert!(runbook.contains(&format!("\n### {name}\n")), "{name} is not in docs/troubleshooting.md");
        assert!(alert.keys["labels"].contains("severity: "), "{name}");
        // The two styles of the file: one for "silent", one for "fires".
        let silent = tests.matches(&format!("- {{ alertname: {name}, eval_time: ")).count();
        let fires = tests.matches(&format!("- alertname: {name}\n")).count();
        assert!(silent >= 3 && fires >= 1, "{name}: {silent} times silent, {fires} times not");
    }
}
