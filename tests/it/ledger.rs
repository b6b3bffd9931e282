//! `draftmill runs`, `draftmill ledger` and the documented queries, on runs that a real binary made.

use crate::train::{Run, SLOW, signal, text};
use draftmill::run_dir::db::StateReader;
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use std::{fs, process::Output};

/// Simulated run that was killed once and then resumed to its end.
fn killed_once() -> Run {
    let run = Run::new(&[SLOW, &["run.epochs=8"]].concat());
    let mut child = run.train_until(7);
    let dir = run.dir();
    // It waits while it is inspected, so that it cannot end before the kill.
    signal(&child, libc::SIGSTOP);
    let live = answer(&run.plain(&["runs", dir.to_str().unwrap(), "--json"]));
    assert_eq!(live[0]["state"], "running");
    assert_eq!(run.plain(&["ledger", dir.to_str().unwrap(), "--verify"]).status.code(), Some(0), "while it runs");
    signal(&child, libc::SIGCONT);
    // Between two checkpoints, so that some jobs are reopened.
    while run.steps().len() % 4 != 3 {
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(child.try_wait().unwrap().is_none(), "the run ended before it was killed");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = answer(&run.plain(&["runs", dir.to_str().unwrap(), "--json"]));
    assert_eq!((&killed[0]["state"], &killed[0]["ended"]), (&json!("killed"), &Value::Null));
    let end = run.train(&[]);
    assert!(end.status.success(), "{}", text(&end));
    let told = text(&end);
    assert!(told.contains("resuming from checkpoint step-") && told.contains("open again"), "{told}");
    run
}

fn answer(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(output)))
}

#[test]
fn runs_and_ledger_tell_what_became_of_a_run() {
    let run = killed_once();
    let dir = run.dir();
    let dir = dir.to_str().unwrap();
    let above = run.dir().parent().unwrap().to_owned();
    let (listed, table) = (run.plain(&["runs", above.to_str().unwrap(), "--json"]), run.plain(&["runs", dir]));
    let listed = &answer(&listed)[0];
    let (trained, open) = run.ledger();
    let figures = (&listed["state"], &listed["starts"], &listed["trained"], &listed["open"]);
    assert_eq!(figures, (&json!("finished"), &json!(2), &json!(trained), &json!(open)));
    for part in ["finished", "8 of 8", listed["checkpoint"].as_str().unwrap(), " UTC"] {
        assert!(text(&table).contains(part), "{part}: {}", text(&table));
    }

    let overview = answer(&run.plain(&["ledger", dir, "--json"]));
    for list in ["epochs", "buckets"] {
        let sum: u64 = overview[list].as_array().unwrap().iter().map(|row| row["trained"].as_u64().unwrap()).sum();
        assert_eq!(sum, trained, "{list}");
    }
    let state = StateReader::open(&run.dir()).unwrap();
    let undone: (u32, u32) = sql(&run)
        .query_row("SELECT epoch, idx FROM reopened ORDER BY epoch, idx", [], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap();
    let job = format!("{}/{}", undone.0, undone.1);
    let told = text(&run.plain(&["ledger", dir, "--job", &job]));
    for part in [
        &format!("job {job}: bucket"),
        "; reopened 2",
        "by start 2, which resumed from step ",
        "contained in checkpoint",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let history = answer(&run.plain(&["ledger", dir, "--job", &job, "--json"]));
    assert_eq!(history["undone"][0]["by"]["run"], 2);
    let nowhere = run.plain(&["ledger", dir, "--job", "9/0"]);
    assert!(nowhere.status.code() == Some(6) && text(&nowhere).contains("no plan in"), "{}", text(&nowhere));
    drop(state);

    let sound = run.plain(&["ledger", dir, "--verify"]);
    assert!(sound.status.success() && text(&sound).contains("P1, D1, T1 and R1 hold"), "{}", text(&sound));
    Connection::open(run.dir().join("state.db")).unwrap().execute("DELETE FROM outcomes WHERE step = 3", []).unwrap();
    let broken = run.plain(&["ledger", dir, "--verify"]);
    assert_eq!(broken.status.code(), Some(6), "{}", text(&broken));
    assert!(text(&broken).contains("R1: no job was trained at steps 3 to 3"), "{}", text(&broken));
    let broken = answer(&run.plain(&["ledger", dir, "--verify", "--json"]));
    assert_eq!(broken["sound"], false);

    fs::write(run.dir().join("state.db"), "x".repeat(5000)).unwrap();
    let unreadable = run.plain(&["runs", above.to_str().unwrap()]);
    assert_eq!(unreadable.status.code(), Some(6), "{}", text(&unreadable));
    assert!(text(&unreadable).contains("not an SQLite database"), "{}", text(&unreadable));
}

#[test]
fn what_is_no_run_is_told_with_a_remedy() {
    let run = Run::new(SLOW);
    let above = run.dir().parent().unwrap().to_owned();
    for command in ["runs", "ledger"] {
        let refused = run.plain(&[command, above.to_str().unwrap()]);
        assert!(refused.status.code() == Some(6) && text(&refused).contains("run.dir"), "{}", text(&refused));
    }
}

#[test]
fn an_export_of_a_simulation_is_refused_with_a_remedy() {
    let run = Run::new(SLOW);
    run.train_until(5).kill().unwrap();
    let (dir, out) = (run.dir(), run.dir().join("out"));
    let export = |which| {
        run.plain(&["export", "--run", dir.to_str().unwrap(), "--out", out.to_str().unwrap(), "--checkpoint", which])
    };
    for which in ["best", "latest"] {
        let refused = export(which);
        assert!(refused.status.code() == Some(5) && text(&refused).contains("a simulated run"), "{}", text(&refused));
    }
}

fn sql(run: &Run) -> Connection {
    Connection::open_with_flags(run.dir().join("state.db"), OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap()
}

/// Queries of docs/run-state.md, and every table and column of the schema.
#[test]
fn the_documented_queries_work_and_every_column_is_documented() {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/run-state.md")).unwrap();
    let run = killed_once();
    let db = sql(&run);
    let blocks: Vec<&str> = page.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let queries: Vec<&str> =
        blocks.iter().flat_map(|block| block.split(";\n")).filter(|q| !q.trim().is_empty()).collect();
    assert!(queries.len() >= 5, "{queries:?}");
    for query in queries {
        let mut statement = db.prepare(query).unwrap_or_else(|e| panic!("{e}: {query}"));
        let rows = statement.query([]).unwrap().mapped(|_| Ok(())).count();
        assert!(rows > 0 || query.contains("reason"), "nothing found: {query}");
    }
    let columns = "SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c WHERE t.type = 'table'";
    let mut statement = db.prepare(columns).unwrap();
    let columns = statement.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))).unwrap();
    for (table, column) in columns.map(Result::unwrap) {
        let line = page.lines().find(|line| line.starts_with(&format!("| `{table}` |")));
        assert!(line.is_some_and(|line| line.contains(&format!("`{column}`"))), "{table}.{column} is not documented");
    }
}
