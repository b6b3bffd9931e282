//! `make bench`: efficiency in the simulator, overhead of the pipeline compared with Python, latency of a draw, and the
//! cost of durability.

#[cfg(feature = "torch")]
mod checkpoint;
#[cfg(feature = "torch")]
mod copies;
mod draw;
#[cfg(feature = "torch")]
mod extract;
mod free;
#[cfg(feature = "torch")]
mod gpu;
#[cfg(feature = "torch")]
mod heads;
mod ledger;
mod machine;
#[cfg(feature = "torch")]
mod optimizer;
#[cfg(feature = "torch")]
mod parity;
mod pipeline;
#[cfg(feature = "torch")]
mod pressure;
#[cfg(feature = "torch")]
mod products;
mod queue;
#[cfg(feature = "torch")]
mod sampled;
mod sim;
#[cfg(feature = "torch")]
mod step;
mod table;
#[cfg(feature = "torch")]
mod widths;

use draftmill::simulate::{Policy, Report};
use draftmill_actors::runtime::metrics;
use machine::{Failed, Outcome, median};
use pipeline::Setup;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};
use table::{
    Table,
    Target::{AtLeast, Below, None as Reported},
};
use tokio::runtime::{Builder, Runtime};

/// Alternating runs of each pipeline; the result is the median.
const REPETITIONS: usize = 5;
const DRAWS: usize = 60_000;
const PACED_DRAWS: usize = 2_000;

/// Scenario of about 110 000 jobs, with the default pool.
const SETUP: Setup = Setup {
    samples: 450_000,
    targets: 5,
    drafters: 3,
    accumulation: 4,
    buckets: 8,
    job_tokens: 2048,
    max_batches: 16,
    min_ready: 4,
};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["--scale", jobs] => jobs.parse().failed("read the number of jobs").and_then(scale_child),
        ["--pipeline"] => profile(),
        ["--losses"] => {
            let mut table = Table::default();
            losses(&mut table).map(|()| println!("{}", table.text()))
        }
        #[cfg(feature = "torch")]
        ["--step", ref options @ ..] => step::run(options),
        #[cfg(feature = "torch")]
        ["--heads", ref options @ ..] => heads::run(options),
        #[cfg(feature = "torch")]
        ["--optimizer", ref options @ ..] => optimizer::run(options),
        #[cfg(feature = "torch")]
        ["--products", ref options @ ..] => products::run(options),
        #[cfg(feature = "torch")]
        ["--extract", ref options @ ..] => extract::run(options),
        #[cfg(feature = "torch")]
        ["--copies", ref options @ ..] => copies::run(options),
        #[cfg(feature = "torch")]
        ["--parity", ref options @ ..] => parity::run(options),
        #[cfg(feature = "torch")]
        ["--pressure", ref options @ ..] => pressure::run(options),
        #[cfg(feature = "torch")]
        ["--gpu", ref options @ ..] => gpu::run(options),
        [] => bench(),
        _ => Err(
            "give no argument for the whole table, --pipeline for one run of the pipeline alone, or --losses for what \
                  ledger and checkpoints cost"
                .into(),
        ),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn scale_child(jobs: u32) -> Outcome<()> {
    println!("{}", serde_json::to_string(&sim::scale(jobs)?).failed("write the figures")?);
    Ok(())
}

/// Runs one pipeline for a profiler.
fn profile() -> Outcome<()> {
    install_metrics()?;
    let measured = pipeline::run::<false>(&two_workers()?, &SETUP, &folder("profile")?)?;
    println!("{} jobs, {:.0} jobs/s", measured.jobs, measured.jobs_per_second());
    Ok(())
}

fn bench() -> Outcome<()> {
    let machine = machine::describe();
    let mut table = Table::default();
    let mut details = serde_json::Map::new();
    // Measured first, while the machine is idle, with the recorder of a real run.
    install_metrics()?;
    let runtime = two_workers()?;
    pipelines(&runtime, &mut table, &mut details)?;
    draws(&runtime, &mut table)?;
    queues(&mut table)?;
    drop(runtime);
    simulations(&mut table, &mut details)?;
    scales(&mut table, &mut details)?;
    losses(&mut table)?;
    println!("machine: {machine}\n\n{}", table.text());
    let path = target().join("bench.json");
    let text = serde_json::to_string_pretty(&table.json(machine, details.into())).failed("write the figures")?;
    fs::write(&path, text + "\n").failed("write target/bench.json")
}

fn pipelines(runtime: &Runtime, table: &mut Table, details: &mut serde_json::Map<String, Value>) -> Outcome<()> {
    let mut ours = (Vec::new(), Vec::new());
    let mut theirs = (Vec::new(), Vec::new());
    for repetition in 0..REPETITIONS {
        eprintln!("bench: pipelines, repetition {} of {REPETITIONS}", repetition + 1);
        ours.0.push(pipeline::run::<false>(runtime, &SETUP, &folder("ours")?)?.jobs_per_second());
        theirs.0.push(python(false)?);
        ours.1.push(pipeline::run::<true>(runtime, &SETUP, &folder("ours")?)?.jobs_per_second());
        theirs.1.push(python(true)?);
    }
    details.insert("pipeline_jobs_per_second".into(), json!(ours.0));
    details.insert("python_jobs_per_second".into(), json!(theirs.0));
    details.insert("pipeline_with_calls_jobs_per_second".into(), json!(ours.1));
    details.insert("python_with_calls_jobs_per_second".into(), json!(theirs.1));
    // Ratio of a pair: both ran on the same machine at about the same time.
    let ratio = |(a, b): (&[f64], &[f64])| median(a.iter().zip(b).map(|(a, b)| a / b).collect());
    let ratios = (ratio((&ours.0, &theirs.0)), ratio((&ours.1, &theirs.1)));
    let of = "median of 5";
    table.row("pipeline_jobs_per_second", median(ours.0), AtLeast(20_000.0), format!("{of}, engines in place"));
    table.row("python_jobs_per_second", median(theirs.0), Reported, format!("{of}, the same"));
    table.row("pipeline_to_python", ratios.0, AtLeast(10.0), "median of the pairs".into());
    table.row(
        "pipeline_with_calls_jobs_per_second",
        median(ours.1),
        Reported,
        format!("{of}, a blocking thread per call"),
    );
    table.row("python_with_calls_jobs_per_second", median(theirs.1), Reported, format!("{of}, a call into C per call"));
    table.row("pipeline_to_python_with_calls", ratios.1, Reported, "median of the pairs".into());
    Ok(())
}

/// Returns the jobs per second of `pipeline.py`.
fn python(leave_interpreter: bool) -> Outcome<f64> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/pipeline.py");
    let folder = folder("python")?;
    fs::create_dir_all(&folder).failed("make a folder")?;
    let mut command = Command::new("python3");
    command.arg(script).arg("--folder").arg(folder);
    for (name, value) in [
        ("--samples", SETUP.samples),
        ("--targets", SETUP.targets),
        ("--drafters", SETUP.drafters),
        ("--accumulation", SETUP.accumulation),
        ("--buckets", SETUP.buckets),
        ("--job-tokens", SETUP.job_tokens as usize),
        ("--max-batches", SETUP.max_batches),
        ("--min-ready", SETUP.min_ready),
    ] {
        command.args([name, &value.to_string()]);
    }
    if leave_interpreter {
        command.arg("--leave-interpreter");
    }
    let output = command.output().failed("start python3")?;
    if !output.status.success() {
        return Err(format!("benches/pipeline.py failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let report: Value = serde_json::from_slice(&output.stdout).failed("read what benches/pipeline.py printed")?;
    report["jobs_per_second"].as_f64().ok_or_else(|| "benches/pipeline.py told no jobs_per_second".to_owned())
}

fn draws(runtime: &Runtime, table: &mut Table) -> Outcome<()> {
    let busy = draw::run(runtime, DRAWS, None)?;
    let paced = draw::run(runtime, PACED_DRAWS, Some(Duration::from_millis(1)))?;
    let worse = |l: &draw::Latencies| draw::p99_us(&l.asked).max(draw::p99_us(&l.filled));
    table.row("draw_p99_us", worse(&busy), Below(200.0), format!("the worse of the next two, {DRAWS} draws each"));
    table.row("draw_asked_p99_us", draw::p99_us(&busy.asked), Reported, "a batch is ready, a draw comes".into());
    table.row("draw_filled_p99_us", draw::p99_us(&busy.filled), Reported, "a draw waits, a batch comes".into());
    table.row(
        "draw_paced_p99_us",
        worse(&paced),
        Reported,
        format!("the worse of both, {PACED_DRAWS} draws 1 ms apart"),
    );
    Ok(())
}

/// Measures the dispatcher's decisions with a short queue and a long one.
fn queues(table: &mut Table) -> Outcome<()> {
    let (short, long, ratio) = queue::run()?;
    let note = |jobs| format!("decisions of the dispatcher for one job with {jobs} jobs in the queue");
    table.row("dispatch_us_per_job_short_queue", short * 1e6, Reported, note(queue::SHORT));
    table.row("dispatch_us_per_job_long_queue", long * 1e6, Reported, note(queue::LONG));
    table.row("dispatch_long_to_short", ratio, Below(3.0), "median of the pairs".into());
    Ok(())
}

fn simulations(table: &mut Table, details: &mut serde_json::Map<String, Value>) -> Outcome<()> {
    let round_robin = [1, 4, 20].map(|queue_depth| (queue_depth, Policy::RoundRobin { queue_depth }));
    let pull = sim::policy(Policy::Pull)?;
    let bound =
        |report: &Report| format!("bound by {:?}, the other {:.3} faster", report.slower_stage, report.imbalance);
    table.row("sim_pull", pull.efficiency, AtLeast(0.98), bound(&pull));
    table.row("sim_pull_with_ends", pull.efficiency_with_ends, AtLeast(0.96), "fill and drain included".into());
    for (depth, policy) in round_robin {
        let report = sim::policy(policy)?;
        table.row(&format!("sim_round_robin_depth_{depth}"), report.efficiency, Reported, bound(&report));
    }
    let slow = sim::slow_target(Policy::Pull)?;
    table.row("sim_slow_target", slow.efficiency, AtLeast(0.97), format!("one target at half speed, {}", bound(&slow)));
    for (depth, policy) in round_robin {
        let name = format!("sim_slow_target_round_robin_depth_{depth}");
        table.row(&name, sim::slow_target(policy)?.efficiency, Reported, "the same".into());
    }
    details.insert("sim_pull".into(), json!(pull));
    Ok(())
}

fn scales(table: &mut Table, details: &mut serde_json::Map<String, Value>) -> Outcome<()> {
    let mut runs = Vec::new();
    for jobs in sim::SIZES {
        // Short wall times are noisy; memory is not.
        let mut tries = (0..3).map(|_| sim::scale_in_child(jobs)).collect::<Outcome<Vec<_>>>()?;
        tries.sort_by(|a, b| a.wall_seconds.total_cmp(&b.wall_seconds));
        runs.push(tries[1]);
    }
    details.insert("sim_scale".into(), json!(runs));
    let [small, middle, large] = [runs[0], runs[1], runs[2]];
    let wall: fn(sim::Scale) -> f64 = |run| run.wall_seconds / run.jobs as f64 * 1e6;
    let cpu: fn(sim::Scale) -> f64 = |run| run.cpu_seconds / run.jobs as f64 * 1e6;
    let memory: fn(sim::Scale) -> f64 = |run| run.rss_peak.saturating_sub(run.rss_before) as f64 / run.jobs as f64;
    table.row("sim_scale", large.efficiency, AtLeast(0.97), "64 targets, 32 drafters, 200 000 jobs".into());
    for (name, run) in [("1e3", small), ("1e4", middle), ("2e5", large)] {
        table.row(&format!("sim_scale_wall_us_per_job_{name}"), wall(run), Reported, "median of 3".into());
        table.row(&format!("sim_scale_cpu_us_per_job_{name}"), cpu(run), Reported, "of the same run".into());
        table.row(&format!("sim_scale_bytes_per_job_{name}"), memory(run), Reported, "peak above the start".into());
    }
    // Compared with the cheaper of the two small runs, as start-up dominates the smallest.
    let growth = |cost: fn(sim::Scale) -> f64| cost(large) / cost(small).min(cost(middle));
    let note = || "2e5 jobs to the cheaper of 1e3 and 1e4; flat is 1".to_owned();
    table.row("sim_scale_wall_growth", growth(wall), Below(1.5), note());
    table.row("sim_scale_cpu_growth", growth(cpu), Reported, "the same in time on a core".into());
    table.row("sim_scale_memory_growth", growth(memory), Below(1.5), note());
    Ok(())
}

/// Measures the cost of ledger and checkpoints.
fn losses(table: &mut Table) -> Outcome<()> {
    let jobs = f64::from(ledger::JOBS_PER_STEP);
    let (mean, middle) = ledger::record(&folder("record")?)?;
    let note = format!("recording a step of {jobs} jobs, mean of 2000, to the time of the step");
    table.row("ledger_percent_at_20_jobs_per_second", mean * 20.0 / jobs * 100.0, Below(1.0), note);
    table.row("ledger_step_us", middle * 1e6, Reported, "median".into());
    let million = folder("million")?;
    let saved = ledger::million(&million)?;
    let (seconds, reopened) = ledger::open(&million, saved)?;
    table.row("open_million_jobs_seconds", seconds, Below(2.0), format!("{reopened} of them reopened"));
    fs::remove_dir_all(&million).failed("empty a folder")?;
    #[cfg(feature = "torch")]
    {
        let saves = folder("checkpoints")?;
        fs::create_dir_all(&saves).failed("make a folder")?;
        let costs = checkpoint::run(&two_workers()?, &saves)?;
        fs::remove_dir_all(&saves).failed("empty a folder")?;
        let whole = format!("to a step with one micro-batch of 512 slots, {:.1} s", costs.step);
        table.row("checkpoint_stall_steps", costs.stall / costs.step, Below(1.0), whole);
        let update = format!("to an update alone, {:.1} s", costs.update);
        table.row("checkpoint_stall_updates", costs.stall / costs.update, Reported, update);
        table.row("checkpoint_stall_seconds", costs.stall, Reported, "drafter of 1 GiB, moments 2 GiB".into());
        let beside = format!("a step during the write to a step alone; written after {:.1} s", costs.written);
        table.row("checkpoint_step_beside", costs.step_beside / costs.step, Reported, beside);
    }
    Ok(())
}

fn two_workers() -> Outcome<Runtime> {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().failed("start the runtime")
}

/// Installs the recorder of a real run: its cost is part of the overhead.
fn install_metrics() -> Outcome<()> {
    let histograms: Vec<_> =
        metrics::TABLE.iter().filter(|spec| !spec.buckets.is_empty()).map(|spec| (spec.name, spec.buckets)).collect();
    draftmill::admin::install_recorder("bench", &histograms).failed("install the metrics recorder").map(drop)
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target")
}

/// Creates an empty folder for a ledger.
fn folder(name: &str) -> Outcome<PathBuf> {
    let folder = target().join("bench").join(name);
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).failed("empty a folder of the last run")
        }
        _ => Ok(folder),
    }
}
