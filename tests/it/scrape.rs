//! Scrapes of a running service: every series of the table from the first scrape on, and never another one.

use crate::train::{Guarded, Run, SLOW, interrupt};
use draftmill_actors::runtime::{
    causes,
    metrics::{self as m, Kind, Known, TABLE},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Stdio,
    rc::Rc,
    time::Duration,
};

/// Run that continues until it is dropped, and its admin port.
pub struct Running {
    pub run: Rc<Run>,
    child: Guarded,
    pub address: String,
}

impl Running {
    /// Starts training in a new folder; returns when the port listens.
    pub fn start(sets: &[&str]) -> Running {
        Running::on(Rc::new(Run::new(&[&["admin.listen=127.0.0.1:0", "log.format=human"], sets].concat())))
    }

    /// Resumes a run.
    pub fn on(run: Rc<Run>) -> Running {
        let mut child = run.draftmill("train", &[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let address = loop {
            let Some(line) = lines.next() else { panic!("the run ended before it listened: {said}") };
            let line = line.unwrap();
            if let Some((_, address)) = line.split_once("http://") {
                let end = address.find(|c: char| !c.is_ascii_digit() && c != '.' && c != ':');
                break address[..end.unwrap_or(address.len())].to_owned();
            }
            said += &(line + "\n");
        };
        // Drains the pipe, so that it does not fill up.
        std::thread::spawn(move || lines.for_each(drop));
        Running { run, child: Guarded(child), address }
    }

    /// Returns the current series by name and labels.
    pub fn scrape(&self) -> BTreeMap<String, f64> {
        let text = get(&self.address, "/metrics");
        let of_this_run = format!("{{run=\"{}\"", self.run.dir().display());
        let stranger =
            text.lines().find(|line| !line.is_empty() && !line.starts_with('#') && !line.contains(&of_this_run));
        assert_eq!(stranger, None);
        parse(&without_run(&text))
    }

    /// Waits until `holds`, and returns that scrape.
    pub fn scrape_until(&self, holds: impl Fn(&BTreeMap<String, f64>) -> bool) -> BTreeMap<String, f64> {
        loop {
            let scrape = self.scrape();
            if holds(&scrape) {
                return scrape;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Requests an orderly end and waits for it.
    pub fn stop(mut self) -> Option<i32> {
        interrupt(&self.child);
        self.child.wait().unwrap().code()
    }
}

/// Returns the body of one response.
pub fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    match head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_owned(),
    }
}

fn unchunked(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        whole += &rest[..size];
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}

/// Parses a scrape, without the label `run` that every series has.
pub fn without_run(text: &str) -> String {
    let bare = |line: &str| {
        let (head, rest) = line.split_once("run=\"")?;
        let (_, rest) = rest.split_once('"')?;
        Some(format!("{head}{}", rest.strip_prefix(',').unwrap_or(rest)).replace("{}", ""))
    };
    text.lines().map(|line| bare(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}

/// Parses a line to `name{label="value",...}` with sorted labels, and the value.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let mut labels: Vec<_> = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty()).collect();
        labels.sort();
        let before = all.insert(format!("{name}{{{}}}", labels.join(",")), value.parse::<f64>().unwrap());
        assert_eq!(before, None, "{series} stands twice");
    }
    all
}

/// Returns every series that a run can have, in the format of `parse`.
fn promised(known: &Known) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for spec in TABLE {
        for labels in m::series(spec, known) {
            let labels: Vec<_> = labels.iter().map(|label| format!("{}=\"{}\"", label.key(), label.value())).collect();
            let mut add = |suffix: &str, more: Option<String>| {
                let mut labels: Vec<_> = labels.iter().cloned().chain(more).collect();
                labels.sort();
                all.insert(format!("{}{suffix}{{{}}}", spec.name, labels.join(",")));
            };
            if spec.kind != Kind::Histogram {
                add("", None);
                continue;
            }
            add("_sum", None);
            add("_count", None);
            for bound in spec.buckets.iter().map(f64::to_string).chain(["+Inf".to_owned()]) {
                add("_bucket", Some(format!("le=\"{bound}\"")));
            }
        }
    }
    all
}

#[test]
fn the_first_scrape_has_every_series_and_no_other_appears() {
    // Every counted event happens: failures, returns, skips, restarts.
    let faulty = ["simulate.job_failures=0.2", "dispatch.max_skip_fraction=1.0", "dispatch.max_attempts=2"];
    let long = ["run.epochs=500", "dispatch.restart_pause=10ms"];
    let run = Running::start(&[SLOW, &faulty, &long].concat());
    let known = Known {
        targets: 2,
        drafters: 2,
        buckets: vec![0; 2],
        positions: 3,
        version: env!("CARGO_PKG_VERSION"),
        ..Known::default()
    };
    let promised = promised(&known);
    // Independent of the code that lists them.
    for series in [
        "draftmill_actor_wait_seconds_sum{actor=\"target\",cause=\"pool_full\",index=\"1\"}",
        "draftmill_actor_wait_seconds_bucket{actor=\"planner\",cause=\"queue\",index=\"0\",le=\"0.02\"}",
        "draftmill_actor_busy_seconds_count{actor=\"trainer\",index=\"0\"}",
        "draftmill_actor_state{actor=\"drafter\",index=\"1\",state=\"busy\"}",
        "draftmill_jobs_skipped_total{cause=\"non_finite\"}",
        "draftmill_pool_draws_total{bucket=\"1\"}",
        "draftmill_step_seconds_bucket{le=\"+Inf\"}",
        "process_threads{}",
    ] {
        assert!(promised.contains(series), "{series}");
    }
    let first: BTreeSet<_> = run.scrape().into_keys().collect();
    assert_eq!(first.symmetric_difference(&promised).collect::<Vec<_>>(), Vec::<&String>::new());

    let steps = format!("{}{{}}", m::STEPS);
    let skipped = |scrape: &BTreeMap<String, f64>| scrape["draftmill_jobs_total{outcome=\"skipped\"}"];
    let later = run.scrape_until(|scrape| scrape[&steps] >= 6.0 && skipped(scrape) >= 1.0);
    let keys: BTreeSet<_> = later.keys().cloned().collect();
    assert_eq!(keys.symmetric_difference(&promised).collect::<Vec<_>>(), Vec::<&String>::new());

    let sum = |name: &str| later.iter().filter(|(key, _)| key.starts_with(name)).map(|(_, value)| value).sum::<f64>();
    for name in [m::TARGET_TOKENS, m::DRAFTER_TOKENS, m::TARGET_JOBS, m::TARGET_FAILURES, m::STEP, m::POOL_DRAWS] {
        assert!(sum(&format!("{name}{{")) > 0.0, "{name}");
    }
    assert_eq!(sum("draftmill_jobs_skipped_total{"), skipped(&later), "each with its reason");
    assert!(sum(m::PROCESS_MEMORY) > 1e6 && sum(m::MEMORY_LIMIT) > sum(m::PROCESS_MEMORY));
    for (key, expected) in [
        ("draftmill_pool_min_ready{}", 2.0),
        ("draftmill_pool_max_batches{}", 4.0),
        ("draftmill_checkpoint_every_steps{}", 4.0),
        ("draftmill_bucket_max_tokens{bucket=\"1\"}", 64.0),
    ] {
        assert_eq!(later[key], expected, "{key}");
    }
    for (actor, _) in causes::ACTORS {
        let busy = sum(&format!("draftmill_actor_busy_seconds_sum{{actor=\"{actor}\""));
        let waits = sum(&format!("draftmill_actor_wait_seconds_sum{{actor=\"{actor}\""));
        assert!(busy > 0.0 && waits > 0.0, "{actor}: busy {busy} s, waits {waits} s");
    }
    assert_eq!(run.stop(), Some(130));
}

#[test]
fn a_run_that_goes_on_tells_of_its_checkpoint_at_once() {
    let run = Running::start(SLOW);
    let at = |scrape: &BTreeMap<String, f64>, name: &str| scrape[&format!("{name}{{}}")];
    let first = run.scrape();
    assert_eq!((at(&first, m::CHECKPOINT_STEP), at(&first, m::CHECKPOINT_TIME)), (0.0, 0.0));
    let written = run.scrape_until(|scrape| at(scrape, m::CHECKPOINT_STEP) >= 4.0);
    let time = at(&written, m::CHECKPOINT_TIME);
    assert!(time > at(&written, m::PROCESS_START_TIME) && time <= draftmill::common::clock::now(), "{time}");
    let folder = run.run.clone();
    assert_eq!(run.stop(), Some(130));

    let run = Running::on(folder);
    assert!(at(&run.scrape(), m::CHECKPOINT_TIME) >= time);
    let later = run.scrape_until(|scrape| at(scrape, m::CHECKPOINT_STEP) > 0.0);
    assert!(at(&later, m::CHECKPOINT_STEP) >= at(&written, m::CHECKPOINT_STEP));
    assert!(at(&later, m::STEP) >= at(&later, m::CHECKPOINT_STEP) && at(&later, m::STEPS) < at(&later, m::STEP));
}

#[test]
fn every_cause_is_written_in_a_summary_as_in_its_label() {
    for (_, causes) in causes::ACTORS {
        for cause in *causes {
            assert_eq!(serde_json::to_value(cause).unwrap(), cause.as_str());
        }
    }
}
