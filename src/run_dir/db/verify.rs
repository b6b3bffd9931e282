//! Verification of a ledger against the invariants P1, D1, T1 and R1, with SQLite's own checks.

use super::{
    Problem, RunRow, STEP_SIZE, StateError, StateReader,
    ledger::{StoredJob, parse, stored_jobs},
    runs::runs,
    unsigned::Unsigned,
};
use draftmill_actors::messages::types::JobId;
use rusqlite::{Connection, Row};
use serde::Serialize;
use std::collections::{BTreeSet, VecDeque};

/// Limit on the listed violations of one kind.
const LISTED: usize = 20;

/// Violation of an invariant. The text names the job or step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Invariant of ARCHITECTURE.md, or "file" if SQLite reports damage.
    pub invariant: &'static str,
    pub text: String,
}

impl StateReader {
    /// Returns all violations of the ledger; empty if it is sound.
    ///
    /// - P1: each plan covers each sample once, in jobs of one bucket within the token budget.
    /// - D1: each outcome is of a planned job.
    /// - T1: each step has the micro-batches of its start, except the last step (unchecked before schema version 2).
    /// - R1: the trained steps have no gap and reach the newest checkpoint, outcomes are later than the checkpoint that they
    ///   name, and a start reopened exactly the outcomes that its checkpoint lacks.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn verify(&self) -> Result<Vec<Violation>, StateError> {
        self.read("verify", |connection| {
            let mut found = Violations::default();
            sqlite(connection, &mut found)?;
            let runs = runs(connection)?;
            plans(connection, &runs, &mut found)?;
            outcomes(connection, &mut found)?;
            let last = steps(connection, &runs, &mut found)?;
            checkpoints(connection, last, &mut found)?;
            starts(connection, &runs, last, &mut found)?;
            Ok(found.finish())
        })
    }
}

#[derive(Default)]
struct Violations {
    list: Vec<Violation>,
    /// Listed and omitted violations of the current check.
    listed: usize,
    omitted: usize,
}

impl Violations {
    fn add(&mut self, invariant: &'static str, text: String) {
        if self.listed < LISTED {
            self.listed += 1;
            self.list.push(Violation { invariant, text });
        } else {
            self.omitted += 1;
        }
    }

    /// Starts another check and resets the counts.
    fn next_check(&mut self) {
        if let Some(last) = self.list.last().filter(|_| self.omitted > 0) {
            let text = format!("and {} more of this kind", self.omitted);
            self.list.push(Violation { invariant: last.invariant, text });
        }
        (self.listed, self.omitted) = (0, 0);
    }

    fn finish(mut self) -> Vec<Violation> {
        self.next_check();
        self.list
    }
}

fn sqlite(connection: &Connection, found: &mut Violations) -> Result<(), Problem> {
    let mut statement = connection.prepare("PRAGMA integrity_check(20)")?;
    for verdict in statement.query_map([], |row| row.get::<_, String>(0))? {
        let verdict = verdict?;
        if verdict != "ok" {
            found.add("file", format!("SQLite finds the file damaged: {verdict}"));
        }
    }
    found.next_check();
    Ok(())
}

fn plans(connection: &Connection, runs: &[RunRow], found: &mut Violations) -> Result<(), Problem> {
    let mut statement = connection.prepare("SELECT epoch, jobs, bounds FROM plans ORDER BY epoch")?;
    let plans = statement.query_map([], |row| Ok((row.get(0)?, row.get::<_, Unsigned>(1)?.0, row.get(2)?)))?;
    let plans = plans.collect::<Result<Vec<(u32, u64, String)>, _>>()?;
    let budget = "SELECT value FROM meta WHERE key = 'identity.plan.job_tokens'";
    let budget: Option<u64> = connection
        .prepare(budget)?
        .query_row([], |row| row.get::<_, String>(0))
        .ok()
        .and_then(|text| text.parse().ok());
    let known = runs.last().map(|run| run.samples);
    let mut first = None;
    for (epoch, jobs, bounds) in plans {
        let mut plan = PlanCheck { epoch, bounds: parse(&bounds)?, budget, seen: Vec::new(), jobs: 0 };
        stored_jobs(connection, epoch, |job| plan.job(job, found))?;
        if plan.jobs != jobs {
            found.add("P1", format!("the plan of epoch {epoch} has {} jobs; {jobs} were written", plan.jobs));
        }
        // Without a recorded number of samples, the first epoch is the reference.
        let samples = *first.get_or_insert(known.unwrap_or(plan.seen.len() as u64));
        plan.end(samples, found);
        found.next_check();
    }
    let strays = "SELECT jobs.epoch, idx FROM jobs LEFT JOIN plans USING (epoch) WHERE plans.epoch IS NULL";
    for job in ids(connection, strays)? {
        found.add("P1", format!("job {job} belongs to an epoch that has no plan"));
    }
    found.next_check();
    Ok(())
}

struct PlanCheck {
    epoch: u32,
    bounds: Vec<u32>,
    budget: Option<u64>,
    /// For each sample, true if a job holds it.
    seen: Vec<bool>,
    jobs: u64,
}

impl PlanCheck {
    fn job(&mut self, job: StoredJob, found: &mut Violations) -> Result<(), Problem> {
        let id = JobId { epoch: self.epoch, index: job.index };
        if u64::from(job.index) != self.jobs {
            found.add("P1", format!("job {id} is at index {} of its epoch", self.jobs));
        }
        self.jobs += 1;
        let samples = parse(&job.samples)?;
        let (rows, width, tokens) = (samples.len() as u64, u64::from(job.width), u64::from(job.tokens));
        // The longest row is `width`; every other has at least one token.
        if rows == 0 || width == 0 || tokens > rows * width || tokens < width + rows - 1 {
            found.add("P1", format!("job {id} cannot hold {tokens} tokens in {rows} samples of at most {width}"));
        }
        if let Some(budget) = self.budget.filter(|&budget| rows * width > budget) {
            found.add("P1", format!("job {id} has {} token slots; plan.job_tokens is {budget}", rows * width));
        }
        let bucket = usize::from(job.bucket);
        let above = bucket.checked_sub(1).and_then(|shorter| self.bounds.get(shorter));
        match self.bounds.get(bucket) {
            Some(&bound) if job.width <= bound && above.is_none_or(|&bound| job.width > bound) => {}
            _ => found.add("P1", format!("job {id} is of width {width}, outside bucket {bucket}")),
        }
        for sample in samples {
            let index = sample as usize;
            if index >= self.seen.len() {
                self.seen.resize(index + 1, false);
            }
            if std::mem::replace(&mut self.seen[index], true) {
                let epoch = self.epoch;
                found.add("P1", format!("job {id} holds sample {sample}, which epoch {epoch} holds twice"));
            }
        }
        Ok(())
    }

    fn end(mut self, samples: u64, found: &mut Violations) {
        let epoch = self.epoch;
        if self.seen.len() as u64 > samples {
            let last = self.seen.len() - 1;
            found
                .add("P1", format!("epoch {epoch} holds sample {last}, but the samples end at {}", samples.max(1) - 1));
        }
        self.seen.resize((samples as usize).max(self.seen.len()), false);
        for (sample, _) in self.seen.iter().enumerate().filter(|(_, seen)| !**seen) {
            found.add("P1", format!("sample {sample} is in no job of epoch {epoch}"));
        }
    }
}

fn outcomes(connection: &Connection, found: &mut Violations) -> Result<(), Problem> {
    for table in ["outcomes", "reopened"] {
        let strays = format!(
            "SELECT {table}.epoch, {table}.idx FROM {table} LEFT JOIN jobs USING (epoch, idx) WHERE jobs.idx IS NULL"
        );
        for job in ids(connection, &strays)? {
            found.add("D1", format!("job {job} has an outcome (in the table {table}), but is in no plan"));
        }
        found.next_check();
    }
    let early = "SELECT epoch, idx, step, checkpoint FROM outcomes WHERE step IS NOT NULL AND step <= checkpoint";
    let mut statement = connection.prepare(early)?;
    for row in statement.query_map([], |row| Ok((id(row)?, row.get(2)?, row.get(3)?)))? {
        let (job, step, checkpoint): (_, i64, i64) = row?;
        found.add("R1", format!("job {job} was trained at step {step}, after the checkpoint of step {checkpoint}"));
    }
    found.next_check();
    let unknown = "SELECT epoch, idx, checkpoint FROM outcomes
                   WHERE checkpoint > 0 AND checkpoint NOT IN (SELECT step FROM checkpoints)";
    let mut statement = connection.prepare(unknown)?;
    for row in statement.query_map([], |row| Ok((id(row)?, row.get(2)?)))? {
        let (job, checkpoint): (_, i64) = row?;
        found.add("R1", format!("job {job} ended after a checkpoint of step {checkpoint}, which is missing"));
    }
    found.next_check();
    Ok(())
}

/// Checks the steps that trained a job; returns the last one.
fn steps(connection: &Connection, runs: &[RunRow], found: &mut Violations) -> Result<u64, Problem> {
    let mut statement =
        connection.prepare("SELECT step, count(*) FROM outcomes WHERE step IS NOT NULL GROUP BY step ORDER BY step")?;
    let steps = statement.query_map([], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, Unsigned>(1)?.0)))?;
    let steps = steps.collect::<Result<Vec<_>, _>>()?;
    let last = steps.last().map_or(0, |&(step, _)| step.max(0).unsigned_abs());
    let mut expected = 1;
    for &(step, _) in &steps {
        if step < 1 {
            found.add("R1", format!("a job was trained at step {step}, but the first step is 1"));
            continue;
        }
        let step = step.unsigned_abs();
        if step > expected {
            found.add("R1", format!("no job was trained at steps {expected} to {}", step - 1));
        }
        expected = step + 1;
    }
    found.next_check();
    let mut sizes: Vec<VecDeque<(u64, u64)>> = Vec::new();
    for run in runs {
        sizes.push(step_sizes(connection, run)?);
    }
    for (step, micro_batches) in steps.into_iter().map(|(step, n)| (step.unsigned_abs(), n)) {
        // Later starts resumed from this step or a later one, so this start made the step.
        let Some(at) = runs.iter().rposition(|run| run.resumed_from < step) else { continue };
        let (run, sizes) = (runs[at].run, &mut sizes[at]);
        // A change is recorded on request and takes effect at a later step boundary.
        while sizes.len() > 1 && sizes[0].1 != micro_batches && sizes[1].0 < step {
            sizes.pop_front();
        }
        let expected = sizes.front().map_or(0, |&(_, size)| size);
        // The next start resumed right after this step.
        let next = runs.get(at + 1).is_some_and(|next| next.resumed_from == step && next.reopened == 0);
        let is_last = step == last || next;
        if micro_batches > expected || (micro_batches < expected && !is_last) {
            found.add(
                "T1",
                format!("step {step} has {micro_batches} micro-batches; start {run} makes steps of {expected}"),
            );
        }
    }
    found.next_check();
    Ok(last)
}

/// Micro-batches per step of a start: the initial value and later changes, each with the step of the request.
fn step_sizes(connection: &Connection, run: &RunRow) -> Result<VecDeque<(u64, u64)>, Problem> {
    let mut statement =
        connection.prepare("SELECT step, new FROM config_changes WHERE run = ?1 AND key = ?2 ORDER BY id")?;
    let changed = statement.query_map(rusqlite::params![Unsigned(run.run), STEP_SIZE], |row| {
        Ok((row.get::<_, Unsigned>(0)?.0, row.get::<_, String>(1)?))
    })?;
    let mut sizes = VecDeque::from([(run.resumed_from, run.micro_batches)]);
    for change in changed {
        let (step, size) = change?;
        sizes.extend(size.parse().ok().map(|size| (step, size)));
    }
    Ok(sizes)
}

fn checkpoints(connection: &Connection, last: u64, found: &mut Violations) -> Result<(), Problem> {
    let mut statement = connection.prepare("SELECT step, name FROM checkpoints WHERE step > ?1 ORDER BY step")?;
    for row in statement.query_map([Unsigned(last)], |row| Ok((row.get(0)?, row.get(1)?)))? {
        let (step, name): (i64, String) = row?;
        found.add("R1", format!("checkpoint {name} holds step {step}, but the last step that trained a job is {last}"));
    }
    found.next_check();
    Ok(())
}

fn starts(connection: &Connection, runs: &[RunRow], last: u64, found: &mut Violations) -> Result<(), Problem> {
    let mut statement = connection.prepare("SELECT step FROM checkpoints")?;
    let stored = statement.query_map([], |row| row.get::<_, Unsigned>(0).map(|Unsigned(step)| step))?;
    let stored = stored.collect::<Result<BTreeSet<u64>, _>>()?;
    let counted = "SELECT count(*) FROM reopened WHERE run = ?1";
    for (at, run) in runs.iter().enumerate() {
        let (from, number) = (run.resumed_from, run.run);
        let superseded = runs[at + 1..].iter().any(|later| later.resumed_from < from);
        if from > 0 && !stored.contains(&from) && !superseded {
            found.add("R1", format!("start {number} resumed from step {from}, which has no checkpoint"));
        }
        let reopened: u64 =
            connection.prepare_cached(counted)?.query_row([Unsigned(number)], |row| row.get(0)).map(|Unsigned(n)| n)?;
        if reopened != run.reopened {
            found.add("R1", format!("start {number} reopened {} jobs, but {reopened} are recorded", run.reopened));
        }
    }
    found.next_check();
    let kept = "SELECT epoch, idx, run, reopened.step, resumed_from FROM reopened JOIN runs USING (run)
                WHERE reopened.step <= resumed_from";
    let mut statement = connection.prepare(kept)?;
    for row in statement.query_map([], |row| Ok((id(row)?, row.get(2)?, row.get(3)?, row.get(4)?)))? {
        let (job, run, step, from): (_, i64, i64, i64) = row?;
        found.add(
            "R1",
            format!("start {run} reopened job {job} of step {step}, which its checkpoint of step {from} holds"),
        );
    }
    found.next_check();
    let Some(end) = runs.last() else { return Ok(()) };
    let number = end.run;
    let outcome = end.outcome.as_deref().unwrap_or_default();
    if ["finished", "step-limit", "stopped"].contains(&outcome) {
        let newest = stored.last().copied().unwrap_or(0);
        if newest != last {
            found.add(
                "R1",
                format!(
                    "start {number} ended ({outcome}), but its last step is {last} and its last checkpoint of {newest}"
                ),
            );
        }
    }
    if outcome == "finished" {
        let open = "SELECT epoch, idx FROM jobs LEFT JOIN outcomes USING (epoch, idx)
                    WHERE outcomes.checkpoint IS NULL AND epoch < (SELECT max(epochs) FROM runs WHERE run = ?1)";
        let mut statement = connection.prepare(open)?;
        for job in statement.query_map([Unsigned(number)], id)? {
            found.add("D1", format!("start {number} is recorded as finished, but job {} is open", job?));
        }
    }
    found.next_check();
    Ok(())
}

fn ids(connection: &Connection, sql: &str) -> Result<Vec<JobId>, rusqlite::Error> {
    connection.prepare(sql)?.query_map([], id)?.collect()
}

fn id(row: &Row<'_>) -> Result<JobId, rusqlite::Error> {
    Ok(JobId { epoch: row.get(0)?, index: row.get(1)? })
}
