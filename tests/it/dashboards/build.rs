//! Builds the Grafana dashboard from its source `dashboards/draftmill.toml`.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Selector of the chosen run and instance in a query.
const CHOSEN: &str = r#"run="$run", instance=~"$instance""#;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    pub row: Vec<Row>,
    pub annotation: Vec<Annotation>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    title: String,
    panel: Vec<Panel>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Panel {
    title: String,
    kind: Kind,
    width: u64,
    height: u64,
    unit: String,
    thresholds: BTreeMap<String, String>,
    description: String,
    queries: Vec<Query>,
    decimals: Option<u64>,
    min: Option<f64>,
    max: Option<f64>,
    /// Minimum for the upper end of the axis.
    reach: Option<f64>,
    /// Text instead of a value.
    #[serde(default)]
    text: BTreeMap<String, String>,
    /// Text if there is no value.
    none: Option<String>,
    /// Stat panels: "name" shows the name instead of the value.
    show: Option<String>,
    /// Stat panels: a small graph of the past behind the value.
    #[serde(default)]
    spark: bool,
    /// Stat panels: the whole panel has the colour of the threshold.
    #[serde(default)]
    background: bool,
    /// Colours by legend, equal for the same object on several panels.
    #[serde(default)]
    colors: BTreeMap<String, String>,
    /// Draws the thresholds as lines.
    #[serde(default)]
    mark_thresholds: bool,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Stat,
    Bars,
    Lines,
    Area,
    Percent,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Query {
    expr: String,
    #[serde(default)]
    legend: String,
    /// Limit: dashed, and never stacked on other series.
    #[serde(default)]
    dashed: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Annotation {
    name: String,
    expr: String,
    text: String,
    color: String,
    /// The value is the time of the event in milliseconds; otherwise an event is any time with a value.
    #[serde(default)]
    value_is_time: bool,
}

/// Returns the whole dashboard as Grafana imports it.
pub fn dashboard(source: &Source) -> Value {
    let mut panels = Vec::new();
    let mut y = 0;
    for row in &source.row {
        let id = panels.len() + 1;
        let place = json!({"h": 1, "w": 24, "x": 0, "y": y});
        panels.push(json!({
            "id": id, "type": "row", "title": row.title, "collapsed": false, "panels": [], "gridPos": place
        }));
        y += 1;
        // The next free position of the line, its height, and the width and height of the last column's content.
        let (mut x, mut line, mut column) = (0, 0, (0, 0));
        for panel in &row.panel {
            let below = column.0 == panel.width && column.1 + panel.height <= line;
            if !below && x + panel.width > 24 {
                (x, y, line) = (0, y + line, 0);
            }
            column = if below { column } else { (panel.width, 0) };
            x += if below { 0 } else { panel.width };
            let place = json!({"h": panel.height, "w": panel.width, "x": x - panel.width, "y": y + column.1});
            panels.push(panel.json(panels.len() + 1, place));
            column.1 += panel.height;
            line = line.max(column.1);
        }
        y += line;
    }
    let annotations: Vec<_> = source.annotation.iter().map(Annotation::json).collect();
    json!({
        "uid": "draftmill",
        "title": "Draftmill",
        "description": "A run of Draftmill: is it healthy, how fast is it, and what limits it.",
        "tags": ["draftmill"],
        "schemaVersion": 39,
        "version": 1,
        "editable": true,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "links": [],
        "templating": {"list": variables()},
        "annotations": {"list": annotations},
        "panels": panels,
    })
}

fn data_source() -> Value {
    json!({"type": "prometheus", "uid": "${datasource}"})
}

fn variables() -> Value {
    let of_prometheus = |name: &str, label: &str, query: &str, several: bool| {
        json!({
            "name": name, "label": label, "type": "query", "datasource": data_source(),
            "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "regex": "", "hide": 0,
            "multi": several, "includeAll": several,
        })
    };
    json!([
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1, "regex": "", "hide": 0},
        of_prometheus("run", "Run", "label_values(draftmill_build_info, run)", false),
        of_prometheus("instance", "Instance", r#"label_values(draftmill_build_info{run="$run"}, instance)"#, true),
    ])
}

fn chosen(expr: &str) -> String {
    let words: Vec<_> = expr.split_whitespace().collect();
    words.join(" ").replace("{@", &format!("{{{CHOSEN}"))
}

impl Annotation {
    fn json(&self) -> Value {
        json!({
            "name": self.name, "enable": true, "hide": false, "iconColor": self.color, "datasource": data_source(),
            "titleFormat": self.name, "textFormat": self.text, "useValueForTime": self.value_is_time,
            "target": {"expr": chosen(&self.expr), "refId": "Anno", "limit": 100, "matchAny": false, "tags": [], "type": "tags"},
        })
    }
}

impl Panel {
    fn json(&self, id: usize, place: Value) -> Value {
        let (kind, options) = match self.kind {
            Kind::Stat => ("stat", self.stat()),
            Kind::Bars => (
                "bargauge",
                json!({
                    "displayMode": "basic", "orientation": "horizontal", "reduceOptions": last(), "showUnfilled": true,
                    "valueMode": "color", "namePlacement": "left", "minVizHeight": 10, "minVizWidth": 8,
                    "sizing": "auto", "maxVizHeight": 40,
                }),
            ),
            Kind::Lines | Kind::Area | Kind::Percent => (
                "timeseries",
                json!({
                    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": []},
                    "tooltip": {"mode": "multi", "sort": "desc"},
                }),
            ),
        };
        json!({
            "id": id, "type": kind, "title": self.title, "description": self.description, "gridPos": place,
            "datasource": data_source(), "fieldConfig": {"defaults": self.defaults(), "overrides": self.overrides()},
            "options": options, "targets": self.targets(),
        })
    }

    fn stat(&self) -> Value {
        json!({
            "reduceOptions": last(), "colorMode": if self.background { "background" } else { "value" },
            "graphMode": if self.spark { "area" } else { "none" },
            "textMode": self.show.as_deref().unwrap_or("value"), "justifyMode": "auto", "orientation": "auto", "wideLayout": true,
        })
    }

    fn defaults(&self) -> Value {
        let mut steps: Vec<_> = self.thresholds.iter().filter(|(at, _)| *at != "base").collect();
        let at = |(at, _): &(&String, &String)| at.parse::<f64>().unwrap();
        steps.sort_by(|a, b| at(a).total_cmp(&at(b)));
        let base = &self.thresholds["base"];
        let steps: Vec<_> = [json!({"value": null, "color": base})]
            .into_iter()
            .chain(steps.iter().map(|step| json!({"value": at(step), "color": step.1})))
            .collect();
        let drawn = matches!(self.kind, Kind::Lines | Kind::Area | Kind::Percent);
        let mut defaults = json!({
            "unit": self.unit,
            "color": {"mode": if drawn { "palette-classic" } else { "thresholds" }},
            "thresholds": {"mode": "absolute", "steps": steps},
            "mappings": self.mappings(),
        });
        let all = defaults.as_object_mut().unwrap();
        let mut add = |key: &str, value: Option<Value>| value.map(|value| all.insert(key.to_owned(), value));
        add("decimals", self.decimals.map(Value::from));
        // Bars always begin at 0.
        add("min", self.min.or((self.kind == Kind::Bars).then_some(0.0)).map(Value::from));
        add("max", self.max.map(Value::from));
        add("noValue", self.none.clone().map(Value::from));
        add("custom", drawn.then(|| self.custom()));
        defaults
    }

    fn custom(&self) -> Value {
        let (stacking, fill) = match self.kind {
            Kind::Area => ("normal", 40),
            Kind::Percent => ("percent", 60),
            // Several fills on top of each other have no clear colour.
            _ => ("none", if self.queries.len() == 1 && !self.queries[0].legend.contains("{{") { 12 } else { 0 }),
        };
        let mut custom = json!({
            "drawStyle": "line", "lineInterpolation": "linear", "lineWidth": if fill > 50 { 0 } else { 1 }, "fillOpacity": fill,
            "gradientMode": "none", "showPoints": "never", "spanNulls": false, "axisPlacement": "auto",
            "stacking": {"mode": stacking, "group": "A"},
            "thresholdsStyle": {"mode": if self.mark_thresholds { "dashed" } else { "off" }},
        });
        if let Some(reach) = self.reach {
            custom["axisSoftMax"] = reach.into();
        }
        custom
    }

    fn mappings(&self) -> Value {
        if self.text.is_empty() {
            return json!([]);
        }
        let texts: Map<_, _> = self.text.iter().map(|(value, text)| (value.clone(), json!({"text": text}))).collect();
        json!([{"type": "value", "options": texts}])
    }

    fn overrides(&self) -> Vec<Value> {
        let limits = self.queries.iter().enumerate().filter(|(_, query)| query.dashed);
        let limits = limits.map(|(at, _)| {
            json!({
                "matcher": {"id": "byFrameRefID", "options": name(at)},
                "properties": [
                    {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 8]}},
                    {"id": "custom.fillOpacity", "value": 0},
                    {"id": "custom.stacking", "value": {"mode": "none", "group": "limit"}},
                    {"id": "color", "value": {"mode": "fixed", "fixedColor": "text"}},
                ],
            })
        });
        let colors = self.colors.iter().map(|(legend, color)| {
            json!({
                "matcher": {"id": "byName", "options": legend},
                "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
            })
        });
        limits.chain(colors).collect()
    }

    fn targets(&self) -> Vec<Value> {
        let now = matches!(self.kind, Kind::Stat | Kind::Bars) && !self.spark;
        let queries = self.queries.iter().enumerate();
        queries
            .map(|(at, query)| {
                json!({
                    "refId": name(at), "datasource": data_source(), "editorMode": "code", "expr": chosen(&query.expr),
                    "legendFormat": query.legend, "instant": now, "range": !now,
                })
            })
            .collect()
    }
}

/// A, B, C ...
fn name(at: usize) -> String {
    char::from(b'A' + u8::try_from(at).unwrap()).to_string()
}

fn last() -> Value {
    json!({"calcs": ["lastNotNull"], "fields": "", "values": false})
}
