//! `draftmill simulate`: runs the real actors on a simulated clock, with engines that sleep by a cost model. It predicts the
//! throughput of a node.
//!
//! ```text
//! configuration ──Scenario──▶ lengths ──▶ planner, dispatcher, targets, pool, drafters, trainer ──▶ Report
//! ```
//! A report is a function of the scenario, except for `wall_seconds`. Padding and ledger run on the one thread
//! (`BatchSource::BLOCKING` and `Ledger::BLOCKING` are false), and no actor waits for a real clock.

mod lengths;
mod node;
mod report;
mod stats;
mod sweep;
mod text;

pub use self::{
    report::{Actor, Jobs, Pool, Report, Stage, Steps},
    sweep::{Split, Sweep},
    text::table,
};

use crate::{
    common::{
        exit::{Exit, Failure},
        text::{counted, grouped},
    },
    config::{Config, Device, Loaded},
    engines::costs::costs,
};
use draftmill_actors::{planner, pool::DrawPolicy};
use serde::Serialize;
use std::{fmt, sync::Arc};
use tokio::time::Instant;

/// Maximum of targets, and of drafters. The dispatcher's leases and the inboxes of pool and trainer hold this number.
const MAX_WORKERS: usize = 1000;

/// Node and workload of a simulation, made from a configuration.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Configuration. Devices count by number only, and models have no effect.
    pub loaded: Loaded,
    pub policy: Policy,
}

/// Dispatch policy of jobs to targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "name", rename_all = "kebab-case")]
pub enum Policy {
    /// The next free target takes the next job, as in `draftmill train`.
    #[default]
    Pull,
    /// Fixed rotation over one queue of `queue_depth` jobs per target, for comparison.
    RoundRobin { queue_depth: usize },
}

impl Scenario {
    pub fn new(loaded: Loaded) -> Scenario {
        Scenario { loaded, policy: Policy::Pull }
    }

    pub fn policy(mut self, policy: Policy) -> Scenario {
        self.policy = policy;
        self
    }

    /// Replaces `simulate.jobs`.
    pub fn jobs(mut self, jobs: u32) -> Scenario {
        self.loaded.config.simulate.jobs = jobs;
        self
    }

    pub fn targets(mut self, count: usize) -> Scenario {
        self.loaded.config.target.devices = vec![Device::Cpu; count];
        self
    }

    pub fn drafters(mut self, count: usize) -> Scenario {
        self.loaded.config.drafter.devices = vec![Device::Cpu; count];
        self
    }

    /// Sets the speed factor of one target: 1 = as in the cost model, 0.5 = half the speed.
    pub fn target_speed(mut self, index: usize, speed: f64) -> Scenario {
        let speeds = &mut self.loaded.config.simulate.target_speeds;
        speeds.resize(speeds.len().max(index + 1), 1.0);
        speeds[index] = speed;
        self
    }

    pub fn draw_policy(mut self, draw_policy: DrawPolicy) -> Scenario {
        self.loaded.config.pool.draw_policy = draw_policy;
        self
    }

    /// Checks the changes made after the rules of the configuration, and costs that are zero.
    fn check(&self) -> Result<(), Failure> {
        let Config { target, drafter, simulate, optimizer, .. } = &self.loaded.config;
        let (targets, drafters) = (target.devices.len(), drafter.devices.len());
        let micro_batches = drafters.saturating_mul(optimizer.accumulation as usize);
        let costs = costs(&self.loaded.config);
        let refused = if targets == 0 || drafters == 0 {
            format!("{targets} targets and {drafters} drafters cannot train; use at least one of each")
        } else if targets > MAX_WORKERS || drafters > MAX_WORKERS {
            format!(
                "{} and {} are more than one process can run; use at most {} of each",
                counted(targets as u64, "target"),
                counted(drafters as u64, "drafter"),
                grouped(MAX_WORKERS as u64)
            )
        } else if micro_batches > planner::IN_FLIGHT / 2 {
            format!(
                "{drafters} drafters x optimizer.accumulation = {} are {micro_batches} micro-batches per step, more than can be \
                 in flight; lower one of them for at most {}",
                optimizer.accumulation,
                planner::IN_FLIGHT / 2
            )
        } else if matches!(self.policy, Policy::RoundRobin { queue_depth: 0 }) {
            "a queue depth of 0 holds no job; set --queue-depth to at least 1".to_owned()
        } else if simulate.jobs == 0 {
            "there are 0 jobs to simulate; set --jobs to at least 1".to_owned()
        } else if costs.extract_seconds(1, 1, 1) <= 0.0 || costs.micro_batch_seconds(1) <= 0.0 {
            "a stage takes no time, so its speed is undefined; set simulate.target_per_token and simulate.micro_batch"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::new(Exit::Config, refused))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::Pull => f.write_str("pull"),
            Policy::RoundRobin { queue_depth } => write!(f, "round-robin, queue depth {queue_depth}"),
        }
    }
}

/// Simulates a scenario. It starts a tokio runtime with a separate clock.
///
/// # Errors
/// If the scenario is invalid, the store cannot be read, or the run fails.
///
/// # Panics
/// Inside a tokio runtime.
pub fn run(scenario: &Scenario) -> Result<Report, Failure> {
    // Outside a runtime, tokio's clock is the real one.
    let began = Instant::now();
    scenario.check()?;
    let lengths: Arc<[u32]> = lengths::lengths(&scenario.loaded.config)?.into();
    let mut report = node::run(scenario, &lengths)?;
    report.wall_seconds = began.elapsed().as_secs_f64();
    Ok(report)
}
