//! What the planner asks of the disk: the plan before its first job leaves, and what became of every job.

use super::plan::Plan;
use crate::messages::types::{JobId, Outcome};

/// Keeps plans and outcomes. Calls come from one writer, on a blocking thread. What a call wrote survives the death of the
/// process; plans and checkpoints, with every outcome before them, also survive a loss of power.
/// Errors are sentences that name the file and the remedy.
pub trait Ledger: Send + 'static {
    /// Whether calls wait for the disk and belong on a blocking thread. `false` where they return at once: then they are made
    /// in place, which is cheaper, and a simulation stays a function of its seed.
    const BLOCKING: bool = true;

    /// Writes the plan of an epoch, unless that epoch is already there: then compares it, and an `Err` names the difference.
    /// Returns for each job of the plan whether it already has an outcome.
    fn begin_epoch(&mut self, plan: &Plan) -> Result<Vec<bool>, String>;

    /// Records outcomes in one transaction. A job that already has an outcome is an error (D1).
    fn record(&mut self, outcomes: &[(JobId, Outcome)]) -> Result<(), String>;

    /// Makes a checkpoint exist. Called after the outcomes of its step are recorded.
    fn checkpoint(&mut self, step: u64, name: &str) -> Result<(), String>;

    /// Keeps what a person may want to know later.
    fn note(&mut self, note: &Note) -> Result<(), String>;
}

/// Something that happened to the run, beside its jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Settings that got other values after `step`.
    Changed {
        step: u64,
        changes: Vec<Change>,
    },
    Event {
        kind: String,
        text: String,
    },
}

/// A setting that got another value. Values are text, as TOML writes them.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Change {
    /// section.key
    pub key: String,
    pub old: String,
    pub new: String,
}

/// A ledger in memory, for tests and simulation.
#[derive(Debug, Default)]
pub struct MemoryLedger {
    pub plans: Vec<Plan>,
    pub outcomes: std::collections::BTreeMap<JobId, Outcome>,
    pub checkpoints: Vec<(u64, String)>,
    pub notes: Vec<Note>,
}

impl Ledger for MemoryLedger {
    const BLOCKING: bool = false;

    fn begin_epoch(&mut self, plan: &Plan) -> Result<Vec<bool>, String> {
        match self.plans.iter().find(|p| p.epoch == plan.epoch) {
            Some(old) if old != plan => return Err(format!("epoch {} was planned differently before", plan.epoch)),
            Some(_) => {}
            None => self.plans.push(plan.clone()),
        }
        Ok(plan.jobs.iter().map(|j| self.outcomes.contains_key(&j.id)).collect())
    }

    fn record(&mut self, outcomes: &[(JobId, Outcome)]) -> Result<(), String> {
        for (job, outcome) in outcomes {
            if let Some(old) = self.outcomes.insert(*job, outcome.clone()) {
                return Err(format!("job {job} already ended as {old:?}"));
            }
        }
        Ok(())
    }

    fn checkpoint(&mut self, step: u64, name: &str) -> Result<(), String> {
        self.checkpoints.push((step, name.to_owned()));
        Ok(())
    }

    fn note(&mut self, note: &Note) -> Result<(), String> {
        self.notes.push(note.clone());
        Ok(())
    }
}
