//! `make bench`: efficiency in the simulator, overhead of the real pipeline beside a plain Python one, latency of a draw.

mod free;
mod machine;
mod pipeline;

use machine::{Failed, Outcome};
use std::process::ExitCode;
use tokio::runtime::{Builder, Runtime};

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn two_workers() -> Outcome<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(std::env::var("W").ok().and_then(|w| w.parse().ok()).unwrap_or(2))
        .enable_all()
        .build()
        .failed("start the runtime")
}

fn bench() -> Outcome<()> {
    let setup = pipeline::Setup {
        samples: 250_000,
        targets: 5,
        drafters: 3,
        accumulation: 4,
        buckets: 8,
        job_tokens: 2048,
        max_batches: 16,
        min_ready: 4,
    };
    let histograms: Vec<_> = draftmill_actors::metrics::TABLE
        .iter()
        .filter(|s| !s.buckets.is_empty())
        .map(|s| (s.name, s.buckets))
        .collect();
    let _h = if std::env::var_os("NOMETRICS").is_none() {
        Some(draftmill::admin::install_recorder(&histograms).failed("install the metrics")?)
    } else {
        None
    };
    let runtime = two_workers()?;
    for i in 0..std::env::var("R").ok().and_then(|w| w.parse().ok()).unwrap_or(3) {
        let folder = std::path::Path::new("target/bench-run").join(i.to_string());
        let _ = std::fs::remove_dir_all(&folder);
        let m = if std::env::var_os("BLOCK").is_some() {
            pipeline::run::<true>(&runtime, &setup, &folder)?
        } else {
            pipeline::run::<false>(&runtime, &setup, &folder)?
        };
        println!("{m:?} {}", m.jobs_per_second());
    }
    Ok(())
}
