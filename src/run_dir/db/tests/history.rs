//! Tests of migration, concurrent readers, lost logs, the history of a job, and `verify`.

use super::*;
use std::collections::BTreeSet;

/// Creates a file of schema version 1 in the middle of a run.
fn version_1(run: &Path) {
    let old = raw(run);
    old.execute_batch(include_str!("v1.sql")).unwrap();
    old.execute_batch(
        "INSERT INTO meta VALUES ('schema_version', '1'), ('identity.run.seed', '1'), ('identity.data', 'abc');
         INSERT INTO checkpoints VALUES (1, 'step-1', 5);
         INSERT INTO events (time, kind, text) VALUES (5, 'note', 'of old');",
    )
    .unwrap();
    let plan = plan(0, 4);
    old.execute("INSERT INTO plans VALUES (0, 4, '[10,11]', 5)", []).unwrap();
    for job in &plan.jobs {
        let samples = format!("[{},{}]", job.samples[0], job.samples[1]);
        let row = params![job.id.index, job.bucket, job.tokens, job.width, samples];
        old.execute("INSERT INTO jobs VALUES (0, ?1, ?2, ?3, ?4, ?5)", row).unwrap();
    }
    old.execute_batch(
        "INSERT INTO outcomes VALUES (0, 0, 1, NULL, NULL, 0), (0, 1, NULL, 'NaN', 3, 0), (0, 2, 2, NULL, NULL, 1)",
    )
    .unwrap();
}

fn schema(run: &Path) -> BTreeSet<String> {
    let connection = raw(run);
    let mut statement = connection.prepare("SELECT coalesce(sql, name) FROM sqlite_schema").unwrap();
    statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_file_of_version_1_is_migrated_with_its_content() {
    let (run, fresh) = (folder(), folder());
    version_1(run.path());
    let text = StateReader::open(run.path()).unwrap_err().to_string();
    assert!(text.contains("schema version 1") && text.contains("draftmill train"), "{text}");
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    drop(StateDb::open_or_create(fresh.path()).unwrap());
    assert_eq!(schema(run.path()), schema(fresh.path()));
    assert_eq!(db.plan(0).unwrap(), Some(plan(0, 4)));
    assert_eq!(db.outcome(job(0, 0)).unwrap(), Some(trained(1)));
    assert_eq!(db.outcome(job(0, 1)).unwrap(), Some(skipped("NaN")));
    assert_eq!(db.latest_checkpoint().unwrap().unwrap().name, "step-1");
    assert_eq!(db.runs().unwrap(), []);
    assert_eq!(db.verify().unwrap(), []);

    // Parts of the identity unknown to version 1 are added; the others are compared.
    let mut identity = db.identity().unwrap();
    identity.insert("template".into(), "t".into());
    db.set_identity(&identity).unwrap();
    assert_eq!(db.identity().unwrap(), identity);
    identity.insert("template".into(), "u".into());
    identity.insert("data".into(), "xyz".into());
    let names: Vec<_> = db.compare_identity(&identity).unwrap().into_iter().map(|d| d.name).collect();
    assert_eq!(names, ["data", "template"]);

    assert_eq!(reopen_after(&mut db, 1), 1);
    drop(db);
    StateDb::open_or_create(run.path()).unwrap();
    assert_eq!(StateReader::open(run.path()).unwrap().runs().unwrap().len(), 1);
}

#[test]
fn a_reader_sees_one_snapshot_and_blocks_no_writer() {
    let run = folder();
    let text = StateReader::open(run.path()).unwrap_err().to_string();
    assert!(text.contains("this folder has no run") && fs::read_dir(run.path()).unwrap().count() == 0, "{text}");
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&plan(0, 4)).unwrap();
    let reader = StateReader::open(run.path()).unwrap();
    db.record(&[(job(0, 0), trained(1))]).unwrap();
    db.checkpoint(1, "step-1").unwrap();
    db.begin_epoch(&plan(1, 4)).unwrap();
    assert_eq!(reader.counts().unwrap(), [EpochCounts { epoch: 0, jobs: 4, trained: 0, skipped: 0 }]);
    let later = StateReader::open(run.path()).unwrap();
    assert_eq!(later.counts().unwrap().len(), 2);
    let text = later.connection.execute("DELETE FROM outcomes", []).unwrap_err().to_string();
    assert!(text.contains("readonly"), "{text}");
    drop((reader, later));
    // The writer continues, and closes normally.
    db.record(&[(job(0, 1), trained(2))]).unwrap();
    drop(db);
    let before = fs::read(run.path().join("state.db")).unwrap();
    assert_eq!(StateReader::open(run.path()).unwrap().counts().unwrap()[0].trained, 2);
    assert_eq!(fs::read(run.path().join("state.db")).unwrap(), before);
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.record(&[(job(0, 2), trained(3))]).unwrap();
}

/// A copy of `state.db` without its log has all synced data.
#[test]
fn a_lost_log_costs_nothing_up_to_the_last_checkpoint() {
    let (run, left) = (folder(), folder());
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.set_identity(&Identity::from([("seed".into(), "1".into())])).unwrap();
    db.begin_run(&from(0)).unwrap();
    db.begin_epoch(&plan(0, 10)).unwrap();
    db.record(&[(job(0, 2), trained(1)), (job(0, 5), skipped("NaN"))]).unwrap();
    db.checkpoint(1, "step-1").unwrap();
    db.record(&[(job(0, 3), trained(2))]).unwrap();
    fs::copy(run.path().join("state.db"), left.path().join("state.db")).unwrap();
    let mut db = StateDb::open_or_create(left.path()).unwrap();
    assert_eq!(db.latest_checkpoint().unwrap().unwrap().name, "step-1");
    assert_eq!(db.outcome(job(0, 2)).unwrap(), Some(trained(1)));
    assert_eq!(db.outcome(job(0, 5)).unwrap(), Some(skipped("NaN")));
    assert_eq!(db.plan(0).unwrap(), Some(plan(0, 10)));
    assert_eq!((db.identity().unwrap().len(), db.runs().unwrap().len()), (1, 1));
    reopen_after(&mut db, 1);
    assert_eq!(db.outcome(job(0, 3)).unwrap(), None);
}

#[test]
fn a_truncated_file_is_reported() {
    let run = folder();
    let mut db = StateDb::open_or_create(run.path()).unwrap();
    db.begin_epoch(&plan(0, 2000)).unwrap();
    drop(db);
    let path = run.path().join("state.db");
    let whole = fs::read(&path).unwrap();
    for length in [whole.len() - 4096, whole.len() / 2, whole.len() / 2 + 100, 4096, 100, 50] {
        fs::write(&path, &whole[..length]).unwrap();
        let text = refused(run.path());
        let reported = ["damaged", "not an SQLite database"].iter().any(|part| text.contains(part));
        assert!(reported && text.contains("state.db"), "{length}: {text}");
    }
    fs::write(&path, whole).unwrap();
    StateDb::open_or_create(run.path()).unwrap();
}

/// Three starts: 6 steps of which the checkpoint holds 4, then one that is undone, then the end.
fn a_whole_run(run: &Path) -> StateDb {
    let mut db = StateDb::open_or_create(run).unwrap();
    db.set_identity(&Identity::from([("plan.job_tokens".into(), "22".into())])).unwrap();
    let new = |from| NewRun { from, epochs: 1, samples: 40, micro_batches: 2, ..NewRun::default() };
    let steps = |db: &mut StateDb, steps: std::ops::RangeInclusive<u64>| {
        for step in steps {
            let first = (step as u32 - 1) * 2;
            db.record(&[(job(0, first), trained(step)), (job(0, first + 1), trained(step))]).unwrap();
            if step.is_multiple_of(4) {
                db.checkpoint(step, &format!("step-{step}")).unwrap();
            }
        }
    };
    db.begin_run(&new(0)).unwrap();
    db.begin_epoch(&plan(0, 20)).unwrap();
    steps(&mut db, 1..=6);
    assert_eq!(db.begin_run(&new(4)).unwrap(), StartedRun { run: 2, reopened: 4 });
    steps(&mut db, 5..=8);
    assert_eq!(db.begin_run(&new(4)).unwrap(), StartedRun { run: 3, reopened: 8 });
    steps(&mut db, 5..=9);
    db.record(&[(job(0, 18), skipped("NaN")), (job(0, 19), trained(10))]).unwrap();
    db.checkpoint(10, "step-10").unwrap();
    db.end_run(3, &RunEnd::Finished, Some(10)).unwrap();
    db
}

#[test]
fn a_job_lists_undone_outcomes_with_their_start() {
    let run = folder();
    let mut db = a_whole_run(run.path());
    let changed = ConfigChange { key: "a.b".into(), old: "1".into(), new: "2".into() };
    db.config_changed(10, &[changed]).unwrap();
    let history = db.history(job(0, 8)).unwrap().unwrap();
    assert_eq!((history.job.id, history.of, history.outcome), (job(0, 8), 20, Some(trained(5))));
    assert_eq!(history.checkpoint.unwrap().name, "step-8");
    let undone: Vec<_> = history.undone.iter().map(|u| (u.by.run, u.by.resumed_from, u.outcome.clone())).collect();
    assert_eq!(undone, [(2, 4, trained(5)), (3, 4, trained(5))]);
    let skip = db.history(job(0, 18)).unwrap().unwrap();
    assert_eq!((skip.outcome, skip.checkpoint.unwrap().name), (Some(skipped("NaN")), "step-10".into()));
    assert_eq!(db.history(job(0, 0)).unwrap().unwrap().undone, []);
    assert_eq!(db.history(job(1, 0)).unwrap(), None);
    let buckets = db.bucket_counts().unwrap();
    let sums = buckets.iter().fold((0, 0, 0, 0), |s, b| (s.0 + b.jobs, s.1 + b.trained, s.2 + b.skipped, s.3 + b.open));
    assert_eq!((buckets.len(), sums), (2, (20, 19, 1, 0)));
    assert_eq!(db.skipped().unwrap(), [Skipped { job: "0/18".into(), attempts: 3, reason: "NaN".into() }]);
    let runs = db.runs().unwrap();
    let ends: Vec<_> = runs.iter().map(|r| r.outcome.as_deref()).collect();
    assert_eq!((ends, runs[2].step, db.last_step().unwrap()), (vec![None, None, Some("finished")], Some(10), 10));
    let superseded: Vec<String> = db
        .connection
        .prepare("SELECT text FROM events WHERE kind = 'checkpoint-given-up'")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(superseded, ["step-8"]);
}

/// Each line breaks one invariant; `verify` must name it, with the job or step.
#[test]
fn verify_names_what_is_broken() {
    let run = folder();
    let db = a_whole_run(run.path());
    assert_eq!(db.verify().unwrap(), []);
    drop(db);
    let path = run.path().join("state.db");
    let sound = fs::read(&path).unwrap();
    for (sql, invariant, part) in [
        (
            "UPDATE jobs SET samples = (SELECT samples FROM jobs WHERE idx = 1) WHERE idx = 0",
            "P1",
            "job 0/1 holds sample ",
        ),
        (
            "UPDATE jobs SET samples = (SELECT samples FROM jobs WHERE idx = 1) WHERE idx = 0",
            "P1",
            "is in no job of epoch 0",
        ),
        (
            "UPDATE jobs SET samples = '[40,41]' WHERE idx = 0",
            "P1",
            "epoch 0 holds sample 41, but the samples end at 39",
        ),
        ("DELETE FROM outcomes WHERE idx = 19; DELETE FROM jobs WHERE idx = 19", "P1", "epoch 0 has 19 jobs; 20 were"),
        ("UPDATE jobs SET bucket = 1 - bucket WHERE idx = 3", "P1", "job 0/3 is of width"),
        ("UPDATE jobs SET tokens = 50 WHERE idx = 3", "P1", "job 0/3 cannot hold 50 tokens in 2 samples"),
        (
            "UPDATE meta SET value = '21' WHERE key LIKE '%job_tokens'",
            "P1",
            "has 22 token slots; plan.job_tokens is 21",
        ),
        ("DELETE FROM plans", "P1", "job 0/0 belongs to an epoch that has no plan"),
        (
            "INSERT INTO outcomes VALUES (0, 20, 9, NULL, NULL, 8)",
            "D1",
            "job 0/20 has an outcome (in the table outcomes), but",
        ),
        (
            "INSERT INTO reopened VALUES (3, 1, 2, 9, NULL, NULL)",
            "D1",
            "job 3/1 has an outcome (in the table reopened), but",
        ),
        ("DELETE FROM outcomes WHERE idx = 18", "D1", "start 3 is recorded as finished, but job 0/18 is open"),
        ("DELETE FROM outcomes WHERE idx = 7", "T1", "step 4 has 1 micro-batches; start 1 makes steps of 2"),
        ("UPDATE outcomes SET step = 10 WHERE idx IN (16, 17)", "T1", "step 10 has 3 micro-batches; start 3 makes"),
        ("DELETE FROM outcomes WHERE step IN (5, 6)", "R1", "no job was trained at steps 5 to 6"),
        ("UPDATE outcomes SET step = -1 WHERE idx = 0", "R1", "trained at step -1"),
        (
            "UPDATE outcomes SET checkpoint = 8 WHERE idx = 13",
            "R1",
            "job 0/13 was trained at step 7, after the checkpoint",
        ),
        ("UPDATE outcomes SET checkpoint = 2 WHERE idx = 18", "R1", "job 0/18 ended after a checkpoint of step 2"),
        ("INSERT INTO checkpoints VALUES (11, 'step-11', 0)", "R1", "checkpoint step-11 holds step 11, but the last"),
        ("DELETE FROM checkpoints WHERE step = 4", "R1", "start 2 resumed from step 4, which has no checkpoint"),
        ("DELETE FROM checkpoints WHERE step = 10", "R1", "start 3 ended (finished), but its last step is 10"),
        ("DELETE FROM reopened WHERE run = 2 AND idx = 8", "R1", "start 2 reopened 4 jobs, but 3 are recorded"),
        ("UPDATE reopened SET step = 4 WHERE run = 2 AND idx = 8", "R1", "start 2 reopened job 0/8 of step 4"),
    ] {
        for leftover in ["state.db-wal", "state.db-shm"] {
            let _ = fs::remove_file(run.path().join(leftover));
        }
        fs::write(&path, &sound).unwrap();
        let shell = raw(run.path());
        shell.pragma_update(None, "foreign_keys", false).unwrap();
        shell.execute_batch(sql).unwrap();
        drop(shell);
        let found = StateReader::open(run.path()).unwrap().verify().unwrap();
        assert!(found.iter().any(|v| v.invariant == invariant && v.text.contains(part)), "{sql}\n{found:#?}");
    }
}

#[test]
fn verify_shortens_a_long_list() {
    let run = folder();
    drop(a_whole_run(run.path()));
    raw(run.path()).execute_batch("UPDATE jobs SET samples = '[0,1]'").unwrap();
    let found = StateReader::open(run.path()).unwrap().verify().unwrap();
    assert!(found.len() == 21 && found[20].text == "and 56 more of this kind", "{found:#?}");
}
