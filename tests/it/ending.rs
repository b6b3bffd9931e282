//! Life of the process, through the binary: startup banner, notifications to the service manager, and signals.

use crate::train::{Guarded, Run, interrupt, signal, text};
use draftmill_actors::messages::types::Outcome;
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::net::UnixDatagram,
    process::{Child, ExitStatus, Stdio},
    time::Duration,
};

/// Run that is about to train or trains already, with all its output until the end.
struct Running {
    child: Guarded,
    lines: std::io::Lines<BufReader<std::process::ChildStderr>>,
    said: Vec<String>,
}

impl Running {
    fn start(run: &Run, more: &[&str], environment: &[(&str, &str)]) -> Running {
        let mut train = run.draftmill("train", more);
        train.env_remove("NOTIFY_SOCKET").envs(environment.iter().copied());
        let mut child = train.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Running { child: Guarded(child), lines, said: Vec::new() }
    }

    /// Waits for a log line that contains this.
    fn says(&mut self, part: &str) -> String {
        for line in self.lines.by_ref() {
            self.said.push(line.unwrap());
            if let Some(line) = self.said.last().filter(|line| line.contains(part)) {
                return line.clone();
            }
        }
        let rest = self.said.len().saturating_sub(20);
        panic!("{part} is not in {:#?}", &self.said[rest..]);
    }

    /// Waits for the end. The second value is the rest of the output, by line.
    fn ends(mut self) -> (ExitStatus, Vec<String>) {
        self.said.extend(self.lines.by_ref().map(Result::unwrap));
        (self.child.wait().unwrap(), std::mem::take(&mut self.said))
    }
}

fn terminate(child: &Child) {
    signal(child, libc::SIGTERM);
}

fn trained(run: &Run) -> usize {
    let jobs = run.step_of_each_job();
    jobs.iter().filter(|(_, outcome)| matches!(outcome, Some(Outcome::Trained { .. }))).count()
}

/// Slow drafters: the pool is full when the signal comes.
const FULL: &[&str] = &[
    "run.engine=simulated",
    "run.epochs=50",
    "simulate.micro_batch=60ms",
    "simulate.feature_bytes_per_token=1 KiB",
    "pool.max_batches=16",
    "log.format=json",
    "log.progress_every=1ms",
];

#[test]
fn sigterm_ends_with_0_and_the_pool_is_reopened_or_trained_as_set() {
    let mut after = Vec::new();
    for pool in ["reopen", "train"] {
        let run = Run::new(&[FULL, &[&format!("shutdown.pool={pool}")]].concat());
        let mut running = Running::start(&run, &[], &[]);
        running.says("step 8/");
        terminate(&running.child);
        let (status, said) = running.ends();
        assert_eq!(status.code(), Some(0), "{said:#?}");
        let all = said.join("\n");
        assert!(
            all.contains("shutting down with a checkpoint")
                && all.contains("SIGTERM")
                && all.contains("resumes the run"),
            "{all}"
        );
        let event = said.iter().find(|line| line.contains("shutting down")).unwrap();
        let event: Value = serde_json::from_str(event).unwrap();
        assert_eq!((event["signal"].as_str(), event["pool"].as_str()), (Some("SIGTERM"), Some(pool)), "{event}");
        // A checkpoint of the last step, which holds every job that the ledger calls trained.
        let steps = run.steps().len();
        assert_eq!((trained(&run), run.summary()["finished"].as_bool()), (2 * steps, Some(false)));
        assert_eq!(run.summary()["checkpoint"].as_str(), Some(format!("step-{steps}").as_str()));
        let verified = run.plain(&["ledger", run.dir().to_str().unwrap(), "--verify"]);
        assert!(verified.status.success(), "{}", text(&verified));
        after.push(steps);
    }
    // Sixteen batches and those in work are at least eight steps; the reopened run makes one or two.
    assert!(after[1] >= after[0] + 5, "{after:?}");
}

#[test]
fn sigint_and_a_second_signal_end_with_130_and_sigterm_before_training_with_0() {
    let run = Run::new(FULL);
    let mut running = Running::start(&run, &[], &[]);
    running.says("step 2/");
    interrupt(&running.child);
    assert_eq!(running.ends().0.code(), Some(130));

    // A forward of a minute: a second signal does not wait for it.
    let mut hanging = Running::start(&run, &["--set", "simulate.target_per_token=1s"], &[]);
    hanging.says("epoch planned");
    std::thread::sleep(Duration::from_millis(500));
    terminate(&hanging.child);
    hanging.says("shutting down with a checkpoint");
    // Signals within a second count as one.
    std::thread::sleep(Duration::from_millis(1500));
    terminate(&hanging.child);
    hanging.says("second signal; stopping at once");
    assert_eq!(hanging.ends().0.code(), Some(130));

    for _ in 0..3 {
        fs::remove_file(run.dir().join("lock")).unwrap();
        let starting = Running::start(&run, &[], &[]);
        while !run.dir().join("lock").exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        terminate(&starting.child);
        let (status, said) = starting.ends();
        assert_eq!(status.code(), Some(0), "{said:#?}");
    }
}

#[test]
fn the_first_fault_wins_over_a_sigterm() {
    let run = Run::new(&[FULL, &["simulate.micro_batch=20ms"]].concat());
    let mut running = Running::start(&run, &[], &[]);
    running.says("step 4/");
    // The last checkpoint finds a file where its folder should be.
    let _ = fs::remove_dir_all(run.dir().join("checkpoints"));
    fs::write(run.dir().join("checkpoints"), "").unwrap();
    terminate(&running.child);
    let (status, said) = running.ends();
    assert_eq!(status.code(), Some(6), "{said:#?}");
    assert!(said.iter().any(|line| line.starts_with("error: trainer: ")), "{said:#?}");
}

#[test]
fn a_drain_ends_at_half_of_the_grace_and_names_slow_actors() {
    let sets = ["shutdown.pool=train", "shutdown.grace=14s", "simulate.micro_batch=6s", "drafter.devices=[\"cpu\"]"];
    let run = Run::new(&[FULL, &sets].concat());
    let mut running = Running::start(&run, &[], &[]);
    // By now the pool has enough batches.
    running.says("epoch planned");
    std::thread::sleep(Duration::from_millis(500));
    terminate(&running.child);
    let line: Value = serde_json::from_str(&running.says("shutdown in progress")).unwrap();
    let named = line["still_running"].as_str().unwrap();
    assert!(named.contains("drafter 0"), "{named}");
    assert!(named.contains("trainer") && !named.contains("target"), "targets have nothing to do: {named}");
    running.says("half of shutdown.grace elapsed");
    let (status, said) = running.ends();
    assert_eq!(status.code(), Some(0), "{said:#?}");
}

#[test]
fn a_service_manager_hears_that_it_is_ready_alive_and_stopping() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let hear = || {
        let mut buffer = [0; 4096];
        let n = manager.recv(&mut buffer).expect("the manager hears nothing for a minute");
        String::from_utf8(buffer[..n].to_vec()).unwrap()
    };
    let until = |what: &str| {
        let mut heard = Vec::new();
        while !heard.last().is_some_and(|said: &String| said.starts_with(what)) {
            heard.push(hear());
        }
        heard
    };
    let run = Run::new(FULL);
    // A watchdog for another process is ignored.
    for (pid, fed) in [(None, true), (Some("1"), false)] {
        let mut environment = vec![("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "200000")];
        environment.extend(pid.map(|pid| ("WATCHDOG_PID", pid)));
        let mut running = Running::start(&run, &[], &environment);
        assert!(hear().starts_with("READY=1\nSTATUS=training, step "));
        for _ in 0..if fed { 4 } else { 0 } {
            until("WATCHDOG=1");
        }
        running.says("\"message\":\"step ");
        running.says("\"message\":\"step ");
        terminate(&running.child);
        let heard = until("STOPPING=1");
        assert!(heard.last().unwrap().contains("\nSTATUS=stopping at step "), "{heard:?}");
        assert!(fed || !heard.iter().any(|said| said.contains("WATCHDOG")), "{heard:?}");
        assert_eq!(running.ends().0.code(), Some(0));
        manager.set_nonblocking(true).unwrap();
        while manager.recv(&mut [0; 64]).is_ok() {}
        manager.set_nonblocking(false).unwrap();
    }
}

#[test]
fn a_start_says_what_it_will_do_and_where_to_look() {
    let sets = ["admin.listen=127.0.0.1:0", "shutdown.pool=train", "shutdown.grace=90s", "log.format=human"];
    let mut run = Run::new(&[FULL, &sets].concat());
    let mut running = Running::start(&run, &[], &[]);
    running.says(" training");
    running.says("  stop ");
    running.says("step 2/");
    interrupt(&running.child);
    let (_, said) = running.ends();
    let first = said.iter().position(|line| line.ends_with(" training")).unwrap();
    let lines = &said[first + 1..first + 12];
    let value = |name: &str| {
        let line = lines.iter().find_map(|line| line.strip_prefix(&format!("  {name:<9}")));
        line.unwrap_or_else(|| panic!("{name} is not in {lines:#?}")).to_owned()
    };
    let folder = run.dir().display().to_string();
    assert!(value("drafter").starts_with("none: run.engine = \"simulated\""));
    assert!(value("data").contains(" samples, ") && value("data").contains(&folder), "{}", value("data"));
    assert!(
        value("plan").contains("50 epochs of ") && value("plan").contains(" steps of 2 micro-batches"),
        "{}",
        value("plan")
    );
    assert!(value("pool").starts_with("at most 16 batches and "), "{}", value("pool"));
    assert!(value("devices").contains("targets on cpu, cpu; 2 drafters on cpu, cpu"), "{}", value("devices"));
    assert_eq!((value("start"), value("folder")), ("from the beginning".to_owned(), folder));
    let page = value("page");
    assert!(page.starts_with("http://127.0.0.1:") && page.ends_with('/'), "{page}");
    assert_eq!(value("metrics"), format!("{page}metrics"));
    assert!(value("reload").contains("smoke.toml; SIGHUP reloads it at once"), "{}", value("reload"));
    assert!(value("stop").contains("a checkpoint within 90s, after training the pool's batches"), "{}", value("stop"));

    // In JSON it is one event.
    run.sets.push("log.format=json".into());
    let mut again = Running::start(&run, &[], &[]);
    let event: Value = serde_json::from_str(&again.says("\"training\"")).unwrap();
    interrupt(&again.child);
    let (_, said) = again.ends();
    assert_eq!((event["targets"].as_u64(), event["drafters"].as_u64()), (Some(2), Some(2)), "{event}");
    for name in ["run", "drafter", "data", "plan", "pool", "devices", "start", "page", "metrics", "reload", "stop"] {
        assert!(event[name].as_str().is_some_and(|text| !text.is_empty()), "{name} is not in {event}");
    }
    assert!(event["start"].as_str().unwrap().contains("resuming from checkpoint step-"), "{event}");
    let broken = said.iter().find(|line| line.starts_with(' ') || line.is_empty());
    assert_eq!(broken, None, "every line is one event");
}

/// Many equal warnings become a few lines, and one that counts the rest.
#[test]
fn a_storm_of_warnings_is_counted_and_nothing_is_lost() {
    let sets = ["simulate.job_failures=0.5", "simulate.micro_batch=1ms", "dispatch.max_attempts=30", "run.epochs=4"];
    let run = Run::new(&[FULL, &sets, &["dispatch.max_restarts=1000", "dispatch.restart_pause=1ms"]].concat());
    let (status, said) = Running::start(&run, &[], &[]).ends();
    assert_eq!(status.code(), Some(0), "{said:#?}");
    let events: Vec<Value> = said.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let shown = |event: &&Value| {
        event["module"] == "draftmill_actors::target::actor" && event["message"] == "extraction failed"
    };
    let failed = events.iter().filter(shown).count() as u64;
    let counted = |event: &&Value| event["last"].as_str().is_some_and(|last| last.starts_with("extraction failed"));
    let held: u64 = events.iter().filter(counted).filter_map(|event| event["lines"].as_u64()).sum();
    assert!(failed >= 10 && held > failed, "{failed} shown, {held} counted");
    let jobs = run.step_of_each_job().len() as u64;
    // Each job fails once for each success.
    assert!(failed + held > jobs / 2 && failed + held < 2 * jobs, "{failed} + {held} of {jobs}");
}
