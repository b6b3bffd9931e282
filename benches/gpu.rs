//! Parity, memory and speed of one device, each measured in a separate process. `benches/gpu.sh` runs it.
//!
//! `cargo bench --bench dispatch -- --gpu --device cuda:0` prints a table in Markdown and writes `gpu.json`. A failure is
//! reported at the end and does not stop the other measurements.

use crate::{
    machine::{Failed, Outcome, describe},
    sampled::Options,
    table::{
        Table,
        Target::{AtLeast, Below, None as Reported},
    },
};
use serde_json::{Map, Value, json};
use std::{fs, path::Path, process::Command};

/// Shapes of the measurements.
struct Size {
    widths: &'static str,
    dtype: &'static str,
    rows: usize,
    length: usize,
    layers: usize,
    anchors: [usize; 4],
    steps: usize,
    /// Extracted rows of `length` tokens each.
    extracted: usize,
}

/// Shapes by name: `tiny` as a smoke test, `smollm2` as in the table of `make bench-peers`, `qwen3-8b` for a large GPU.
fn size(name: &str) -> Outcome<Size> {
    let smollm2 = Size {
        widths: "smollm2",
        dtype: "f32",
        rows: 2,
        length: 1024,
        layers: 2,
        anchors: [64, 128, 256, 512],
        steps: 5,
        extracted: 8,
    };
    Ok(match name {
        "tiny" => Size {
            widths: "tiny",
            rows: 2,
            length: 96,
            layers: 1,
            anchors: [4, 8, 16, 32],
            steps: 2,
            extracted: 2,
            ..smollm2
        },
        "smollm2" => smollm2,
        "smollm2-bf16" => Size { dtype: "bf16", ..smollm2 },
        "qwen3-8b" => Size { widths: "qwen3-8b", dtype: "bf16", length: 4096, layers: 5, ..smollm2 },
        other => return Err(format!("--size is tiny, smollm2, smollm2-bf16 or qwen3-8b, not {other}")),
    })
}

/// Measures, prints the table and writes `gpu.json`.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let mut given = Options::read(arguments)?;
    let (device, out, date) = (given.word("device", "cpu"), given.word("out", "target/gpu"), given.word("date", ""));
    let name = given.word("size", if device == "cpu" { "tiny" } else { "smollm2" });
    let size = size(name)?;
    given.done()?;

    let mut report = Report { device, table: Table::default(), details: Map::new(), failures: Vec::new() };
    report.parity();
    report.steps(&size);
    report.optimizer(&size);
    report.extraction(&size);
    report.copies();

    let mut machine = describe();
    machine["device"] = hardware(device).into();
    machine["date"] = date.into();
    let Size { widths, dtype, rows, length, layers, .. } = size;
    println!("{}, {device}, {date}", hardware(device));
    println!(
        "Shapes of {widths}, {dtype}: {rows} rows of {length} tokens, {layers} layers.\n\n{}",
        report.table.text()
    );
    let folder = Path::new(out);
    fs::create_dir_all(folder).failed("make the folder of the results")?;
    let mut value = report.table.json(machine, report.details.into());
    value["size"] = name.into();
    value["failures"] = json!(report.failures);
    let text = serde_json::to_string_pretty(&value).failed("write the figures")?;
    fs::write(folder.join("gpu.json"), text + "\n").failed("write gpu.json")?;
    match report.failures.len() {
        0 => Ok(()),
        _ => Err(report.failures.join("\nbench: ")),
    }
}

struct Report<'a> {
    device: &'a str,
    table: Table,
    /// Output of each process.
    details: Map<String, Value>,
    failures: Vec<String>,
}

impl Report<'_> {
    fn parity(&mut self) {
        let found = [self.measure("parity", "--parity", &[]), self.measure("pressure", "--pressure", &[])];
        for figure in found.iter().filter_map(Value::as_array).flatten() {
            let name = figure["name"].as_str().unwrap_or_default();
            let value = figure["value"].as_f64().unwrap_or(f64::NAN);
            let limit = match (figure["below"].as_f64(), figure["at_least"].as_f64()) {
                (Some(limit), _) => Below(limit),
                (_, Some(least)) => AtLeast(least),
                _ => Reported,
            };
            let note = figure["note"].as_str().unwrap_or_default().to_owned();
            self.table.row(name, value, limit, note);
        }
    }

    /// Measures memory and time at each number of anchors, and the products alone at the largest.
    fn steps(&mut self, size: &Size) {
        let mut last = (f64::NAN, f64::NAN);
        for anchors in size.anchors {
            let line = self.measure(&format!("step_{anchors}"), "--step", &size.shape(anchors));
            let [seconds, bytes] = [&line["seconds"], &line["peak_over_weights"]].map(number);
            self.table.row(&format!("step_seconds_{anchors}"), seconds, Reported, "forward, backward, update".into());
            let note = "above weights, moments and features, while a step runs";
            self.table.row(&format!("step_peak_mb_{anchors}"), bytes / 1e6, Reported, note.into());
            last = (seconds, number(&line["memory"]["reserved"]));
        }
        let (seconds, reserved) = last;
        let largest = size.anchors[3];
        if !reserved.is_nan() {
            let note = format!("of the allocator at {largest} anchors, all in all");
            self.table.row("step_reserved_mb", reserved / 1e6, Reported, note);
        }
        let products = number(&self.measure("products", "--products", &size.shape(largest))["seconds"]);
        let note = format!("the matrix products of a step of {largest} anchors alone");
        self.table.row("products_seconds", products, Reported, note);
        self.table.row("step_outside_products", 1.0 - products / seconds, Reported, "share of that step".into());
    }

    fn optimizer(&mut self, size: &Size) {
        let line = self.measure("optimizer", "--optimizer", &size.shape(size.anchors[0]));
        self.table.row("update_seconds", number(&line["fused"]["seconds"]), Reported, "fused AdamW and clip".into());
        let note = "plain operations to the fused kernel";
        self.table.row("update_plain_to_fused", number(&line["ratios"]["plain_over_fused"]), Reported, note.into());
    }

    fn extraction(&mut self, size: &Size) {
        let lengths = vec![size.length.to_string(); size.extracted].join(",");
        let options = [("widths", size.widths), ("dtype", size.dtype), ("buckets", "1"), ("lengths", &lengths)];
        let options = options.map(|(name, value)| (name, value.to_owned()));
        let line = self.measure("extraction", "--extract", &options);
        let speed = number(&line["tokens"]) / number(&line["seconds"]);
        let note = format!("{} rows, up to the last tap, to the host", size.extracted);
        self.table.row("extracted_tokens_per_second", speed, Reported, note);
        let peak = number(&line["peak_over_weights"]) / 1e6;
        self.table.row("extraction_peak_mb", peak, Reported, "above the weights".into());
    }

    /// Measures copies between host and GPU; none on a CPU.
    fn copies(&mut self) {
        if self.device == "cpu" {
            return;
        }
        let line = self.measure("copies", "--copies", &[]);
        for (name, what) in [("to_host", "from the device to the host"), ("to_gpu", "from the host to the device")] {
            let [ours, plain] = [name, &format!("{name}_plain")].map(|name| number(&line[name]));
            let note = format!("{what}, through pinned buffers; {plain:.1} by plain copies");
            self.table.row(&format!("copy_gb_per_second_{name}"), ours, Reported, note);
        }
    }

    /// Runs a process of this program and returns its output, or null if it failed.
    fn measure(&mut self, name: &str, mode: &str, options: &[(&str, String)]) -> Value {
        match child(mode, self.device, options) {
            Ok(line) => {
                self.details.insert(name.to_owned(), line.clone());
                line
            }
            Err(error) => {
                self.failures.push(format!("{name}: {error}"));
                Value::Null
            }
        }
    }
}

impl Size {
    fn shape(&self, anchors: usize) -> Vec<(&'static str, String)> {
        let numbers = [
            ("rows", self.rows),
            ("length", self.length),
            ("layers", self.layers),
            ("anchors", anchors),
            ("steps", self.steps),
        ];
        let words = [("widths", self.widths.to_owned()), ("dtype", self.dtype.to_owned())];
        words.into_iter().chain(numbers.map(|(name, number)| (name, number.to_string()))).collect()
    }
}

fn child(mode: &str, device: &str, options: &[(&str, String)]) -> Outcome<Value> {
    let program = std::env::current_exe().failed("find this program")?;
    let mut command = Command::new(program);
    command.args([mode, "--device", device]);
    for (name, value) in options {
        command.arg(format!("--{name}")).arg(value);
    }
    let output = command.output().failed("start this program")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    eprint!("{complaint}");
    if !output.status.success() {
        let last = complaint.lines().last().unwrap_or("it said nothing");
        return Err(format!("{} ({last})", output.status));
    }
    serde_json::from_slice(&output.stdout).failed("read what was measured")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

/// Returns the name of the device from its driver or the kernel.
fn hardware(device: &str) -> String {
    let Some(index) = device.strip_prefix("cuda") else {
        return describe()["cpu"].as_str().unwrap_or("unknown").to_owned();
    };
    let index = index.strip_prefix(':').unwrap_or("0");
    let asked = ["--query-gpu=name,driver_version", "--format=csv,noheader", "-i", index];
    let told = Command::new("nvidia-smi").args(asked).output().ok().filter(|output| output.status.success());
    told.map_or_else(|| "a CUDA device".to_owned(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
