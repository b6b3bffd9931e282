//! `draftmill simulate`.

use super::{ConfigArgs, SimulateArgs, output};
use crate::{
    common::exit::Failure,
    config::Loaded,
    simulate::{self, Policy, Scenario},
};

/// Simulates one node or a sweep, and prints the report.
pub fn run(args: &SimulateArgs, loaded: Loaded) -> Result<(), Failure> {
    let scenario = scenario(args, loaded);
    match &args.sweep {
        Some(sweep) => {
            let splits = sweep.run(&scenario)?;
            if args.json { output::print_json(&splits) } else { output::print(&simulate::table(&splits)) }
        }
        None => {
            let report = simulate::run(&scenario)?;
            if args.json { output::print_json(&report) } else { output::print(&report.to_string()) }
        }
    }
}

/// Returns the configuration arguments, with `--draw-policy` as an override.
pub fn config(args: &SimulateArgs) -> ConfigArgs {
    let mut config = args.config.clone();
    config.set.extend(args.draw_policy.iter().map(|draw| format!("pool.draw_policy={draw}")));
    config
}

/// Applies the command line's options to the configuration.
fn scenario(args: &SimulateArgs, loaded: Loaded) -> Scenario {
    let mut scenario = Scenario::new(loaded).policy(match args.policy {
        PolicyName::Pull => Policy::Pull,
        PolicyName::RoundRobin => Policy::RoundRobin { queue_depth: args.queue_depth },
    });
    if let Some(count) = args.targets {
        scenario = scenario.targets(count);
    }
    if let Some(count) = args.drafters {
        scenario = scenario.drafters(count);
    }
    if let Some(jobs) = args.jobs {
        scenario = scenario.jobs(jobs);
    }
    scenario
}

/// Dispatch policy on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyName {
    /// The next free target takes the next job
    Pull,
    /// Fixed rotation over one queue of --queue-depth jobs per target, for comparison
    RoundRobin,
}
