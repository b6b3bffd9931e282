//! Tests of state.db: second processes, foreign files, full disks, and defective callers.

mod history;
mod recovery;

use super::*;
use draftmill_actors::{
    messages::types::{JobId, Outcome},
    planner::{
        ledger::Ledger,
        plan::{JobOrder, Plan, PlanSettings, plan_epoch},
    },
};
use std::io::{Seek, SeekFrom, Write};
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn plan(epoch: u32, jobs: u32) -> Plan {
    let lengths: Vec<u32> = (0..jobs * 2).map(|i| 10 + i % 2).collect();
    let settings = PlanSettings { seed: 1, job_tokens: 22, order: JobOrder::Spread, bounds: vec![10, 11] };
    let plan = plan_epoch(&lengths, &settings, epoch).unwrap();
    assert_eq!(plan.jobs.len() as u32, jobs + jobs % 2, "two buckets of one row in two");
    plan
}

fn job(epoch: u32, index: u32) -> JobId {
    JobId { epoch, index }
}

fn trained(step: u64) -> Outcome {
    Outcome::Trained { step }
}

fn skipped(reason: &str) -> Outcome {
    Outcome::Skipped { reason: reason.to_owned(), attempts: 3 }
}

fn from(step: u64) -> NewRun {
    NewRun { from: step, epochs: 2, samples: 40, micro_batches: 3, ..NewRun::default() }
}

/// Starts from the checkpoint of `step`; returns the number of reopened jobs.
fn reopen_after(db: &mut StateDb, step: u64) -> usize {
    db.begin_run(&from(step)).unwrap().reopened
}

fn refused(run: &Path) -> String {
    StateDb::open_or_create(run).unwrap_err().to_string()
}

fn raw(run: &Path) -> Connection {
    Connection::open(run.join("state.db")).unwrap()
}

#[test]
fn a_second_process_is_refused_and_a_stale_lock_is_harmless() {
    let run = folder();
    fs::write(run.path().join("lock"), "4294967295\n").unwrap();
    let db = StateDb::open_or_create(run.path()).unwrap();
    let text = refused(run.path());
    assert!(text.contains(&format!("process {}", std::process::id())) && text.contains("lock"), "{text}");
    drop(db);
    StateDb::open_or_create(run.path()).unwrap();
}

#[test]
fn foreign_files_are_refused_and_unchanged() {
    for content in [&b"hello"[..], &[7; 5000]] {
        let run = folder();
        let path = run.path().join("state.db");
        fs::write(&path, content).unwrap();
        let text = refused(run.path());
        assert!(text.contains("not an SQLite database") && text.contains("state.db"), "{text}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
    for sql in ["CREATE TABLE songs (name TEXT)", "CREATE TABLE meta (a)", "CREATE TABLE meta (key, value)"] {
        let run = folder();
        raw(run.path()).execute_batch(sql).unwrap();
        assert!(refused(run.path()).contains("not Draftmill's"), "{sql}");
        let mode: String = raw(run.path()).query_row("PRAGMA journal_mode", [], |row| row.get(0)).unwrap();
        assert_eq!(mode, "delete");
    }
}

#[test]
fn an_empty_file_is_a_run_without_tables_yet() {
    let run = folder();
    fs::write(run.path().join("state.db"), "").unwrap();
    assert_eq!(StateDb::open_or_create(run.path()).unwrap().counts().unwrap(), []);
}

#[test]
fn a_newer_schema_is_refused() {
    let run = folder();
    drop(StateDb::open_or_create(run.path()).unwrap());
    raw(run.path()).execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'", []).unwrap();
    let reading = StateReader::open(run.path()).unwrap_err().to_string();
    for text in [refused(run.path()), reading] {
        assert!(text.contains("schema version 3") && text.contains("versions up to 2"), "{text}");
    }
}

#[test]
fn damage_is_found_at_the_start() {
    let run = folder();
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&plan(0, 2000)).unwrap();
    drop(db);
    let path = run.path().join("state.db");
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let middle = file.metadata().unwrap().len() / 2;
    file.seek(SeekFrom::Start(middle / 4096 * 4096)).unwrap();
    file.write_all(&[0xff; 8192]).unwrap();
    let text = refused(run.path());
    assert!(text.contains("damaged") && text.contains("state.db"), "{text}");
}

#[test]
fn a_run_folder_that_cannot_be_created_is_named() {
    let run = folder();
    let path = run.path().join("file");
    fs::write(&path, "").unwrap();
    let text = refused(&path.join("run"));
    assert!(text.contains("cannot create the run folder") && text.contains("file/run"), "{text}");
}

#[test]
fn a_full_disk_rolls_back_one_write() {
    let run = folder();
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&plan(0, 10)).unwrap();
    db.record(&[(job(0, 0), trained(1))]).unwrap();
    let pages: u32 = db.connection.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
    let limit = |db: &StateDb, pages: u32| {
        db.connection.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
    };
    limit(&db, pages);
    let text = db.begin_epoch(&plan(1, 5000)).unwrap_err();
    assert!(text.contains("disk is full") && text.contains("state.db"), "{text}");
    assert_eq!(db.planned_epochs().unwrap(), [0]);
    limit(&db, 1 << 20);
    db.begin_epoch(&plan(1, 5000)).unwrap();
    assert_eq!(db.outcome(job(0, 0)).unwrap(), Some(trained(1)));
}

#[test]
fn read_only_and_locked_databases_are_named() {
    let run = folder();
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.connection.busy_timeout(Duration::ZERO).unwrap();
    db.connection.pragma_update(None, "query_only", true).unwrap();
    assert!(db.event("test", "text").unwrap_err().to_string().contains("read-only"));
    db.connection.pragma_update(None, "query_only", false).unwrap();
    let shell = raw(run.path());
    shell.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert!(db.event("test", "text").unwrap_err().to_string().contains("another program holds"));
    shell.execute_batch("ROLLBACK").unwrap();
    db.event("test", "text").unwrap();
    let read =
        |row: &rusqlite::Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?, row.get::<_, String>(2)?));
    let (time, kind, text) = shell.query_row("SELECT time, kind, text FROM events", [], read).unwrap();
    assert_eq!((kind.as_str(), text.as_str()), ("test", "text"));
    assert!((0..60_000).contains(&(now_ms() - time)), "milliseconds since 1970");
}

#[test]
fn d1_a_job_ends_once_and_a_refused_batch_leaves_nothing() {
    let run = folder();
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&plan(0, 4)).unwrap();
    db.record(&[(job(0, 0), trained(1)), (job(0, 1), skipped("NaN"))]).unwrap();
    db.record(&[]).unwrap();
    let text = db.record(&[(job(0, 2), trained(2)), (job(0, 1), trained(2))]).unwrap_err();
    assert!(text.contains("job 0/1 already ended as Skipped") && text.contains("D1"), "{text}");
    let text = db.record(&[(job(0, 2), trained(2)), (job(0, 2), trained(3))]).unwrap_err();
    assert!(text.contains("job 0/2 already ended as Trained { step: 2 }"), "{text}");
    let text = db.record(&[(job(0, 2), trained(2)), (job(0, 4), trained(2))]).unwrap_err();
    assert!(text.contains("job 0/4 is in no plan"), "{text}");
    assert_eq!(db.outcome(job(0, 2)).unwrap(), None);
    assert_eq!(db.outcome(job(0, 1)).unwrap(), Some(skipped("NaN")));
    let counts = db.counts().unwrap();
    assert_eq!(counts, [EpochCounts { epoch: 0, jobs: 4, trained: 1, skipped: 1 }]);
    assert_eq!(counts[0].open(), 2);
    assert!(db.record(&[(job(0, 2), trained(u64::MAX))]).is_err(), "not stored as another number");
}

#[test]
fn r1_outcomes_come_before_the_checkpoint_that_holds_them() {
    let run = folder();
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&plan(0, 4)).unwrap();
    assert_eq!(db.latest_checkpoint().unwrap(), None);
    db.checkpoint(5, "step-5").unwrap();
    let text = db.record(&[(job(0, 0), trained(5))]).unwrap_err();
    assert!(text.contains("job 0/0 is reported trained at step 5"), "{text}");
    assert!(db.checkpoint(4, "step-4").unwrap_err().contains("before the newest checkpoint, of step 5"));
    db.checkpoint(5, "step-5-again").unwrap();
    let newest = db.latest_checkpoint().unwrap();
    assert_eq!(newest, Some(Checkpoint { step: 5, name: "step-5-again".to_owned() }));
    assert!(db.begin_run(&from(4)).unwrap_err().to_string().contains("no checkpoint of step 4"));
}

/// speculators#716: the reader and the writer of a plan used different ids, so resume skipped nothing.
#[test]
fn speculators_716_a_plan_is_read_back_as_it_was_written() {
    let run = folder();
    let (first, second) = (plan(0, 50), plan(7, 50));
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    assert_eq!(db.begin_epoch(&first).unwrap(), [false; 50]);
    db.begin_epoch(&second).unwrap();
    db.record(&[(job(7, 3), trained(1)), (job(7, 49), skipped("why"))]).unwrap();
    drop(db);
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    assert_eq!(db.planned_epochs().unwrap(), [0, 7]);
    assert_eq!(db.plan(0).unwrap(), Some(first));
    assert_eq!(db.plan(7).unwrap().as_ref(), Some(&second));
    assert_eq!(db.plan(1).unwrap(), None);
    let ended = db.begin_epoch(&second).unwrap();
    let ended: Vec<usize> = (0..50).filter(|&index| ended[index]).collect();
    assert_eq!(ended, [3, 49]);
}

#[test]
fn another_plan_for_a_planned_epoch_is_refused_by_name() {
    let run = folder();
    let good = plan(0, 20);
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&good).unwrap();
    let mut refusal = |change: fn(&mut Plan)| {
        let mut plan = good.clone();
        change(&mut plan);
        db.begin_epoch(&plan).unwrap_err()
    };
    let text = refusal(|plan| plan.bounds[1] = 12);
    assert!(text.contains("epoch 0") && text.contains("bucket bounds was [10,11] and is now [10,12]"), "{text}");
    assert!(refusal(|plan| drop(plan.jobs.pop())).contains("the number of jobs was 20 and is now 19"));
    assert!(refusal(|plan| plan.jobs[4].width += 10).contains("the width of job 0/4 was"));
    assert!(refusal(|plan| plan.jobs[4].tokens += 1).contains("the number of tokens of job 0/4 was"));
    assert!(refusal(|plan| plan.jobs[4].bucket ^= 1).contains("the bucket of job 0/4 was"));
    assert!(refusal(|plan| plan.jobs[19].samples.reverse()).contains("job 0/19 had samples ["));
    assert!(refusal(|plan| plan.jobs.swap(1, 2)).contains("job 0/2 is at index 1"));
    db.begin_epoch(&good).unwrap();
}

/// Automodel#2478, #3396: the manifest was rewritten, not compared, so two data sets were mixed silently.
#[test]
fn automodel_2478_another_identity_is_refused_by_name() {
    let run = folder();
    let identity = |parts: &[(&str, &str)]| -> Identity {
        parts.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    };
    let old = identity(&[("seed", "1"), ("data", "abc"), ("taps", "1,5")]);
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    assert_eq!(db.identity().unwrap(), Identity::new());
    db.set_identity(&old).unwrap();
    drop(db);
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.set_identity(&old).unwrap();
    assert_eq!(db.compare_identity(&old).unwrap(), []);
    let new = identity(&[("seed", "1"), ("data", "xyz"), ("template", "t")]);
    let difference = |name: &str, old: Option<&str>, new: Option<&str>| IdentityDifference {
        name: name.to_owned(),
        old: old.map(str::to_owned),
        new: new.map(str::to_owned),
    };
    let expected = [
        difference("data", Some("abc"), Some("xyz")),
        difference("taps", Some("1,5"), None),
        difference("template", None, Some("t")),
    ];
    assert_eq!(db.compare_identity(&new).unwrap(), expected);
    let text = db.set_identity(&new).unwrap_err().to_string();
    assert!(text.contains("data was \"abc\" and is now \"xyz\"; taps was \"1,5\" and is now absent"), "{text}");
    assert_eq!(db.identity().unwrap(), old, "compared, not rewritten");
}
