//! Ledger in SQLite: plans before their first job is dispatched, one outcome per job, and checkpoints.

use super::{Problem, StateDb, StateError, StateReader, Synced, now_ms, resume::newest_checkpoint, unsigned::Unsigned};
use draftmill_actors::{
    messages::types::{JobId, JobSpec, Outcome},
    planner::{
        ledger::{Ledger, Note},
        plan::Plan,
    },
    runtime::metrics::CHECKPOINT_TIME,
};
use metrics::gauge;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, ffi, params};

impl Ledger for StateDb {
    fn begin_epoch(&mut self, plan: &Plan) -> Result<Vec<bool>, String> {
        self.write("write a plan to", Synced::AtOnce, |tx| begin_epoch(tx, plan)).map_err(|error| error.to_string())
    }

    fn record(&mut self, outcomes: &[(JobId, Outcome)]) -> Result<(), String> {
        if outcomes.is_empty() {
            return Ok(());
        }
        self.write("record outcomes in", Synced::WithNextCheckpoint, |tx| record(tx, outcomes))
            .map_err(|error| error.to_string())
    }

    fn checkpoint(&mut self, step: u64, name: &str) -> Result<(), String> {
        self.write("name a checkpoint in", Synced::AtOnce, |tx| checkpoint(tx, step, name))
            .map_err(|error| error.to_string())?;
        gauge!(CHECKPOINT_TIME).set(now_ms() as f64 / 1e3);
        Ok(())
    }

    fn note(&mut self, note: &Note) -> Result<(), String> {
        let noted = match note {
            Note::Changed { step, changes } => self.config_changed(*step, changes),
            Note::Event { kind, text } => self.event(kind, text),
        };
        noted.map_err(|error| error.to_string())
    }
}

impl StateReader {
    /// Plan of an epoch; `None` if it is not planned yet.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn plan(&self, epoch: u32) -> Result<Option<Plan>, StateError> {
        self.read("read a plan from", |connection| {
            let Some((_, bounds)) = planned(connection, epoch)? else { return Ok(None) };
            let mut jobs = Vec::new();
            stored_jobs(connection, epoch, |job| {
                let samples = parse(&job.samples)?;
                let id = JobId { epoch, index: job.index };
                jobs.push(JobSpec { id, bucket: job.bucket, samples, tokens: job.tokens, width: job.width });
                Ok(())
            })?;
            Ok(Some(Plan { epoch, bounds: parse(&bounds)?, jobs }))
        })
    }

    /// Outcome of a job; `None` while it is open.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn outcome(&self, job: JobId) -> Result<Option<Outcome>, StateError> {
        self.read("read an outcome from", |connection| Ok(outcome(connection, job)?))
    }
}

fn begin_epoch(tx: &Transaction<'_>, plan: &Plan) -> Result<Vec<bool>, Problem> {
    let epoch = plan.epoch;
    let misplaced = |(index, job): &(usize, &JobSpec)| job.id.epoch != epoch || job.id.index as usize != *index;
    if let Some((index, job)) = plan.jobs.iter().enumerate().find(misplaced) {
        return Err(Problem::Misplaced { job: job.id, index, epoch });
    }
    if let Some((jobs, bounds)) = planned(tx, epoch)? {
        if let Some(difference) = difference(tx, plan, jobs, &bounds)? {
            return Err(Problem::PlanDiffers { epoch, difference });
        }
        return ended(tx, plan);
    }
    tx.prepare_cached("INSERT INTO plans (epoch, jobs, bounds, time) VALUES (?1, ?2, ?3, ?4)")?.execute(params![
        epoch,
        Unsigned(plan.jobs.len() as u64),
        json(&plan.bounds),
        now_ms()
    ])?;
    let mut insert = tx.prepare_cached(
        "INSERT INTO jobs (epoch, idx, bucket, tokens, width, samples) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    for job in &plan.jobs {
        insert.execute(params![epoch, job.id.index, job.bucket, job.tokens, job.width, json(&job.samples)])?;
    }
    Ok(vec![false; plan.jobs.len()])
}

fn record(tx: &Transaction<'_>, outcomes: &[(JobId, Outcome)]) -> Result<(), Problem> {
    let newest = newest_checkpoint(tx)?;
    let mut insert = tx.prepare_cached(
        "INSERT INTO outcomes (epoch, idx, step, reason, attempts, checkpoint) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    for (job, new) in outcomes {
        let job = *job;
        let (step, reason, attempts) = match new {
            Outcome::Trained { step } => (Some(*step), None, None),
            Outcome::Skipped { reason, attempts } => (None, Some(reason), Some(*attempts)),
        };
        if let Some(step) = step.filter(|&step| step <= newest) {
            return Err(Problem::TooLate { job, step, newest });
        }
        if let Err(error) =
            insert.execute(params![job.epoch, job.index, step.map(Unsigned), reason, attempts, Unsigned(newest)])
        {
            return Err(match error.sqlite_error().map(|e| e.extended_code) {
                Some(ffi::SQLITE_CONSTRAINT_FOREIGNKEY) => Problem::Unplanned { job },
                Some(ffi::SQLITE_CONSTRAINT_PRIMARYKEY) => match outcome(tx, job)? {
                    Some(old) => Problem::EndedTwice { job, old, new: new.clone() },
                    None => error.into(),
                },
                _ => error.into(),
            });
        }
    }
    Ok(())
}

/// Records a checkpoint. A second one of the newest step replaces the first; a run that stops right after resuming writes one.
fn checkpoint(tx: &Transaction<'_>, step: u64, name: &str) -> Result<(), Problem> {
    let newest = newest_checkpoint(tx)?;
    if step < newest {
        return Err(Problem::OlderCheckpoint { step, newest });
    }
    tx.prepare_cached("INSERT OR REPLACE INTO checkpoints (step, name, time) VALUES (?1, ?2, ?3)")?
        .execute(params![Unsigned(step), name, now_ms()])?;
    Ok(())
}

/// Number of jobs and bounds (JSON) of a stored plan.
pub(super) fn planned(connection: &Connection, epoch: u32) -> Result<Option<(u64, String)>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT jobs, bounds FROM plans WHERE epoch = ?1")?
        .query_row([epoch], |row| Ok((row.get::<_, Unsigned>(0)?.0, row.get(1)?)))
        .optional()
}

/// First difference between a plan and the stored one, as a clause.
fn difference(connection: &Connection, plan: &Plan, jobs: u64, bounds: &str) -> Result<Option<String>, Problem> {
    let was_is = |what: &str, was: &str, is: &str| (was != is).then(|| format!("{what} was {was} and is now {is}"));
    let found = was_is("the list of bucket bounds", bounds, &json(&plan.bounds))
        .or_else(|| was_is("the number of jobs", &jobs.to_string(), &plan.jobs.len().to_string()));
    if found.is_some() {
        return Ok(found);
    }
    let mut planned = plan.jobs.iter();
    let mut found = None;
    stored_jobs(connection, plan.epoch, |old| {
        let Some(new) = planned.next().filter(|new| new.id.index == old.index) else {
            return Err(Problem::Damaged(format!("epoch {} lacks some of its jobs", plan.epoch)));
        };
        let job = new.id;
        let number = |name: &str, was: u32, is: u32| {
            was_is(&format!("the {name} of job {job}"), &was.to_string(), &is.to_string())
        };
        if found.is_none() {
            found = number("bucket", old.bucket.into(), new.bucket.into())
                .or_else(|| number("number of tokens", old.tokens, new.tokens))
                .or_else(|| number("width", old.width, new.width))
                .or_else(|| {
                    let is = json(&new.samples);
                    (old.samples != is).then(|| {
                        format!("job {job} had samples {} and now has {}", abridged(&old.samples), abridged(&is))
                    })
                });
        }
        Ok(())
    })?;
    if planned.next().is_some() {
        return Err(Problem::Damaged(format!("epoch {} lacks some of its jobs", plan.epoch)));
    }
    Ok(found)
}

/// For each job of a plan, true if it has an outcome.
fn ended(connection: &Connection, plan: &Plan) -> Result<Vec<bool>, Problem> {
    let mut ended = vec![false; plan.jobs.len()];
    let mut statement = connection.prepare_cached("SELECT idx FROM outcomes WHERE epoch = ?1")?;
    for index in statement.query_map([plan.epoch], |row| row.get::<_, u32>(0))? {
        if let Some(job) = ended.get_mut(index? as usize) {
            *job = true;
        }
    }
    Ok(ended)
}

pub(super) fn outcome(connection: &Connection, job: JobId) -> Result<Option<Outcome>, rusqlite::Error> {
    let read = |row: &Row<'_>| match row.get(0)? {
        Some(Unsigned(step)) => Ok(Outcome::Trained { step }),
        None => Ok(Outcome::Skipped { reason: row.get(1)?, attempts: row.get(2)? }),
    };
    connection
        .prepare_cached("SELECT step, reason, attempts FROM outcomes WHERE epoch = ?1 AND idx = ?2")?
        .query_row([job.epoch, job.index], read)
        .optional()
}

/// Row of `jobs`, with the samples as JSON.
pub(super) struct StoredJob {
    pub index: u32,
    pub bucket: u16,
    pub tokens: u32,
    pub width: u32,
    pub samples: String,
}

/// Calls `each` for every job of an epoch's stored plan, in order.
pub(super) fn stored_jobs(
    connection: &Connection,
    epoch: u32,
    mut each: impl FnMut(StoredJob) -> Result<(), Problem>,
) -> Result<(), Problem> {
    let mut statement = connection
        .prepare_cached("SELECT idx, bucket, tokens, width, samples FROM jobs WHERE epoch = ?1 ORDER BY idx")?;
    for job in statement.query_map([epoch], stored)? {
        each(job?)?;
    }
    Ok(())
}

/// One job of a stored plan.
pub(super) fn stored_job(connection: &Connection, job: JobId) -> Result<Option<StoredJob>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT idx, bucket, tokens, width, samples FROM jobs WHERE epoch = ?1 AND idx = ?2")?
        .query_row([job.epoch, job.index], stored)
        .optional()
}

fn stored(row: &Row<'_>) -> Result<StoredJob, rusqlite::Error> {
    Ok(StoredJob {
        index: row.get(0)?,
        bucket: row.get(1)?,
        tokens: row.get(2)?,
        width: row.get(3)?,
        samples: row.get(4)?,
    })
}

fn json(numbers: &[u32]) -> String {
    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
    format!("[{}]", numbers.join(","))
}

pub(super) fn parse(text: &str) -> Result<Vec<u32>, Problem> {
    serde_json::from_str(text).map_err(|error| Problem::Damaged(format!("a list of numbers: {error}")))
}

fn abridged(list: &str) -> String {
    match list.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &list[..end]),
        None => list.to_owned(),
    }
}
