//! `draftmill simulate`: the real actors on a clock that jumps, with engines that sleep by a cost model. It tells how a node would
//! do before it is rented.
//!
//! ```text
//! configuration ──Scenario──▶ lengths ──▶ planner, dispatcher, targets, pool, drafters, trainer ──▶ Report
//! ```
//! A report is a function of the scenario alone, but for the time that it took: padding and ledger never leave the one thread
//! (`BatchSource::BLOCKING` and `Ledger::BLOCKING` are false), and nothing waits for a real clock.

mod figures;
mod lengths;
mod node;
mod report;
mod sweep;
mod text;

pub use self::{
    report::{Actor, Jobs, Pool, Report, Stage, Steps},
    sweep::{Split, Sweep},
    text::table,
};

use crate::engines::costs::costs;
use crate::{
    common::exit::{Exit, Failure},
    config::{Config, Device, Loaded},
};
use draftmill_actors::{planner, pool::Draw};
use serde::Serialize;
use std::{fmt, sync::Arc};
use tokio::time::Instant;

/// Of each kind: the dispatcher's leases and the inboxes of pool and trainer hold as many.
const MOST_WORKERS: usize = 1000;

/// A node and its work, ready to be simulated. Made from a configuration; change what differs, then [`run`] it.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Number of targets and drafters, costs, pool, plan: all of it counts, but for devices and models.
    pub loaded: Loaded,
    pub policy: Policy,
}

/// Who gets the next job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "name", rename_all = "kebab-case")]
pub enum Policy {
    /// Whichever target asks: what `draftmill train` does.
    #[default]
    Pull,
    /// A fixed rotation over a queue of `queue_depth` jobs for each target, for comparison.
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

    /// That many jobs in an epoch, give or take a hundredth, in the place of `simulate.jobs`.
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

    /// The speed of one target (1 = as the cost model says, 0.5 = half as fast).
    pub fn target_speed(mut self, index: usize, speed: f64) -> Scenario {
        let speeds = &mut self.loaded.config.simulate.target_speeds;
        speeds.resize(speeds.len().max(index + 1), 1.0);
        speeds[index] = speed;
        self
    }

    pub fn draw(mut self, draw: Draw) -> Scenario {
        self.loaded.config.pool.draw_policy = draw;
        self
    }

    /// What the rules of the configuration have not seen because it was changed afterwards, and what would take no time at all.
    fn check(&self) -> Result<(), Failure> {
        let Config { target, drafter, simulate, optimizer, .. } = &self.loaded.config;
        let (targets, drafters) = (target.devices.len(), drafter.devices.len());
        let micro_batches = drafters.saturating_mul(optimizer.accumulation as usize);
        let costs = costs(&self.loaded.config);
        let refused = if targets == 0 || drafters == 0 {
            format!("{targets} targets and {drafters} drafters train nothing; give at least one of each")
        } else if targets > MOST_WORKERS || drafters > MOST_WORKERS {
            format!(
                "{targets} targets and {drafters} drafters are more than one process can feed; give at most {MOST_WORKERS} of each"
            )
        } else if micro_batches > planner::IN_FLIGHT / 2 {
            format!(
                "{drafters} drafters times optimizer.accumulation = {} are {micro_batches} micro-batches a step, more than can be \
                 under way at once; lower one of them so that they are at most {}",
                optimizer.accumulation,
                planner::IN_FLIGHT / 2
            )
        } else if matches!(self.policy, Policy::RoundRobin { queue_depth: 0 }) {
            "queues of 0 jobs hold nothing; give --queue-depth 1 or more".to_owned()
        } else if simulate.jobs == 0 {
            "0 jobs are nothing to simulate; give at least 1".to_owned()
        } else if costs.extract_seconds(1, 1, 1) <= 0.0 || costs.micro_batch_seconds(1) <= 0.0 {
            "a stage whose work takes no time has no speed; set simulate.target_per_token and simulate.micro_batch"
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
            Policy::RoundRobin { queue_depth } => write!(f, "round-robin, queues of {queue_depth}"),
        }
    }
}

/// Runs a scenario to its end. Must not be called inside a tokio runtime: it starts one with a clock of its own.
pub fn run(scenario: &Scenario) -> Result<Report, Failure> {
    // Outside a runtime tokio's clock is the real one.
    let began = Instant::now();
    scenario.check()?;
    let lengths: Arc<[u32]> = lengths::lengths(&scenario.loaded.config)?.into();
    let mut report = node::run(scenario, &lengths)?;
    report.wall_seconds = began.elapsed().as_secs_f64();
    Ok(report)
}
