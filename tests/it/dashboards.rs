//! Files of `dashboards/`: generated from their source, valid by Grafana's schema, and limited to existing metrics.

mod alerts;
mod build;
mod prometheus;
mod promql;
mod schema;

use draftmill_actors::runtime::metrics::{Kind, TABLE};
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|e| panic!("dashboards/{name}: {e}"))
}

fn dashboard() -> Value {
    serde_json::from_str(&read("draftmill.json")).unwrap()
}

/// Panels with content.
fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"].as_array().unwrap().iter().filter(|panel| panel["type"] != "row")
}

/// Every query of a dashboard with its panel or annotation.
fn queries(dashboard: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of_panels = panels(dashboard).flat_map(|panel| {
        let targets = panel["targets"].as_array().unwrap().iter();
        targets.map(move |target| (text(&panel["title"]), text(&target["expr"])))
    });
    let annotations = dashboard["annotations"]["list"].as_array().unwrap().iter();
    let of_annotations = annotations.map(|one| (text(&one["name"]), text(&one["target"]["expr"])));
    of_panels.chain(of_annotations).collect()
}

/// Stored names of every series in the table.
fn stored() -> BTreeSet<String> {
    let of = |kind: Kind| if kind == Kind::Histogram { &["_bucket", "_sum", "_count"][..] } else { &[""] };
    TABLE.iter().flat_map(|spec| of(spec.kind).iter().map(|suffix| format!("{}{suffix}", spec.name))).collect()
}

/// UPDATE_EXPECT=1 rewrites dashboards/draftmill.json.
#[test]
fn the_dashboard_is_what_its_source_says() {
    let source: build::Source = toml::from_str(&read("draftmill.toml")).unwrap_or_else(|e| panic!("{e}"));
    let text = serde_json::to_string_pretty(&build::dashboard(&source)).unwrap() + "\n";
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::write(path("draftmill.json"), &text).unwrap();
    }
    assert!(
        read("draftmill.json") == text,
        "dashboards/draftmill.json is stale: UPDATE_EXPECT=1 cargo test --no-default-features --test it the_dashboard_is"
    );
}

#[test]
fn the_dashboard_is_right_by_the_schema_of_grafana() {
    let schema: Value = serde_json::from_str(&read("check/dashboard.schema.json")).unwrap();
    let dashboard = dashboard();
    assert_eq!(schema::problems(&schema, &dashboard), Vec::<String>::new());
    // The check refuses an invalid dashboard.
    for (pointer, wrong) in [
        ("/graphTooltip", serde_json::json!(7)),
        ("/panels/1/gridPos/h", "4".into()),
        ("/panels/1/fieldConfig/defaults/thresholds/steps/0/color", Value::Null),
        ("/panels/1/colour", "red".into()),
        ("/templating/list/0/type", "textbox-ish".into()),
    ] {
        let mut broken = dashboard.clone();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        broken.pointer_mut(parent).unwrap()[key] = wrong;
        assert!(!schema::problems(&schema, &broken).is_empty(), "{pointer}");
    }
}

#[test]
fn every_panel_has_a_place_a_unit_thresholds_and_a_description() {
    let dashboard = dashboard();
    let mut taken = BTreeSet::new();
    for panel in panels(&dashboard) {
        let title = panel["title"].as_str().unwrap();
        let defaults = &panel["fieldConfig"]["defaults"];
        assert!(defaults["unit"].as_str().is_some_and(|unit| !unit.is_empty()), "{title}");
        assert!(defaults["thresholds"]["steps"].as_array().is_some_and(|steps| !steps.is_empty()), "{title}");
        assert!(panel["description"].as_str().is_some_and(|text| text.ends_with('.')), "{title}");
        let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        for x in place("x")..place("x") + place("w") {
            for y in place("y")..place("y") + place("h") {
                assert!(x < 24 && taken.insert((x, y)), "{title} lies on another panel");
            }
        }
    }
    let ids: BTreeSet<_> = dashboard["panels"].as_array().unwrap().iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), dashboard["panels"].as_array().unwrap().len());
}

#[test]
fn the_dashboard_shows_every_metric_and_no_unknown_one() {
    let stored = stored();
    let mut seen = BTreeSet::new();
    for (panel, expr) in queries(&dashboard()) {
        let names = promql::metrics(&expr);
        assert!(!names.is_empty(), "{panel}: {expr}");
        for name in names {
            assert!(stored.contains(&name), "{panel}: {name} is no metric of the table");
            seen.insert(name);
        }
        // Each series is limited to the selected run and instance.
        assert_eq!(
            expr.matches("run=\"$run\", instance=~\"$instance\"").count(),
            promql::metrics(&expr).len(),
            "{panel}: {expr}"
        );
    }
    for spec in TABLE.iter().filter(|spec| !NOT_SHOWN.contains(&spec.name)) {
        let read =
            |name: &String| name.strip_prefix(spec.name).is_some_and(|rest| ["", "_sum", "_bucket"].contains(&rest));
        assert!(seen.iter().any(read), "{} is on no panel", spec.name);
    }
}

/// Metrics that are not useful on a dashboard.
const NOT_SHOWN: &[&str] =
    &["process_virtual_memory_bytes", "process_max_fds", "draftmill_runtime_workers", "draftmill_pool_draining"];
