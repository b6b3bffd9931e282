//! `draftmill simulate`: its results, on the real actors and a virtual clock, and its command line.

use draftmill::{
    common::exit::Exit,
    config,
    simulate::{Actor, Policy, Report, Scenario, Stage, Sweep, run},
};
use draftmill_actors::pool::DrawPolicy;
use serde_json::Value;
use std::{path::Path, process::Command};

const NODE: &str = "configs/sim-8gpu.toml";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Node of eight GPUs with an epoch of about `jobs` jobs.
fn node(jobs: u32, sets: &[&str]) -> Scenario {
    let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
    Scenario::new(config::load(Some(&root().join(NODE)), &sets).unwrap()).jobs(jobs)
}

fn report(scenario: &Scenario) -> Report {
    run(scenario).unwrap_or_else(|failure| panic!("{failure}"))
}

/// The part of a report that is a function of the scenario.
fn figures(scenario: &Scenario) -> String {
    serde_json::to_string(&Report { wall_seconds: 0.0, ..report(scenario) }).unwrap()
}

fn draftmill(arguments: &[&str]) -> (i32, String, String) {
    let binary = env!("CARGO_BIN_EXE_draftmill");
    let output = Command::new(binary).arg("simulate").args(arguments).current_dir(root()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn mean(actors: &[Actor], of: impl Fn(&Actor) -> f64) -> f64 {
    actors.iter().map(of).sum::<f64>() / actors.len() as f64
}

#[test]
fn the_json_has_every_figure_that_it_promises() {
    let (code, out, errors) = draftmill(&["--config", NODE, "--jobs", "300", "--json"]);
    assert_eq!((code, errors.as_str()), (0, ""));
    let json: Value = serde_json::from_str(&out).unwrap();
    let number = |path: &str| json.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no {path}: {out}"));
    for path in ["/efficiency", "/efficiency_with_ends", "/padding_share", "/targets/4/busy", "/drafters/2/busy"] {
        assert!((0.0..1.01).contains(&number(path)) && number(path) > 0.0, "{path}: {out}");
    }
    for path in
        ["/targets/0/waits/job", "/targets/0/waits/pool_full", "/drafters/0/waits/batch", "/drafters/0/waits/step"]
    {
        assert!((0.0..1.0).contains(&number(path)), "{path}: {out}");
    }
    assert_eq!((json["targets"].as_array().unwrap().len(), json["drafters"].as_array().unwrap().len()), (5, 3));
    // Work and waits of an actor add up to the time until its last work.
    for worker in ["/targets/0", "/targets/4", "/drafters/0", "/drafters/2", "/trainer"] {
        let waits: f64 = json
            .pointer(&format!("{worker}/waits"))
            .unwrap()
            .as_object()
            .unwrap()
            .values()
            .map(|w| w.as_f64().unwrap())
            .sum();
        let whole = number(&format!("{worker}/busy")) + waits;
        assert!((0.9..1.0 + 1e-9).contains(&whole), "{worker}: {whole}");
    }
    assert!((number("/tokens_per_second") / number("/bound_tokens_per_second") - number("/efficiency")).abs() < 1e-9);
    // Six rows of 8192 are the budget of a job, and some of it is padding.
    let tokens_of_job = number("/tokens_per_second_with_ends") * number("/virtual_seconds") / number("/jobs/trained");
    assert!((40_000.0..=49_152.0).contains(&tokens_of_job), "{out}");
    assert_eq!(number("/pool/max_bytes"), f64::from(50u32) * f64::from(1u32 << 30));
    assert!(number("/pool/peak_bytes") <= number("/pool/max_bytes"));
    // min_ready batches have to wait before one is drawn, and no more than max_batches ever do.
    assert!(number("/pool/depth_p50") >= 7.0 && number("/pool/depth_p95") <= 24.0, "{out}");
    assert!(number("/pool/depth_p50") <= number("/pool/depth_p95"));
    assert_eq!(number("/steps/count"), (number("/jobs/trained") / 12.0).ceil());
    assert!((6.0..=12.0).contains(&number("/steps/distinct_buckets_mean")), "{out}");
    assert!((-1.0..=1.0).contains(&number("/steps/length_correlation")));
    assert_eq!((number("/jobs/planned"), number("/jobs/skipped")), (number("/jobs/trained"), 0.0));
    assert!((290.0..=310.0).contains(&number("/jobs/planned")));
    assert!(number("/virtual_seconds") > 100.0 && number("/steady_seconds") < number("/virtual_seconds"));
    assert!(number("/wall_seconds") > 0.0);
}

#[test]
fn a_report_is_a_function_of_the_seed_alone() {
    let trouble = ["simulate.job_failures=0.05", "simulate.micro_batch_failures=0.004", "simulate.jitter=0.1"];
    let scenario = node(300, &trouble);
    assert_eq!(figures(&scenario), figures(&scenario));
    let other = node(300, &[&trouble[..], &["run.seed=7"]].concat());
    assert_ne!(figures(&scenario), figures(&other));
    let rotation = node(300, &trouble).policy(Policy::RoundRobin { queue_depth: 4 });
    assert_eq!(figures(&rotation), figures(&rotation));
    // In another process as well.
    let sets = trouble.iter().flat_map(|set| ["--set", set]);
    let arguments: Vec<_> = ["--config", NODE, "--jobs", "300", "--json"].into_iter().chain(sets).collect();
    let mut json: Value = serde_json::from_str(&draftmill(&arguments).1).unwrap();
    json["wall_seconds"] = 0.0.into();
    assert_eq!(json, serde_json::from_str::<Value>(&figures(&scenario)).unwrap());
}

#[test]
fn the_steady_run_ends_before_targets_run_dry() {
    // All actors wait for the last job of a very slow target, and only at the end.
    let report = report(&node(400, &["simulate.target_speeds=[0.02]", "dispatch.straggler_factor=0.0"]));
    assert!((0.97..=1.02).contains(&report.efficiency), "{report}");
    assert!(report.efficiency_with_ends < report.efficiency - 0.05, "{report}");
}

/// Drafters get a phase in a random order that tokio chooses: it must have no effect.
#[test]
fn many_drafters_give_the_same_report_every_time() {
    let scenario = node(400, &["pool.max_bytes=300 GiB", "pool.max_batches=128"]).targets(12).drafters(20);
    let first = figures(&scenario);
    assert!((0..3).all(|_| figures(&scenario) == first));
}

#[test]
fn pull_keeps_the_slower_stage_working() {
    let report = report(&node(1200, &[]));
    assert_eq!(report.slower_stage, Stage::Targets);
    assert!((0.05..0.15).contains(&report.imbalance), "{}", report.imbalance);
    assert!(report.efficiency >= 0.98, "{report}");
    assert!(report.efficiency_with_ends >= 0.96, "{report}");
    assert!(report.efficiency <= 1.005, "the bound is no bound: {report}");
}

#[test]
fn drafters_that_are_the_bottleneck_work_without_a_pause() {
    let report = report(&node(1200, &["simulate.micro_batch=2s"]));
    assert_eq!(report.slower_stage, Stage::Drafters);
    assert!((0.98..=1.005).contains(&report.efficiency), "{report}");
    assert!(mean(&report.targets, |a| a.waits["pool_full"]) > 0.1, "{report}");
}

#[test]
fn pull_gives_a_slow_target_less_and_a_rotation_waits_for_it() {
    let slow = node(1200, &[]).target_speed(1, 0.5);
    let pull = report(&slow);
    assert!(pull.efficiency >= 0.97, "{pull}");
    // The bound includes the speed: 4.5 targets instead of 5.
    let whole = report(&node(1200, &[]));
    assert!((pull.bound_tokens_per_second / whole.bound_tokens_per_second - 0.9).abs() < 1e-9);
    assert!((pull.targets[1].units as f64 / pull.targets[0].units as f64 - 0.5).abs() < 0.03, "{pull}");
    for queue_depth in [1, 4, 20] {
        let rotation = report(&slow.clone().policy(Policy::RoundRobin { queue_depth }));
        assert!(rotation.efficiency < 0.6, "{rotation}");
        assert!(rotation.targets[0].waits["job"] > 0.4, "the others wait for the slow one: {rotation}");
        assert_eq!(rotation.jobs.trained, pull.jobs.trained);
    }
}

#[test]
fn a_fast_drafter_takes_more_of_the_tickets() {
    let report = report(&node(600, &["simulate.micro_batch=3s", "simulate.drafter_speeds=[2.0]"]));
    let units: Vec<f64> = report.drafters.iter().map(|drafter| drafter.units as f64).collect();
    assert!((units[0] / units[1] - 2.0).abs() < 0.1, "{units:?}");
    assert_eq!((report.drafters[0].speed, report.drafters[1].speed), (2.0, 1.0));
}

#[test]
fn scale_changes_nothing() {
    let sets = ["pool.max_bytes=600 GiB", "pool.max_batches=256", "pool.min_ready=32"];
    let report = report(&node(4000, &sets).targets(64).drafters(32));
    assert!(report.efficiency >= 0.97, "{report}");
    assert!(report.pool.peak_bytes <= report.pool.max_bytes);
    let text = report.to_string();
    assert!(text.contains("64 targets ") && text.lines().count() < 20, "{text}");
}

#[test]
fn jitter_and_failures_do_what_they_say() {
    let plain = report(&node(600, &["simulate.jitter=0.0"]));
    let jitter = report(&node(600, &["simulate.jitter=0.3"]));
    assert_ne!(plain.virtual_seconds, jitter.virtual_seconds);
    assert_eq!(plain.bound_tokens_per_second, jitter.bound_tokens_per_second);
    // Each failed extraction is repeated: a tenth of the targets' time is lost.
    let failing = report(&node(600, &["simulate.jitter=0.0", "simulate.job_failures=0.1"]));
    let lost = 1.0 - failing.efficiency / plain.efficiency;
    assert!((0.05..0.15).contains(&lost), "{failing}");
    assert!(failing.jobs.trained + failing.jobs.skipped == failing.jobs.planned, "{:?}", failing.jobs);
    // The same jobs fail on every target, and a second attempt is a new draw.
    let sets = ["simulate.job_failures=0.2", "dispatch.max_attempts=2", "dispatch.max_skip_fraction=1.0"];
    let (five, two) = (report(&node(600, &sets)), report(&node(600, &sets).targets(2)));
    assert_eq!(five.jobs, two.jobs);
    // 0.2 of 0.2.
    assert!((12..=36).contains(&five.jobs.skipped), "{:?}", five.jobs);
}

#[test]
fn costs_are_what_the_section_says() {
    let plain = report(&node(300, &["simulate.jitter=0.0"]));
    let busy = |sets: &[&str]| report(&node(300, &[&["simulate.jitter=0.0"], sets].concat()));
    let seconds = |report: &Report, stage: fn(&Report) -> &[Actor]| {
        report.virtual_seconds * stage(report).iter().map(|actor| actor.busy).sum::<f64>()
    };
    let targets: fn(&Report) -> &[Actor] = |report| &report.targets;
    let drafters: fn(&Report) -> &[Actor] = |report| &report.drafters;
    let jobs = plain.jobs.trained as f64;
    // About 2 GB a job at 5 GB/s instead of 50.
    let moved = seconds(&busy(&["simulate.bandwidth=5 GB"]), targets) - seconds(&plain, targets);
    assert!((0.3..0.46).contains(&(moved / jobs)), "{moved}");
    let attention = seconds(&plain, targets) - seconds(&busy(&["simulate.target_attention=0s"]), targets);
    assert!((0.05..0.37).contains(&(attention / jobs)), "{attention}");
    let context = seconds(&busy(&["simulate.per_context_token=10us"]), drafters) - seconds(&plain, drafters);
    assert!((0.35..0.49).contains(&(context / jobs)), "{context}");
    let reduce = busy(&["simulate.reduce=560ms"]);
    let trainer = |report: &Report| report.virtual_seconds * report.trainer.busy / report.steps.count as f64;
    assert!((trainer(&reduce) - trainer(&plain) - 0.5).abs() < 1e-3, "{}", trainer(&reduce));
    let step = busy(&["simulate.step=525ms"]);
    assert!((trainer(&step) - trainer(&plain) - 0.5).abs() < 1e-3, "{}", trainer(&step));
    // Each failed micro-batch is repeated.
    let failing = busy(&["simulate.micro_batch_failures=0.1"]);
    let again = seconds(&failing, drafters) / seconds(&plain, drafters) - 1.0;
    assert!((0.05..0.17).contains(&again) && failing.jobs.trained == plain.jobs.trained, "{again}");
}

/// Work below the clock's tick adds up.
#[test]
fn milliseconds_of_the_clock_are_not_lost() {
    let sets = [
        "simulate.jitter=0.0",
        "simulate.target_per_token=8ns",
        "simulate.target_attention=0s",
        "simulate.bandwidth=0",
    ];
    let report = report(&node(
        600,
        &[&sets[..], &["simulate.micro_batch=100us", "simulate.reduce=0s", "simulate.step=0s"]].concat(),
    ));
    assert!((0.95..1.05).contains(&report.efficiency_with_ends), "{report}");
}

#[test]
fn a_draw_can_be_chosen() {
    let of = |draw| report(&node(1200, &["simulate.median_length=1000"]).draw_policy(draw));
    let (uniform, proportional) = (of(DrawPolicy::Uniform), of(DrawPolicy::Proportional));
    assert_eq!((uniform.draw, proportional.draw), (DrawPolicy::Uniform, DrawPolicy::Proportional));
    assert!(
        proportional.steps.distinct_buckets_mean > uniform.steps.distinct_buckets_mean,
        "{:?} {:?}",
        proportional.steps,
        uniform.steps
    );
    assert!(proportional.steps.length_correlation <= 0.1, "{:?}", proportional.steps);
    let (_, json, errors) = draftmill(&["--config", NODE, "--jobs", "400", "--draw-policy", "replay", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{errors}"));
    assert!(json["draw"] == "replay" && json["jobs"]["trained"] == json["jobs"]["planned"], "{json}");
}

#[test]
fn a_sweep_marks_the_best_split() {
    let sweep: Sweep = "targets=1..7".parse().unwrap();
    let splits = sweep.run(&node(300, &[])).unwrap();
    let counts: Vec<_> = splits.iter().map(|split| (split.report.targets.len(), split.report.drafters.len())).collect();
    assert_eq!(counts, (1..=7).map(|targets| (targets, 8 - targets)).collect::<Vec<_>>());
    let best: Vec<_> = splits.iter().filter(|split| split.best).collect();
    assert_eq!(best.len(), 1);
    assert_eq!(best[0].report.targets.len(), 5);
    assert!(splits.iter().all(|split| split.report.tokens_per_second <= best[0].report.tokens_per_second));

    let (code, table, _) = draftmill(&["--config", NODE, "--jobs", "100", "--sweep", "targets=3,5"]);
    let marked: Vec<_> = table.lines().filter(|line| line.ends_with("<- best")).collect();
    assert!(code == 0 && marked.len() == 1 && marked[0].trim_start().starts_with('5'), "{table}");
    let (_, json, _) = draftmill(&["--config", NODE, "--jobs", "100", "--sweep", "queue-depth=1,4", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json[0]["policy"]["queue_depth"], &json[1]["policy"]["queue_depth"]), (&1.into(), &4.into()));
    assert!(json[0]["efficiency"].is_f64() && json[0]["targets"][4]["units"].is_u64(), "{json}");
}

#[test]
fn without_a_configuration_it_says_something_sensible() {
    let (code, text, errors) = draftmill(&["--jobs", "200"]);
    assert_eq!((code, errors.as_str()), (0, ""));
    assert!(text.starts_with("1 target and 1 drafter: "), "{text}");
    for part in ["bound", "efficiency", "pool", "mix", "who waits for whom", "target 0", "drafter 0", "limit this node"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_policy_and_its_depth_on_the_command_line_are_those_of_the_run() {
    let rotation = |depth: usize| {
        let depth = depth.to_string();
        let policy = ["--policy", "round-robin", "--queue-depth", &depth];
        let slow = ["--set", "simulate.target_speeds=[0.5]"];
        let arguments = [&["--config", NODE, "--jobs", "300", "--json"][..], &policy, &slow].concat();
        serde_json::from_str::<Value>(&draftmill(&arguments).1).unwrap()
    };
    for depth in [1, 20] {
        let mut json = rotation(depth);
        assert_eq!(json["policy"], serde_json::json!({"name": "round-robin", "queue_depth": depth}));
        let policy = Policy::RoundRobin { queue_depth: depth };
        json["wall_seconds"] = 0.0.into();
        let expected = figures(&node(300, &["simulate.target_speeds=[0.5]"]).policy(policy));
        assert_eq!(json, serde_json::from_str::<Value>(&expected).unwrap());
    }
    // A shallow queue blocks earlier than a deep one.
    assert_ne!(rotation(1)["virtual_seconds"], rotation(20)["virtual_seconds"]);
}

#[test]
fn workers_on_the_command_line_win() {
    let (_, json, _) = draftmill(&["--config", NODE, "--jobs", "100", "--targets", "2", "--drafters", "1", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json["targets"].as_array().unwrap().len(), json["drafters"].as_array().unwrap().len()), (2, 1));
}

#[test]
fn lengths_can_come_from_a_prepared_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("data.store={}", folder.path().join("store.safetensors").display());
    let sets = ["--config", "configs/smoke.toml", "--set", &store];
    let prepared = Command::new(env!("CARGO_BIN_EXE_draftmill")).arg("prepare").args(sets).current_dir(root()).output();
    assert!(prepared.unwrap().status.success());
    let sets = [&sets[..], &["--set", "simulate.feature_bytes_per_token=1 KiB", "--json"]].concat();
    let simulated = [&sets[..], &["--set", "simulate.lengths=store", "--set", "run.epochs=1"]].concat();
    let (code, json, errors) = draftmill(&simulated);
    assert_eq!(code, 0, "{errors}");
    let json: Value = serde_json::from_str(&json).unwrap();
    let check = Command::new(env!("CARGO_BIN_EXE_draftmill"))
        .args(["check", "--set", "run.engine=simulated"])
        .args(sets)
        .current_dir(root())
        .output();
    let plan: Value = serde_json::from_slice(&check.unwrap().stdout).unwrap();
    assert_eq!(json["jobs"]["planned"], plan["plan"]["jobs_per_epoch"], "{json}");
    assert_eq!(json["padding_share"], plan["plan"]["padding_share"]);
}

#[test]
fn what_cannot_work_is_refused_with_a_sentence() {
    for (arguments, exit, part) in [
        (&["--targets", "0"][..], Exit::Config, "0 targets and 3 drafters cannot train; use at least one of each"),
        (&["--drafters", "5000"], Exit::Config, "more than one process can run; use at most 1,000 of each"),
        (&["--sweep", "targets=1..8"], Exit::Usage, "of 8 workers 0 are left as drafters"),
        (&["--sweep", "targets=x"], Exit::Usage, "is not a list of numbers; write targets=1..7"),
        (&["--policy", "push"], Exit::Usage, "pull, round-robin"),
        (&["--policy", "round-robin", "--queue-depth", "0"], Exit::Config, "a queue depth of 0 holds no job"),
        (&["--draw-policy", "best"], Exit::Config, "pool.draw_policy"),
        (&["--set", "pool.max_bytes=10 GiB"], Exit::Config, "8 x 2400 MiB = 19200 MiB is more than 10 GiB; raise it"),
        (&["--set", "pool.min_ready=25"], Exit::Config, "the pool holds at most pool.max_batches = 24"),
        (&["--set", "optimizer.accumulation=5000"], Exit::Config, "no step would ever be complete"),
        (&["--set", "simulate.micro_batch=0s"], Exit::Config, "a stage takes no time, so its speed is undefined"),
        (&["--set", "simulate.lengths=store", "--set", "data.store=nowhere"], Exit::Data, "nowhere does not exist"),
        (&["--set", "simulate.job_failures=0.8"], Exit::Run, "a simulated failure of an extraction"),
        (&["--set", "simulate.jitter=2.0"], Exit::Config, "out of range for a relative standard deviation"),
    ] {
        let (code, out, errors) = draftmill(&[&["--config", NODE, "--jobs", "200"], arguments].concat());
        assert_eq!(code, i32::from(exit.code()), "{arguments:?}: {errors}");
        assert!(out.is_empty() && errors.contains(part), "{arguments:?}: {part}\n is not in\n{errors}");
    }
}
