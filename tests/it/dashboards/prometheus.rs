//! A real Prometheus scrapes a live run: every query of the dashboard has a result, and every rule is evaluated.
//!
//! `make test-dashboards` installs Prometheus if possible, and runs this test.

use super::{dashboard, path, queries, read};
use crate::{
    scrape::{Running, get},
    train::{Run, SLOW},
};
use draftmill_actors::runtime::metrics::DEVICE_MEMORY;
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    process::{Child, Command, Output, Stdio},
    rc::Rc,
    time::Duration,
};

/// Maximum number of polls, far more than a passing test needs.
const LOOKS: usize = 300;
const LOOK: Duration = Duration::from_millis(200);

fn promtool(arguments: &[&str], stdin: &str) -> Output {
    let mut tool = Command::new("promtool");
    tool.args(arguments).current_dir(path("")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child =
        tool.spawn().unwrap_or_else(|e| panic!("promtool ({e}): install Prometheus, or run make test-dashboards"));
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn clean(arguments: &[&str], stdin: &str) {
    let output = promtool(arguments, stdin);
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.to_lowercase().contains("warn"), "promtool {arguments:?}: {said}");
}

#[test]
#[ignore = "needs Prometheus: make test-dashboards"]
fn rules_and_configuration_pass_promtool() {
    clean(&["check", "config", "prometheus.yml"], "");
    clean(&["check", "rules", "--lint=all", "--lint-fatal", "alerts.yml"], "");
    clean(&["test", "rules", "alerts_test.yml"], "");
}

/// Process that is killed on drop.
struct Server {
    child: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts Prometheus with our configuration, which scrapes this run every second.
    fn start(run: &str) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let config = read("prometheus.yml");
        let config = config.replace("127.0.0.1:9464", run).replace("_interval: 15s", "_interval: 1s");
        let config = config
            .replace("_interval: 5s", "_interval: 1s")
            .replace("- alerts.yml", &format!("- {}", path("alerts.yml").display()));
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        // A port that was free a moment ago; Prometheus does not report a port of its choice.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let mut server = Command::new("prometheus");
        server.arg(format!("--config.file={}", file.display())).arg(format!("--web.listen-address={address}"));
        server.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
        let spawned = server.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|e| panic!("prometheus ({e}): install it, or run make test-dashboards"));
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let mut said = String::new();
        while !said.contains("Server is ready") {
            said += &(lines.next().unwrap_or_else(|| panic!("Prometheus ended: {said}")) + "\n");
        }
        std::thread::spawn(move || lines.for_each(drop));
        Server { child, address, _folder: folder }
    }

    fn ask(&self, path: &str, arguments: &[(&str, &str)]) -> Value {
        let arguments: Vec<_> = arguments.iter().map(|(key, value)| format!("{key}={}", encoded(value))).collect();
        let answer: Value =
            serde_json::from_str(&get(&self.address, &format!("/api/v1/{path}?{}", arguments.join("&")))).unwrap();
        assert_eq!(answer["status"], "success", "{path}: {answer}");
        answer["data"].clone()
    }

    /// Returns the numeric values of an instant query.
    fn values(&self, expr: &str) -> Vec<f64> {
        let data = self.ask("query", &[("query", expr)]);
        let samples = data["result"].as_array().unwrap().iter();
        samples
            .map(|sample| sample["value"][1].as_str().unwrap().parse::<f64>().unwrap())
            .filter(|v| !v.is_nan())
            .collect()
    }
}

fn encoded(text: &str) -> String {
    let byte = |b: u8| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") };
    text.bytes().map(byte).collect()
}

/// Polls until nothing is left, and returns the rest.
fn left(mut look: impl FnMut() -> Vec<String>) -> Vec<String> {
    for _ in 0..LOOKS {
        if look().is_empty() {
            return Vec::new();
        }
        std::thread::sleep(LOOK);
    }
    look()
}

#[test]
#[ignore = "needs Prometheus: make test-dashboards"]
fn every_query_of_the_dashboard_has_an_answer_while_a_run_goes_on() {
    let more =
        ["run.epochs=100000", "simulate.job_failures=0.05", "dispatch.max_skip_fraction=1.0", "reload.poll=100ms"];
    let run = Rc::new(Run::new(&[SLOW, &more, &["admin.listen=127.0.0.1:0", "log.format=human"]].concat()));
    let running = Running::on(run.clone());
    let text = get(&running.address, "/metrics");
    let output = promtool(&["check", "metrics"], &text);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    // The tool detects errors.
    assert!(!promtool(&["check", "metrics"], "# TYPE a_total gauge\na_total 1\n").status.success());

    let server = Server::start(&running.address);
    let name = run.dir().display().to_string();
    let chosen = |query: &str| {
        let query = query.replace("$run", &name).replace("$instance", ".*").replace("$__rate_interval", "10s");
        assert!(!query.contains('$'), "{query}");
        query
    };
    // Options of the variables.
    assert_eq!(
        left(|| Vec::from_iter(server.values("draftmill_step > 2").is_empty().then(|| "steps".to_owned()))),
        [""; 0]
    );
    let seen = |label: &str| server.ask(&format!("label/{label}/values"), &[("match[]", "draftmill_build_info")]);
    assert_eq!((seen("run"), seen("instance")), (serde_json::json!([name]), serde_json::json!([running.address])));
    let empty = || {
        let all = queries(&dashboard());
        // A run on the CPU has no GPU metrics.
        all.into_iter()
            .filter(|(_, query)| !query.contains(DEVICE_MEMORY))
            .filter(|(_, query)| server.values(&chosen(query)).is_empty())
            .map(|(panel, query)| format!("{panel}: {query}"))
            .collect()
    };
    // One reload is refused, so that there is an annotation.
    run.break_file();
    assert_eq!(left(empty), [""; 0]);

    let broken = || {
        let rules = server.ask("rules", &[]);
        let all = rules["groups"].as_array().unwrap().iter().flat_map(|group| group["rules"].as_array().unwrap());
        all.filter(|rule| rule["health"] != "ok").map(Value::to_string).collect::<Vec<_>>()
    };
    assert_eq!(left(broken), [""; 0]);
    let firing = || server.values("ALERTS{alertname=\"DraftmillReloadRefused\", alertstate=\"firing\"}");
    assert_eq!(left(|| Vec::from_iter(firing().is_empty().then(|| "no alert".to_owned()))), [""; 0]);
    assert_eq!(
        server.values("ALERTS{alertstate=\"firing\", alertname!=\"DraftmillReloadRefused\"}"),
        [0.0; 0],
        "nothing else is wrong"
    );
    assert_eq!(running.stop(), Some(130));
}
