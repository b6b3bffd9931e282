//! Queries of a ledger for people: counts by bucket, skipped jobs, and the history of one job.

use super::{
    Checkpoint, Problem, RunRow, StateError, StateReader,
    ledger::{outcome, parse, planned, stored_job},
    runs::runs,
    unsigned::Unsigned,
};
use draftmill_actors::messages::types::{JobId, JobSpec, Outcome};
use rusqlite::{Connection, OptionalExtension, Row};
use serde::Serialize;

/// Job counts of one length bucket, over all planned epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BucketCounts {
    pub bucket: u16,
    /// Longest sample in tokens.
    pub bound: u32,
    pub jobs: u64,
    pub trained: u64,
    pub skipped: u64,
    pub open: u64,
    /// Tokens of all its jobs, without padding.
    pub tokens: u64,
}

/// A skipped job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// `epoch/index`.
    pub job: String,
    pub attempts: u32,
    pub reason: String,
}

/// History of one job. The field names are keys of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobHistory {
    pub job: JobSpec,
    /// Number of jobs of its epoch.
    pub of: u64,
    /// Time at which the epoch was planned, in milliseconds since 1970.
    pub planned: i64,
    /// Outcomes that a later start undid, oldest first.
    pub undone: Vec<UndoneOutcome>,
    /// Current outcome; `None` while the job is open.
    pub outcome: Option<Outcome>,
    /// First checkpoint that holds the outcome; `None` while a kill could undo it.
    pub checkpoint: Option<Checkpoint>,
}

/// An outcome that a later start undid.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UndoneOutcome {
    pub outcome: Outcome,
    /// Start that undid the outcome.
    pub by: RunRow,
}

impl StateReader {
    /// Job counts by bucket, shortest first.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn bucket_counts(&self) -> Result<Vec<BucketCounts>, StateError> {
        self.read("count outcomes in", |connection| {
            let bounds: Option<String> = connection
                .query_row("SELECT bounds FROM plans ORDER BY epoch LIMIT 1", [], |row| row.get(0))
                .optional()?;
            let bounds = bounds.map_or(Ok(Vec::new()), |text| parse(&text))?;
            let mut statement = connection.prepare_cached(
                "SELECT bucket, count(*), count(step), count(reason), sum(tokens)
                 FROM jobs LEFT JOIN outcomes USING (epoch, idx) GROUP BY bucket ORDER BY bucket",
            )?;
            let read = |row: &Row<'_>| {
                let count = |column| row.get(column).map(|Unsigned(n)| n);
                let (bucket, jobs, trained, skipped) = (row.get(0)?, count(1)?, count(2)?, count(3)?);
                let bound = bounds.get(usize::from(bucket)).copied().unwrap_or(0);
                let open = jobs - trained - skipped;
                Ok(BucketCounts { bucket, bound, jobs, trained, skipped, open, tokens: count(4)? })
            };
            Ok(statement.query_map([], read)?.collect::<Result<_, _>>()?)
        })
    }

    /// Skipped jobs in plan order.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn skipped(&self) -> Result<Vec<Skipped>, StateError> {
        self.read("read the skipped jobs from", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT epoch, idx, attempts, reason FROM outcomes WHERE reason IS NOT NULL ORDER BY epoch, idx",
            )?;
            let read = |row: &Row<'_>| {
                let job = JobId { epoch: row.get(0)?, index: row.get(1)? }.to_string();
                Ok(Skipped { job, attempts: row.get(2)?, reason: row.get(3)? })
            };
            Ok(statement.query_map([], read)?.collect::<Result<_, _>>()?)
        })
    }

    /// Last recorded step that trained a job. A kill may undo steps after the newest checkpoint.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn last_step(&self) -> Result<u64, StateError> {
        self.read("read the last step from", |connection| {
            let max = "SELECT max(coalesce((SELECT max(step) FROM outcomes), 0),
                                  coalesce((SELECT max(step) FROM checkpoints), 0))";
            Ok(connection.query_row(max, [], |row| row.get(0)).map(|Unsigned(step)| step)?)
        })
    }

    /// History of one job; `None` if no plan has it.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn history(&self, job: JobId) -> Result<Option<JobHistory>, StateError> {
        self.read("read the history of a job from", |connection| history(connection, job))
    }
}

fn history(connection: &Connection, id: JobId) -> Result<Option<JobHistory>, Problem> {
    let Some(stored) = stored_job(connection, id)? else { return Ok(None) };
    let of = planned(connection, id.epoch)?.map_or(0, |(jobs, _)| jobs);
    let planned = connection
        .query_row("SELECT time FROM plans WHERE epoch = ?1", [id.epoch], |row| row.get(0))
        .optional()?
        .unwrap_or_default();
    let outcome = outcome(connection, id)?;
    let checkpoint = match &outcome {
        None => None,
        Some(Outcome::Trained { step }) => first_checkpoint(connection, *step)?,
        // A skip is durable once a checkpoint after the one before it exists.
        Some(Outcome::Skipped { .. }) => {
            let before = connection.query_row(
                "SELECT checkpoint FROM outcomes WHERE epoch = ?1 AND idx = ?2",
                [id.epoch, id.index],
                |row| row.get(0).map(|Unsigned(step)| step),
            )?;
            first_checkpoint(connection, before + 1)?
        }
    };
    let job = JobSpec {
        id,
        bucket: stored.bucket,
        samples: parse(&stored.samples)?,
        tokens: stored.tokens,
        width: stored.width,
    };
    Ok(Some(JobHistory { job, of, planned, undone: undone(connection, id)?, outcome, checkpoint }))
}

fn first_checkpoint(connection: &Connection, step: u64) -> Result<Option<Checkpoint>, rusqlite::Error> {
    connection
        .query_row(
            "SELECT step, name FROM checkpoints WHERE step >= ?1 ORDER BY step LIMIT 1",
            [Unsigned(step)],
            |row| Ok(Checkpoint { step: row.get::<_, Unsigned>(0)?.0, name: row.get(1)? }),
        )
        .optional()
}

fn undone(connection: &Connection, id: JobId) -> Result<Vec<UndoneOutcome>, Problem> {
    let mut statement = connection.prepare_cached(
        "SELECT run, step, reason, attempts FROM reopened WHERE epoch = ?1 AND idx = ?2 ORDER BY run",
    )?;
    let rows = statement.query_map([id.epoch, id.index], |row| {
        let outcome = match row.get(1)? {
            Some(Unsigned(step)) => Outcome::Trained { step },
            None => Outcome::Skipped { reason: row.get(2)?, attempts: row.get(3)? },
        };
        Ok((row.get::<_, Unsigned>(0)?.0, outcome))
    })?;
    let rows = rows.collect::<Result<Vec<_>, _>>()?;
    let runs = runs(connection)?;
    let by = |run| runs.iter().find(|row| row.run == run).cloned();
    rows.into_iter()
        .map(|(run, outcome)| {
            let by = by(run).ok_or_else(|| Problem::Damaged(format!("start {run} of the run is missing")))?;
            Ok(UndoneOutcome { outcome, by })
        })
        .collect()
}
