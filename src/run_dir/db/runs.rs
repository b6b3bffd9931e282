//! Starts of `train` on a run folder: resume point, reopened jobs, changed settings and end of each.

use super::{ConfigChange, Problem, StateDb, StateError, StateReader, Synced, now_ms, unsigned::Unsigned};
use rusqlite::{Connection, Row, Transaction, params};
use serde::Serialize;

/// Inputs of a start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewRun {
    /// Step of the checkpoint to resume from; 0 for a new run.
    pub from: u64,
    /// SHA-256 of the resolved settings, in hexadecimal.
    pub settings: String,
    pub epochs: u32,
    /// Samples of an epoch.
    pub samples: u64,
    /// Micro-batches of a step.
    pub micro_batches: u64,
}

/// A recorded start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartedRun {
    pub run: u64,
    /// Number of jobs that are open again.
    pub reopened: usize,
}

/// End of a start. A killed start has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// Every job of every epoch is trained or skipped.
    Finished,
    /// The run reached `run.max_steps`.
    StepLimit,
    /// A signal stopped the run.
    Stopped,
    /// The run failed with this message.
    Failed(String),
}

impl RunEnd {
    pub fn as_str(&self) -> &'static str {
        match self {
            RunEnd::Finished => "finished",
            RunEnd::StepLimit => "step-limit",
            RunEnd::Stopped => "stopped",
            RunEnd::Failed(_) => "failed",
        }
    }
}

/// Key of a recorded change of the micro-batches per step, independent of the setting that changed.
pub const STEP_SIZE: &str = "micro-batches of a step";

/// Row of `runs`. Times are milliseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunRow {
    pub run: u64,
    pub time: i64,
    pub version: String,
    pub settings: String,
    pub resumed_from: u64,
    pub reopened: u64,
    pub epochs: u32,
    pub samples: u64,
    pub micro_batches: u64,
    /// Time of the end; `None` while the start runs, and permanently after a kill.
    pub ended: Option<i64>,
    pub outcome: Option<String>,
    pub step: Option<u64>,
    pub problem: Option<String>,
}

impl StateDb {
    /// Records a start and rolls the ledger back to the checkpoint of `new.from` (0 for the start of the run). Jobs trained at a
    /// later step, whose gradients are not in the weights, are open again, and so are jobs skipped later. Their outcomes move
    /// to `reopened`. Later checkpoints are deleted from the ledger.
    ///
    /// Skipped jobs are reopened since they were open at the checkpoint: the fault that ended the run may have caused their
    /// failure, and an uninterrupted run would have tried them. Jobs skipped before the checkpoint stay skipped.
    ///
    /// # Errors
    /// [`Problem::NoCheckpoint`], or another [`StateError`].
    pub fn begin_run(&mut self, new: &NewRun) -> Result<StartedRun, StateError> {
        self.write("note the start of a run in", Synced::AtOnce, |tx| {
            let (step, at) = (new.from, Unsigned(new.from));
            let exists: bool =
                tx.query_row("SELECT EXISTS (SELECT 1 FROM checkpoints WHERE step = ?1)", [at], |row| row.get(0))?;
            if step > 0 && !exists {
                return Err(Problem::NoCheckpoint { step });
            }
            tx.execute(
                "INSERT INTO runs (time, version, settings, resumed_from, reopened, epochs, samples, micro_batches)
                 VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6, ?7)",
                params![
                    now_ms(),
                    env!("CARGO_PKG_VERSION"),
                    new.settings,
                    at,
                    new.epochs,
                    Unsigned(new.samples),
                    Unsigned(new.micro_batches)
                ],
            )?;
            let run = tx.last_insert_rowid();
            let reopened = reopen(tx, run, at)?;
            tx.execute("UPDATE runs SET reopened = ?1 WHERE run = ?2", params![Unsigned(reopened as u64), run])?;
            Ok(StartedRun { run: run.unsigned_abs(), reopened })
        })
    }

    /// Records the end of a start, once, with the number of steps in the weights.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn end_run(&mut self, run: u64, end: &RunEnd, step: Option<u64>) -> Result<(), StateError> {
        let problem = match end {
            RunEnd::Failed(problem) => Some(problem),
            _ => None,
        };
        self.write("note the end of a run in", Synced::AtOnce, |tx| {
            tx.execute(
                "UPDATE runs SET ended = ?1, outcome = ?2, step = ?3, problem = ?4 WHERE run = ?5 AND ended IS NULL",
                params![now_ms(), end.as_str(), step.map(Unsigned), problem, Unsigned(run)],
            )?;
            Ok(())
        })
    }

    /// Records settings that changed before or during this start, with the number of steps in the weights.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn config_changed(&mut self, step: u64, changes: &[ConfigChange]) -> Result<(), StateError> {
        self.write("note changed settings in", Synced::WithNextCheckpoint, |tx| {
            let run: Option<i64> = tx.query_row("SELECT max(run) FROM runs", [], |row| row.get(0))?;
            let run = run.ok_or(Problem::NotBegun)?;
            let mut insert = tx.prepare_cached(
                "INSERT INTO config_changes (run, time, step, key, old, new) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?;
            for change in changes {
                insert.execute(params![run, now_ms(), Unsigned(step), change.key, change.old, change.new])?;
            }
            Ok(())
        })
    }
}

impl StateReader {
    /// All recorded starts, oldest first.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn runs(&self) -> Result<Vec<RunRow>, StateError> {
        self.read("read the starts from", |connection| Ok(runs(connection)?))
    }
}

pub(super) fn runs(connection: &Connection) -> Result<Vec<RunRow>, rusqlite::Error> {
    let mut statement = connection.prepare_cached(
        "SELECT run, time, version, settings, resumed_from, reopened, epochs, samples, micro_batches, ended, outcome,
         step, problem FROM runs ORDER BY run",
    )?;
    let unsigned = |row: &Row<'_>, column| row.get(column).map(|Unsigned(n)| n);
    let rows = statement.query_map([], |row| {
        Ok(RunRow {
            run: unsigned(row, 0)?,
            time: row.get(1)?,
            version: row.get(2)?,
            settings: row.get(3)?,
            resumed_from: unsigned(row, 4)?,
            reopened: unsigned(row, 5)?,
            epochs: row.get(6)?,
            samples: unsigned(row, 7)?,
            micro_batches: unsigned(row, 8)?,
            ended: row.get(9)?,
            outcome: row.get(10)?,
            step: row.get::<_, Option<Unsigned>>(11)?.map(|Unsigned(n)| n),
            problem: row.get(12)?,
        })
    })?;
    rows.collect()
}

fn reopen(tx: &Transaction<'_>, run: i64, step: Unsigned) -> Result<usize, rusqlite::Error> {
    const LOST: &str = "step > ?1 OR (reason IS NOT NULL AND checkpoint >= ?1)";
    tx.execute(
        "INSERT INTO events (time, kind, text)
         SELECT ?2, 'checkpoint-given-up', name FROM checkpoints WHERE step > ?1 ORDER BY step",
        params![step, now_ms()],
    )?;
    tx.execute("DELETE FROM checkpoints WHERE step > ?1", [step])?;
    tx.execute(
        &format!(
            "INSERT INTO reopened (epoch, idx, run, step, reason, attempts)
             SELECT epoch, idx, ?2, step, reason, attempts FROM outcomes WHERE {LOST}"
        ),
        params![step, run],
    )?;
    tx.execute(&format!("DELETE FROM outcomes WHERE {LOST}"), [step])
}
