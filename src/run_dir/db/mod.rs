//! The run's SQLite file `<run>/state.db`: plans, what became of every job, checkpoints, events, and the run's identity.
//!
//! What is durable when. Every write is one transaction in SQLite's write-ahead log, so the death of the process at any
//! moment loses nothing that was committed and leaves nothing half-written. Against loss of power, plans, checkpoints, the
//! identity and the start of a run, which reopens jobs, are synced before they return (`synchronous = FULL`), and moved from
//! the log to the file itself, so that they outlive the log. Outcomes and events are not synced one by one: the log is
//! sequential, so the commit of a checkpoint also syncs every outcome before it, and those after it would be reopened
//! at resume anyway.

mod error;
mod ledger;
mod lock;
mod queries;
mod resume;
mod runs;
mod unsigned;
mod verify;

pub use self::error::{Problem, StateError};
pub use self::lock::{RunLock, holder};
pub use self::queries::{BucketCounts, JobHistory, Skipped, Undone};
pub use self::resume::{Checkpoint, EpochCounts, Identity, IdentityDifference};
pub use self::runs::{Begun, NewRun, RunEnd, RunRow, STEP_SIZE};
pub use self::verify::Violation;
pub use draftmill_actors::planner::ledger::Change as ConfigChange;

use crate::common::failpoint;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Transaction, TransactionBehavior, params};
use std::{
    fs::{self, File},
    io,
    ops::Deref,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// What makes an empty file version 1, version 1 version 2, and so on. Files were made by these texts: none ever changes.
const SCHEMA: [&str; 2] = [include_str!("schema/1.sql"), include_str!("schema/2.sql")];

/// Version of the schema. A file with a higher one is refused, one with a lower one is brought up to it.
pub const SCHEMA_VERSION: u32 = SCHEMA.len() as u32;

/// Key of `meta` in a file that an older draftmill made: its version then.
const MIGRATED_FROM: &str = "migrated_from";

/// How long a write waits for another program, such as an sqlite3 shell, to finish its own.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The state of one run, open for the one process that may write it. It reads as a [`StateReader`] does.
#[derive(Debug)]
pub struct StateDb {
    reader: StateReader,
    /// What the connection's `synchronous` was last set to; `None` before.
    level: Option<Synced>,
    // After the connection, so that the folder is free only when the database is closed.
    _lock: RunLock,
}

/// The state of one run, open for reading.
#[derive(Debug)]
pub struct StateReader {
    connection: Connection,
    path: PathBuf,
}

impl Deref for StateDb {
    type Target = StateReader;

    fn deref(&self) -> &StateReader {
        &self.reader
    }
}

impl StateReader {
    /// Opens the state of the run folder `run` as it is now, also while a process works in the folder: it takes no lock on
    /// the folder, changes nothing, and sees one moment of the run, however long the reading takes.
    ///
    /// SQLite may leave its two (empty) files `state.db-wal` and `state.db-shm` behind; the next `train` removes them.
    pub fn open(run: &Path) -> Result<StateReader, StateError> {
        let path = run.join("state.db");
        match open_to_read(&path) {
            Ok(connection) => Ok(StateReader { connection, path }),
            Err(problem) => Err(StateError { action: "open", path, problem }),
        }
    }

    fn read<T>(
        &self,
        action: &'static str,
        work: impl FnOnce(&Connection) -> Result<T, Problem>,
    ) -> Result<T, StateError> {
        work(&self.connection).map_err(|problem| StateError { action, path: self.path.clone(), problem })
    }
}

impl StateDb {
    /// Opens the state of the run folder `run`, creating folder and file where they do not exist. Refused when another
    /// process has the folder, and when the file is damaged, not ours, or of a newer schema.
    pub fn open_or_create(run: &Path) -> Result<StateDb, StateError> {
        fs::create_dir_all(run).map_err(|error| StateError {
            action: "create the run folder",
            path: run.to_owned(),
            problem: error.into(),
        })?;
        let lock = RunLock::acquire(run)?;
        let path = run.join("state.db");
        match open(run, &path) {
            Ok(connection) => Ok(StateDb { reader: StateReader { connection, path }, level: None, _lock: lock }),
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
        let Self { reader: StateReader { connection, path }, level, .. } = self;
        let run = || {
            if *level != Some(synced) {
                *level = None;
                connection.pragma_update(None, "synchronous", synced.level())?;
                *level = Some(synced);
            }
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let value = work(&tx)?;
            failpoint::point("commit", action)?;
            tx.commit()?;
            failpoint::point("committed", action)?;
            if let Synced::AtOnce = synced {
                move_log(connection)?;
                // SQLite goes on writing to a file that has no name any more.
                if !path.exists() {
                    return Err(Problem::Vanished);
                }
            }
            Ok(value)
        };
        run().map_err(|problem| StateError { action, path: path.clone(), problem })
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

/// Moves the write-ahead log into the file itself, so that whoever loses or deletes the log loses nothing that was promised
/// to be safe. Readers may keep a part of it back; it then moves the next time.
fn move_log(connection: &Connection) -> Result<(), Problem> {
    Ok(connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))?)
}

fn open_to_read(path: &Path) -> Result<Connection, Problem> {
    if !path.exists() {
        return Err(Problem::NoRun);
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    let normal = Connection::open_with_flags(path, flags)?;
    normal.busy_timeout(BUSY_TIMEOUT)?;
    let connection = match schema_version(&normal) {
        // In a folder where nothing may be written SQLite cannot make the log's index. Without a log none is needed.
        Err(Problem::CannotOpen | Problem::ReadOnly) if !has_log(path) => {
            let name: String = path.to_string_lossy().replace('%', "%25").replace('?', "%3f").replace('#', "%23");
            Connection::open_with_flags(format!("file:{name}?immutable=1"), flags)?
        }
        _ => normal,
    };
    match schema_version(&connection)? {
        Some(SCHEMA_VERSION) => {}
        None => return Err(Problem::NoRun),
        Some(found) if found > SCHEMA_VERSION => return Err(Problem::Newer { found }),
        Some(found) => return Err(Problem::Older { found }),
    }
    // Held until the connection closes: every reading is of this moment.
    connection.execute_batch("BEGIN; SELECT count(*) FROM meta;")?;
    Ok(connection)
}

fn has_log(path: &Path) -> bool {
    fs::metadata(path.with_extension("db-wal")).is_ok_and(|log| log.len() > 0)
}

fn open(run: &Path, path: &Path) -> Result<Connection, Problem> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    // Nothing is written before the file is known to be ours, or empty.
    let version = match schema_version(&connection)? {
        Some(found) if found > SCHEMA_VERSION => return Err(Problem::Newer { found }),
        Some(0) => return Err(Problem::Foreign),
        found => found.unwrap_or(0),
    };
    let mode: String = connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))?;
    if mode != "wal" {
        return Err(Problem::NoWal);
    }
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "synchronous", Synced::AtOnce.level())?;
    if version > 0 {
        let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if verdict != "ok" {
            return Err(Problem::Damaged(verdict));
        }
    }
    if version < SCHEMA_VERSION {
        bring_up(&mut connection, version)?;
        sync_folder(run)?;
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

/// Makes a file of schema `version` (0: an empty one) one of the newest: all of it, or nothing.
fn bring_up(connection: &mut Connection, version: u32) -> Result<(), Problem> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for step in &SCHEMA[version as usize..] {
        tx.execute_batch(step)?;
    }
    let set = "INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)";
    tx.execute(set, ["schema_version", &SCHEMA_VERSION.to_string()])?;
    if version > 0 {
        tx.execute(set, [MIGRATED_FROM, &version.to_string()])?;
    }
    failpoint::point("commit", "schema")?;
    tx.commit()?;
    failpoint::point("committed", "schema")?;
    move_log(connection)
}

/// SQLite syncs what is in the file; that the file has its name, and the folder its own, is for us to sync.
fn sync_folder(run: &Path) -> io::Result<()> {
    let run = fs::canonicalize(run)?;
    failpoint::point("sync", "run folder")?;
    for folder in run.ancestors().take(2) {
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
