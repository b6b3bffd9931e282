//! `draftmill ledger`.

use super::{LedgerArgs, output};
use crate::{
    common::{
        exit::{Exit, Failure},
        text::{counted, grouped},
    },
    run_dir::{
        RunDir,
        db::{BucketCounts, Checkpoint, EpochCounts, JobHistory, Skipped, StateReader},
    },
};
use draftmill_actors::messages::types::{JobId, Outcome};
use serde::Serialize;

/// Maximum skipped jobs in the text output.
const MAX_SKIPPED_LINES: usize = 50;

/// Outcomes of a run's jobs.
#[derive(Debug, Serialize)]
struct Overview {
    step: u64,
    checkpoint: Option<Checkpoint>,
    starts: usize,
    epochs: Vec<EpochCounts>,
    buckets: Vec<BucketCounts>,
    skipped: Vec<Skipped>,
}

/// Prints the outcome counts, the history of one job, or the violated invariants.
pub fn run(args: &LedgerArgs) -> Result<(), Failure> {
    let failed = Failure::of(Exit::Run);
    let reader = StateReader::open(&args.dir).map_err(failed)?;
    if args.verify {
        return verify(args, &reader);
    }
    match args.job {
        Some(job) => print_history(args, &reader, job),
        None => overview(args, &reader),
    }
}

fn verify(args: &LedgerArgs, reader: &StateReader) -> Result<(), Failure> {
    let mut violations = reader.verify().map_err(Failure::of(Exit::Run))?;
    violations.extend(RunDir::new(&args.dir).verify_checkpoints(reader)?);
    let dir = args.dir.display();
    if args.json {
        let result = serde_json::json!({ "dir": args.dir, "sound": violations.is_empty(), "violations": violations });
        output::print_json(&result)?;
    } else if violations.is_empty() {
        let counts = reader.counts().map_err(Failure::of(Exit::Run))?;
        let sum = |count: fn(&EpochCounts) -> u64| counts.iter().map(count).sum::<u64>();
        output::print(&format!(
            "{dir}: sound; {}, {}: {} trained, {} skipped, {} open; P1, D1, T1 and R1 hold\n",
            counted(counts.len() as u64, "epoch"),
            counted(sum(|c| c.jobs), "job"),
            grouped(sum(|c| c.trained)),
            grouped(sum(|c| c.skipped)),
            grouped(sum(EpochCounts::open))
        ))?;
    } else {
        output::print(&violations.iter().map(|v| format!("{}: {}\n", v.invariant, v.text)).collect::<String>())?;
    }
    match violations.len() {
        0 => Ok(()),
        n => Err(Failure::new(
            Exit::Run,
            format!(
                "the ledger of {dir} violates its invariants ({} on stdout); do not resume this run: restore state.db and \
                 checkpoints from a copy, or start a new run with --fresh --force. Unless the file was edited, report this \
                 as a bug",
                counted(n as u64, "violation")
            ),
        )),
    }
}

fn print_history(args: &LedgerArgs, reader: &StateReader, job: JobId) -> Result<(), Failure> {
    let history = reader.history(job).map_err(Failure::of(Exit::Run))?.ok_or_else(|| {
        let dir = args.dir.display();
        Failure::new(
            Exit::Run,
            format!("no plan in {dir} has a job {job}; draftmill ledger {dir} lists the number of jobs of each epoch"),
        )
    })?;
    match args.json {
        true => output::print_json(&history),
        false => output::print(&history_text(&history)),
    }
}

fn overview(args: &LedgerArgs, reader: &StateReader) -> Result<(), Failure> {
    let failed = Failure::of::<crate::run_dir::db::StateError>;
    let overview = Overview {
        step: reader.last_step().map_err(failed(Exit::Run))?,
        checkpoint: reader.latest_checkpoint().map_err(failed(Exit::Run))?,
        starts: reader.runs().map_err(failed(Exit::Run))?.len(),
        epochs: reader.counts().map_err(failed(Exit::Run))?,
        buckets: reader.bucket_counts().map_err(failed(Exit::Run))?,
        skipped: reader.skipped().map_err(failed(Exit::Run))?,
    };
    if args.json {
        return output::print_json(&overview);
    }
    let checkpoint = overview.checkpoint.as_ref().map_or("none", |checkpoint| checkpoint.name.as_str());
    let dir = args.dir.display();
    let mut text = format!(
        "{dir}: step {}, last checkpoint {checkpoint}, {}\n",
        grouped(overview.step),
        counted(overview.starts as u64, "start")
    );
    let head = |first: &str| [first, "jobs", "trained", "skipped", "open"].map(String::from).to_vec();
    let mut rows = vec![head("epoch")];
    for c in &overview.epochs {
        rows.push([u64::from(c.epoch), c.jobs, c.trained, c.skipped, c.open()].map(grouped).to_vec());
    }
    text += &output::table(&rows);
    rows = vec![head("bucket up to")];
    for b in &overview.buckets {
        rows.push([u64::from(b.bound), b.jobs, b.trained, b.skipped, b.open].map(grouped).to_vec());
    }
    text += &output::table(&rows);
    if !overview.skipped.is_empty() {
        text += &format!("{} skipped:\n", counted(overview.skipped.len() as u64, "job"));
        for Skipped { job, attempts, reason } in overview.skipped.iter().take(MAX_SKIPPED_LINES) {
            text += &format!("  {job} after {}: {reason}\n", counted((*attempts).into(), "attempt"));
        }
        if overview.skipped.len() > MAX_SKIPPED_LINES {
            text += &format!(
                "  and {} more; --json lists all\n",
                grouped((overview.skipped.len() - MAX_SKIPPED_LINES) as u64)
            );
        }
    }
    output::print(&text)
}

fn history_text(history: &JobHistory) -> String {
    let JobHistory { job, of, planned, undone, outcome, checkpoint } = history;
    let number = u64::from(job.id.index) + 1;
    let mut text = format!(
        "job {}: bucket {}, {} in {} of at most {}: {:?}\n",
        job.id,
        job.bucket,
        counted(job.tokens.into(), "token"),
        counted(job.samples.len() as u64, "sample"),
        counted(job.width.into(), "token"),
        job.samples
    );
    text += &format!("  planned {} as number {number} of {of} in epoch {}\n", output::utc(*planned), job.id.epoch);
    for undone in undone {
        let by = &undone.by;
        text += &format!(
            "  {}; reopened {} by start {}, which resumed from step {}\n",
            ended(&undone.outcome),
            output::utc(by.time),
            by.run,
            by.resumed_from
        );
    }
    text += &match (outcome, checkpoint) {
        (None, _) => "  open\n".to_owned(),
        (Some(outcome), Some(checkpoint)) => {
            format!("  {}; contained in checkpoint {} and later ones\n", ended(outcome), checkpoint.name)
        }
        (Some(outcome), None) => {
            format!("  {}; not in a checkpoint yet, so a kill would reopen it\n", ended(outcome))
        }
    };
    text
}

fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Trained { step } => format!("trained at step {step}"),
        Outcome::Skipped { reason, attempts } => {
            format!("skipped after {}: {reason}", counted((*attempts).into(), "attempt"))
        }
    }
}
