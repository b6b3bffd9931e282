//! Ledger interface: stores the plan before its first job leaves, and the outcome of every job.

use super::plan::Plan;
use crate::messages::types::{JobId, Outcome};

/// Store of plans and outcomes. One writer calls it on a blocking thread. Written data survive the death of the
/// process. Plans and checkpoints, with every outcome before them, also survive a power loss.
///
/// # Errors
///
/// Errors are sentences that name the file and the remedy. Any error ends the run.
pub trait Ledger: Send + 'static {
    /// Selects a blocking thread for the calls. Set it to `false` if calls return at once: they then run in place,
    /// which is cheaper and keeps a simulation a function of its seed.
    const BLOCKING: bool = true;

    /// Writes the plan of an epoch, or compares it if that epoch is already stored. Returns for each job of the plan if
    /// it has an outcome.
    ///
    /// # Errors
    ///
    /// Fails if the stored plan differs, and names the difference.
    fn begin_epoch(&mut self, plan: &Plan) -> Result<Vec<bool>, String>;

    /// Records outcomes in one transaction.
    ///
    /// # Errors
    ///
    /// Fails if a job already has an outcome (D1).
    fn record(&mut self, outcomes: &[(JobId, Outcome)]) -> Result<(), String>;

    /// Makes a checkpoint exist, after the outcomes of its steps are recorded.
    ///
    /// # Errors
    ///
    /// Fails if the disk fails.
    fn checkpoint(&mut self, step: u64, name: &str) -> Result<(), String>;

    /// Stores a note on the run for later inspection.
    ///
    /// # Errors
    ///
    /// Fails if the disk fails.
    fn note(&mut self, note: &Note) -> Result<(), String>;
}

/// Event of the run that concerns no job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Settings changed after `step`.
    Changed {
        step: u64,
        changes: Vec<Change>,
    },
    Event {
        kind: String,
        text: String,
    },
}

/// Changed setting. Values are text in TOML syntax.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Change {
    /// Key as `section.key`.
    pub key: String,
    pub old: String,
    pub new: String,
}

/// In-memory ledger, for tests and simulation.
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
