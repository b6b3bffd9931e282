//! The run's SQLite file `<run>/state.db`: plans, what became of every job, checkpoints, events, and the run's identity.
//!
//! What is durable when. Every write is one transaction in SQLite's write-ahead log, so the death of the process at any
//! moment loses nothing that was committed and leaves nothing half-written. Against loss of power, plans, checkpoints, the
//! identity and reopening are synced before they return (`synchronous = FULL`). Outcomes and events are not synced one
//! by one: the log is sequential, so the commit of a checkpoint also syncs every outcome before it, and those after it
//! would be reopened at resume anyway.

mod error;
mod ledger;
mod lock;
mod resume;
mod unsigned;

pub use error::{Problem, StateError};
pub use lock::RunLock;
pub use resume::{Checkpoint, EpochCounts, Identity, IdentityDifference};

use rusqlite::{Connection, OpenFlags, OptionalExtension, Transaction, TransactionBehavior, params};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Version of `schema.sql`. A file with a higher one is refused.
pub const SCHEMA_VERSION: u32 = 1;

/// How long a write waits for another program, such as an sqlite3 shell, to finish its own.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The state of one run, open for the one process that may write it.
#[derive(Debug)]
pub struct StateDb {
    connection: Connection,
    /// What the connection's `synchronous` was last set to; `None` before.
    level: Option<Synced>,
    path: PathBuf,
    // After the connection, so that the folder is free only when the database is closed.
    _lock: RunLock,
}

impl StateDb {
    /// Opens the state of the run folder `run`, creating folder and file where they do not exist. Refused when another
    /// process has the folder, and when the file is damaged, not ours, or of a newer schema.
    pub fn open_or_create(run: &Path) -> Result<StateDb, StateError> {
        fs::create_dir_all(run).map_err(|error| StateError {
            action: "create the run folder",
            path: run.to_owned(),
            problem: Problem::Io(error),
        })?;
        let lock = RunLock::acquire(run)?;
        let path = run.join("state.db");
        match open(run, &path) {
            Ok(connection) => Ok(StateDb { connection, level: None, path, _lock: lock }),
            Err(problem) => Err(StateError { action: "open", path, problem }),
        }
    }

    /// Notes something that a person may want to know of later, with the time.
    pub fn event(&mut self, kind: &str, text: &str) -> Result<(), StateError> {
        self.write("note an event in", Synced::WithNextCheckpoint, |tx| {
            tx.prepare_cached("INSERT INTO events (time, kind, text) VALUES (?1, ?2, ?3)")?.execute(params![
                now_ms(),
                kind,
                text
            ])?;
            Ok(())
        })
    }

    /// Runs `work` as one transaction: all of it is kept, or, after an error, nothing.
    fn write<T>(
        &mut self,
        action: &'static str,
        synced: Synced,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, Problem>,
    ) -> Result<T, StateError> {
        let Self { connection, level, .. } = self;
        let run = || {
            if *level != Some(synced) {
                *level = None;
                connection.pragma_update(None, "synchronous", synced.level())?;
                *level = Some(synced);
            }
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let value = work(&tx)?;
            tx.commit()?;
            Ok(value)
        };
        run().map_err(|problem| StateError { action, path: self.path.clone(), problem })
    }

    fn read<T>(
        &self,
        action: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Problem>,
    ) -> Result<T, StateError> {
        work(&self.connection).map_err(|problem| StateError { action, path: self.path.clone(), problem })
    }
}

/// Milliseconds since 1970, UTC: the one source of wall-clock time stamps.
pub fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// When a transaction outlives a loss of power.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Synced {
    AtOnce,
    WithNextCheckpoint,
}

impl Synced {
    fn level(self) -> &'static str {
        match self {
            Synced::AtOnce => "FULL",
            Synced::WithNextCheckpoint => "NORMAL",
        }
    }
}

fn open(run: &Path, path: &Path) -> Result<Connection, Problem> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    // Nothing is written before the file is known to be ours, or empty.
    let fresh = match schema_version(&connection)? {
        None => true,
        Some(SCHEMA_VERSION) => false,
        Some(found) if found > SCHEMA_VERSION => return Err(Problem::Newer { found }),
        Some(_) => return Err(Problem::Foreign),
    };
    let mode: String = connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))?;
    if mode != "wal" {
        return Err(Problem::NoWal);
    }
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "synchronous", Synced::AtOnce.level())?;
    if fresh {
        create(&mut connection)?;
        sync_folder(run)?;
    } else {
        let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if verdict != "ok" {
            return Err(Problem::Damaged(verdict));
        }
    }
    Ok(connection)
}

/// The schema version of a database; `None` when it is empty, as after a kill before the tables were committed.
fn schema_version(connection: &Connection) -> Result<Option<u32>, Problem> {
    let count = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, u32>(0));
    if count("SELECT count(*) FROM sqlite_schema")? == 0 {
        return Ok(None);
    }
    if count("SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'meta'")? == 0 {
        return Err(Problem::Foreign);
    }
    let value: Option<String> = connection
        .query_row("SELECT value FROM meta WHERE key = 'schema_version'", [], |row| row.get(0))
        .optional()
        .map_err(|error| match Problem::from(error) {
            // Another program's table of the same name.
            Problem::Sqlite(_) => Problem::Foreign,
            problem => problem,
        })?;
    value.and_then(|text| text.parse().ok()).map(Some).ok_or(Problem::Foreign)
}

fn create(connection: &mut Connection) -> Result<(), Problem> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute_batch(include_str!("schema.sql"))?;
    tx.execute("INSERT INTO meta (key, value) VALUES ('schema_version', ?1)", [SCHEMA_VERSION.to_string()])?;
    Ok(tx.commit()?)
}

/// SQLite syncs what is in the file; that the file has its name, and the folder its own, is for us to sync.
fn sync_folder(run: &Path) -> io::Result<()> {
    let run = fs::canonicalize(run)?;
    for folder in run.ancestors().take(2) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
