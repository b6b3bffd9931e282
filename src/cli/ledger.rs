//! `draftmill ledger`.

use super::{LedgerArgs, output};
use crate::{
    common::exit::{Exit, Failure},
    run_dir::db::{BucketCounts, Checkpoint, EpochCounts, JobHistory, Skipped, StateReader},
};
use draftmill_actors::messages::types::{JobId, Outcome};
use serde::Serialize;

/// Skipped jobs that are told one by one where a person reads.
const SKIPPED_TOLD: usize = 50;

/// What became of a run's jobs.
#[derive(Debug, Serialize)]
struct Overview {
    step: u64,
    checkpoint: Option<Checkpoint>,
    starts: usize,
    epochs: Vec<EpochCounts>,
    buckets: Vec<BucketCounts>,
    skipped: Vec<Skipped>,
}

/// Tells the counts, one job's history, or what is broken.
pub fn run(args: &LedgerArgs) -> Result<(), Failure> {
    let failed = Failure::of(Exit::Run);
    let reader = StateReader::open(&args.dir).map_err(failed)?;
    if args.verify {
        return verify(args, &reader);
    }
    match args.job {
        Some(job) => tell_job(args, &reader, job),
        None => overview(args, &reader),
    }
}

fn verify(args: &LedgerArgs, reader: &StateReader) -> Result<(), Failure> {
    let violations = reader.verify().map_err(Failure::of(Exit::Run))?;
    let dir = args.dir.display();
    if args.json {
        let answer = serde_json::json!({ "dir": args.dir, "sound": violations.is_empty(), "violations": violations });
        output::print_json(&answer)?;
    } else if violations.is_empty() {
        let counts = reader.counts().map_err(Failure::of(Exit::Run))?;
        let sum = |part: fn(&EpochCounts) -> u64| counts.iter().map(part).sum::<u64>();
        output::print(&format!(
            "{dir}: sound; {} epochs, {} jobs: {} trained, {} skipped, {} open; P1, D1, T1 and R1 hold\n",
            counts.len(),
            sum(|c| c.jobs),
            sum(|c| c.trained),
            sum(|c| c.skipped),
            sum(EpochCounts::open)
        ))?;
    } else {
        output::print(&violations.iter().map(|v| format!("{}: {}\n", v.invariant, v.text)).collect::<String>())?;
    }
    match violations.len() {
        0 => Ok(()),
        n => Err(Failure::new(
            Exit::Run,
            format!(
                "the ledger of {dir} breaks its invariants ({n} sentences on stdout); do not go on with this run: restore \
                 state.db and checkpoints from a copy, or begin anew with --fresh --force, and report it if nobody \
                 edited the file"
            ),
        )),
    }
}

fn tell_job(args: &LedgerArgs, reader: &StateReader, job: JobId) -> Result<(), Failure> {
    let history = reader.history(job).map_err(Failure::of(Exit::Run))?.ok_or_else(|| {
        let dir = args.dir.display();
        Failure::new(
            Exit::Run,
            format!("no plan in {dir} has a job {job}; draftmill ledger {dir} tells how many each epoch has"),
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
    let mut text = format!("{dir}: step {}, last checkpoint {checkpoint}, {} starts\n", overview.step, overview.starts);
    let head = |first: &str| [first, "jobs", "trained", "skipped", "open"].map(String::from).to_vec();
    let mut rows = vec![head("epoch")];
    for c in &overview.epochs {
        rows.push([u64::from(c.epoch), c.jobs, c.trained, c.skipped, c.open()].map(|n| n.to_string()).to_vec());
    }
    text += &output::table(&rows);
    rows = vec![head("bucket up to")];
    for b in &overview.buckets {
        rows.push([u64::from(b.bound), b.jobs, b.trained, b.skipped, b.open].map(|n| n.to_string()).to_vec());
    }
    text += &output::table(&rows);
    if !overview.skipped.is_empty() {
        text += &format!("{} jobs were skipped:\n", overview.skipped.len());
        for Skipped { job, attempts, reason } in overview.skipped.iter().take(SKIPPED_TOLD) {
            text += &format!("  {job} after {attempts} attempts: {reason}\n");
        }
        if overview.skipped.len() > SKIPPED_TOLD {
            text += &format!("  and {} more; --json lists all\n", overview.skipped.len() - SKIPPED_TOLD);
        }
    }
    output::print(&text)
}

fn history_text(history: &JobHistory) -> String {
    let JobHistory { job, of, planned, undone, outcome, checkpoint } = history;
    let place = u64::from(job.id.index) + 1;
    let mut text = format!(
        "job {}: bucket {}, {} tokens in {} samples of at most {}: {:?}\n",
        job.id,
        job.bucket,
        job.tokens,
        job.samples.len(),
        job.width,
        job.samples
    );
    text += &format!("  planned {} as number {place} of {of} of epoch {}\n", output::utc(*planned), job.id.epoch);
    for undone in undone {
        let by = &undone.by;
        text += &format!(
            "  {}; reopened {} by start {}, which went on from step {}\n",
            ended(&undone.outcome),
            output::utc(by.time),
            by.run,
            by.resumed_from
        );
    }
    text += &match (outcome, checkpoint) {
        (None, _) => "  open\n".to_owned(),
        (Some(outcome), Some(checkpoint)) => {
            format!("  {}; held by checkpoint {} and later ones\n", ended(outcome), checkpoint.name)
        }
        (Some(outcome), None) => {
            format!("  {}; no checkpoint holds it yet, so a kill would reopen it\n", ended(outcome))
        }
    };
    text
}

fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Trained { step } => format!("trained at step {step}"),
        Outcome::Skipped { reason, attempts } => format!("skipped after {attempts} attempts: {reason}"),
    }
}
