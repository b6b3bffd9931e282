//! Planner with a slow disk: jobs leave during a transaction, and outcomes that arrive meanwhile share the next one.

use draftmill_actors::{
    dispatcher::Feed,
    messages::{
        job::Receipt,
        types::{JobId, Outcome},
    },
    planner::{
        self, Settings,
        ledger::{Ledger, Note},
        plan::{JobOrder, Plan, PlanSettings},
    },
    pool::{self, DrawPolicy},
    runtime::fault::Shutdown,
};
use std::{
    sync::{Arc, mpsc::Receiver},
    time::Duration,
};
use tokio::sync::{mpsc, watch};

/// Disk that writes on command and reports its input.
struct Slow {
    go: Receiver<()>,
    wrote: mpsc::Sender<Wrote>,
}

#[derive(Debug, PartialEq)]
enum Wrote {
    /// Steps of one transaction.
    Began(Vec<u64>),
    Checkpoint(u64),
}

impl Ledger for Slow {
    fn begin_epoch(&mut self, plan: &Plan) -> Result<Vec<bool>, String> {
        Ok(vec![false; plan.jobs.len()])
    }

    fn record(&mut self, outcomes: &[(JobId, Outcome)]) -> Result<(), String> {
        let step = |(_, outcome): &(JobId, Outcome)| match outcome {
            Outcome::Trained { step } => *step,
            Outcome::Skipped { .. } => 0,
        };
        self.wrote.blocking_send(Wrote::Began(outcomes.iter().map(step).collect())).map_err(|e| e.to_string())?;
        self.go.recv().map_err(|e| e.to_string())
    }

    fn checkpoint(&mut self, step: u64, _name: &str) -> Result<(), String> {
        self.wrote.blocking_send(Wrote::Checkpoint(step)).map_err(|e| e.to_string())
    }

    fn note(&mut self, note: &Note) -> Result<(), String> {
        Err(format!("unexpected note: {note:?}"))
    }
}

async fn job(fed: &mut mpsc::Receiver<Feed>) -> Receipt {
    match fed.recv().await {
        Some(Feed::Job(job)) => job.receipt,
        _ => panic!("no job left the planner"),
    }
}

#[tokio::test]
async fn jobs_leave_while_the_disk_is_busy_and_a_checkpoint_waits_for_every_outcome() {
    // A broken disk waits forever.
    tokio::time::timeout(Duration::from_secs(120), beside_a_slow_disk()).await.expect("the planner waits for the disk");
}

async fn beside_a_slow_disk() {
    let settings = Settings {
        plan: PlanSettings { seed: 1, job_tokens: 10, order: JobOrder::Spread, bounds: vec![10] },
        lengths: Arc::from([10; 8]),
        epochs: 1,
        epoch_barrier: false,
        max_skip_fraction: 0.0,
    };
    let (go, gone) = std::sync::mpsc::channel();
    let (wrote, mut written) = mpsc::channel(16);
    let (handle, inbox) = planner::channel();
    let (feed, mut fed) = mpsc::channel(1);
    let (course, _seen) = pool::plan_notices(&pool::Settings {
        max_bytes: 1000,
        max_batches: 8,
        min_ready: 1,
        draw_policy: DrawPolicy::Uniform,
        replay_window: 0,
        start_step: 0,
        seed: 1,
    });
    let ledger = Slow { go: gone, wrote };
    let run = tokio::spawn(planner::run(
        watch::channel(settings).1,
        ledger,
        inbox,
        feed,
        course,
        mpsc::channel(1).1,
        Shutdown::default(),
    ));

    let first = job(&mut fed).await;
    handle.trained(1, vec![first]).await.unwrap();
    assert_eq!(written.recv().await, Some(Wrote::Began(vec![1])));
    // The transaction of step 1 hangs; seven jobs leave and are trained nevertheless.
    for step in 2..=8 {
        let receipt = job(&mut fed).await;
        handle.trained(step, vec![receipt]).await.unwrap();
    }
    assert!(fed.recv().await.is_none(), "the plan has eight jobs");
    let asked = tokio::spawn({
        let handle = handle.clone();
        async move { handle.checkpoint(8, "step-8".into()).await }
    });
    drop(handle);
    // Step 1's transaction ends, then the others' in one or two, depending on the outcomes that the planner had by
    // then. The checkpoint exists only after the last of them.
    go.send(()).unwrap();
    let mut steps = Vec::new();
    while let Some(Wrote::Began(more)) = written.recv().await {
        steps.push(more);
        go.send(()).unwrap();
        if steps.concat().len() == 7 {
            break;
        }
    }
    assert_eq!(steps.concat(), (2..=8).collect::<Vec<_>>());
    assert!(steps.len() <= 2, "one transaction for each step: {steps:?}");
    assert_eq!(written.recv().await, Some(Wrote::Checkpoint(8)));
    asked.await.unwrap().unwrap();
    let (counts, _) = run.await.unwrap().unwrap();
    assert_eq!((counts.planned, counts.trained, counts.plan_ended), (8, 8, true));
}
