//! Tests of kills, torn logs and resumes: the ledger matches the surviving weights exactly.

use super::*;
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

const CHILD_RUN: &str = "DRAFTMILL_TEST_CHILD_RUN";

/// Copies the database and its log as a killed process leaves them, with the log cut to `log_bytes`.
fn copy_as_killed(from: &Path, to: &Path, log_bytes: impl FnOnce(u64) -> u64) {
    fs::copy(from.join("state.db"), to.join("state.db")).unwrap();
    let log = to.join("state.db-wal");
    fs::copy(from.join("state.db-wal"), &log).unwrap();
    let log = fs::OpenOptions::new().write(true).open(log).unwrap();
    log.set_len(log_bytes(log.metadata().unwrap().len())).unwrap();
}

fn outcomes(db: &StateDb, jobs: &[JobId]) -> BTreeMap<JobId, Outcome> {
    jobs.iter().filter_map(|&job| Some((job, db.outcome(job).unwrap()?))).collect()
}

#[test]
fn committed_data_survives_a_process_that_never_closed() {
    let (run, left) = (folder(), folder());
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&plan(0, 10)).unwrap();
    db.record(&[(job(0, 2), trained(1))]).unwrap();
    db.checkpoint(1, "step-1").unwrap();
    db.record(&[(job(0, 3), trained(2))]).unwrap();
    // An open transaction.
    let tx = db.reader.connection.transaction().unwrap();
    tx.execute("DELETE FROM outcomes", []).unwrap();
    copy_as_killed(run.path(), left.path(), |bytes| bytes);
    assert!(fs::metadata(left.path().join("state.db-wal")).unwrap().len() > 0);
    let db = StateDb::open_or_create(left.path()).unwrap();
    let jobs: Vec<JobId> = (0..10).map(|i| job(0, i)).collect();
    assert_eq!(outcomes(&db, &jobs), BTreeMap::from([(job(0, 2), trained(1)), (job(0, 3), trained(2))]));
    assert_eq!(db.latest_checkpoint().unwrap().unwrap().step, 1);
}

/// Child process of the next test: records outcomes one by one and prints each to stderr after its commit.
#[test]
#[ignore = "run as a child process by kill_minus_nine_loses_nothing_that_was_recorded"]
fn child_that_records_until_it_is_killed() {
    let Some(run) = std::env::var_os(CHILD_RUN) else { return };
    let mut db = StateDb::open_or_create(Path::new(&run)).unwrap();
    db.begin_epoch(&plan(0, 20_000)).unwrap();
    for index in 0..20_000 {
        db.record(&[(job(0, index), trained(1))]).unwrap();
        eprintln!("recorded {index}");
    }
}

#[test]
fn kill_minus_nine_loses_nothing_that_was_recorded() {
    let run = folder();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "run_dir::db::tests::recovery::child_that_records_until_it_is_killed",
        ])
        .env(CHILD_RUN, run.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let count = |lines: &mut dyn Iterator<Item = String>| lines.filter(|line| line.starts_with("recorded ")).count();
    let before = count(&mut lines.by_ref().take(25));
    let in_use = refused(run.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let printed = before + count(&mut lines);
    assert!(in_use.contains(&format!("process {}", child.id())), "{in_use}");
    assert!((1..20_000).contains(&printed), "killed in the middle: {printed}");
    // The lock went with the process.
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    let found = db.counts().unwrap()[0].trained as usize;
    assert!(found == printed || found == printed + 1, "printed {printed}, found {found}");
    assert_eq!(reopen_after(&mut db, 0), found);
}

/// One event of a run.
#[derive(Clone, Debug)]
enum Act {
    /// One optimizer step over this many of the open jobs.
    Step(usize),
    Skip,
    Checkpoint,
    /// Kill, and resume from the checkpoint this many before the newest.
    Kill(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        6 => (1usize..4).prop_map(Act::Step),
        2 => Just(Act::Skip),
        3 => Just(Act::Checkpoint),
        1 => (0usize..3).prop_map(Act::Kill),
    ];
    prop::collection::vec(act, 1..60)
}

/// Model of a run: steps in the weights, and outcomes.
#[derive(Clone, Debug, Default)]
struct Model {
    step: u64,
    ended: BTreeMap<JobId, Outcome>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// R1 at the level of the ledger, with the jobs picked in any order, over two epochs.
    #[test]
    fn r1_reopened_jobs_are_those_that_the_surviving_weights_lack(acts in acts(), picks in any::<[usize; 32]>()) {
        let run = folder();
        let plans = [plan(0, 20), plan(1, 20)];
        let jobs: Vec<JobId> = plans.iter().flat_map(|p| &p.jobs).map(|j| j.id).collect();
        let mut db = StateDb::open_or_create(run.path()).unwrap();
        plans.iter().for_each(|p| drop(db.begin_epoch(p).unwrap()));
        let mut now = Model::default();
        let mut saved = vec![Model::default()];
        for (turn, act) in acts.into_iter().enumerate() {
            let mut open: Vec<JobId> = jobs.iter().copied().filter(|j| !now.ended.contains_key(j)).collect();
            let mut pick = || (!open.is_empty()).then(|| open.swap_remove(picks[turn % 32] % open.len()));
            match act {
                Act::Step(count) => {
                    now.step += 1;
                    let done: Vec<_> = (0..count).map_while(|_| Some((pick()?, trained(now.step)))).collect();
                    db.record(&done).unwrap();
                    now.ended.extend(done);
                }
                Act::Skip => {
                    let done: Vec<_> = pick().map(|job| (job, skipped("NaN"))).into_iter().collect();
                    db.record(&done).unwrap();
                    now.ended.extend(done);
                }
                Act::Checkpoint => {
                    db.checkpoint(now.step, &format!("step-{}", now.step)).unwrap();
                    // The first of two checkpoints of one step fixes the jobs skipped before it.
                    if saved.last().is_none_or(|m| m.step < now.step) {
                        saved.push(now.clone());
                    }
                }
                Act::Kill(back) => {
                    saved.truncate((saved.len() - back.min(saved.len() - 1)).max(1));
                    let survives = saved.last().unwrap().clone();
                    drop(db);
                    db = StateDb::open_or_create(run.path()).unwrap();
                    let reopened = reopen_after(&mut db, survives.step);
                    prop_assert_eq!(reopened, now.ended.len() - survives.ended.len());
                    now = survives;
                    let newest = db.latest_checkpoint().unwrap().map_or(0, |c| c.step);
                    prop_assert_eq!(newest, now.step);
                }
            }
            prop_assert_eq!(outcomes(&db, &jobs), now.ended.clone());
        }
        // Resumed once more and run to its end: every job ends exactly once.
        let survives = saved.last().unwrap();
        reopen_after(&mut db, survives.step);
        prop_assert_eq!(outcomes(&db, &jobs), survives.ended.clone());
        let mut rest = Vec::new();
        for plan in &plans {
            let ended = db.begin_epoch(plan).unwrap();
            rest.extend(plan.jobs.iter().zip(ended).filter(|(_, e)| !e).map(|(j, _)| (j.id, trained(survives.step + 1))));
        }
        db.record(&rest).unwrap();
        let all: BTreeSet<JobId> = rest.iter().map(|r| r.0).chain(survives.ended.keys().copied()).collect();
        prop_assert_eq!(all.len(), rest.len() + survives.ended.len());
        prop_assert_eq!(all.len(), jobs.len());
        prop_assert!(db.counts().unwrap().iter().all(|epoch| epoch.open() == 0));
    }

    /// Loss of power may cut the log: the rest is the ledger after some earlier transaction.
    #[test]
    fn a_torn_log_undoes_whole_transactions(batches in prop::collection::vec(1usize..9, 1..12), cut in 0.0f64..1.0) {
        let (run, left) = (folder(), folder());
        let plan = plan(0, 100);
        let jobs: Vec<JobId> = plan.jobs.iter().map(|j| j.id).collect();
        let mut db = StateDb::open_or_create(run.path()).unwrap();
        db.begin_epoch(&plan).unwrap();
        let mut open = jobs.iter().copied();
        let mut history = vec![BTreeMap::new()];
        for (step, count) in batches.into_iter().enumerate() {
            let batch: Vec<_> = open.by_ref().take(count).map(|j| (j, trained(step as u64 + 1))).collect();
            db.record(&batch).unwrap();
            let mut after = history.last().unwrap().clone();
            after.extend(batch);
            history.push(after);
        }
        copy_as_killed(run.path(), left.path(), |bytes| (bytes as f64 * cut) as u64);
        let db = StateDb::open_or_create(left.path()).unwrap();
        let found = outcomes(&db, &jobs);
        prop_assert!(history.contains(&found), "{found:?}");
        let planned = db.plan(0).unwrap();
        prop_assert!(planned == Some(plan) || (planned.is_none() && found.is_empty()));
    }
}
