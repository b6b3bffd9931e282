//! State of a run in SQLite, `<run>/state.db`: plans, job outcomes, checkpoints, events and the run's identity.
//!
//! Durability: each write is one transaction in SQLite's write-ahead log, so a kill at any moment loses no committed data.
//! Plans, checkpoints, the identity and the start of a run are synced before they return (`synchronous = FULL`) and moved
//! from the log into the database file, so they survive loss of power and of the log. Outcomes and events are not synced one
//! by one. The log is sequential, so the commit of a checkpoint syncs all outcomes before it; a resume reopens later ones
//! anyway.

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
pub use self::queries::{BucketCounts, JobHistory, Skipped, UndoneOutcome};
pub use self::resume::{Checkpoint, EpochCounts, Identity, IdentityDifference};
pub use self::runs::{NewRun, RunEnd, RunRow, STEP_SIZE, StartedRun};
pub use self::verify::Violation;
pub use draftmill_actors::planner::ledger::Change as ConfigChange;

use super::files::STATE_DB;
use crate::common::{failpoint, fs::exists};
use rusqlite::{Connection, OpenFlags, OptionalExtension, Transaction, TransactionBehavior, params};
use std::{
    fs::{self, File},
    io,
    ops::Deref,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Migrations: entry `n` migrates version `n` to `n + 1`, and an empty file is version 0. Existing files contain these texts,
/// so they must never change.
const SCHEMA: [&str; 2] = [include_str!("schema/1.sql"), include_str!("schema/2.sql")];

/// Version of the schema. A file with a higher version is refused, one with a lower version is migrated.
pub const SCHEMA_VERSION: u32 = SCHEMA.len() as u32;

/// Key of `meta` with the original version of a migrated file.
const MIGRATED_FROM: &str = "migrated_from";

/// Timeout of a write while another program, such as an sqlite3 shell, writes.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// State of a run, open for writing by this process. Dereferences to a [`StateReader`].
#[derive(Debug)]
pub struct StateDb {
    reader: StateReader,
    /// File that the connection has open.
    file: FileId,
    /// Current `synchronous` setting of the connection; `None` before the first write.
    level: Option<Synced>,
    // Declared after the connection, so that the lock is released after the database is closed.
    _lock: RunLock,
}

/// State of a run, open for reading.
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
    /// Opens a snapshot of the state of the run folder `run`, also while a process uses the folder. It takes no lock and
    /// changes nothing; all queries see the same moment.
    ///
    /// SQLite may leave its two (empty) files `state.db-wal` and `state.db-shm`; the next `train` removes them.
    ///
    /// # Errors
    /// No run in the folder, another schema version, or a damaged file.
    pub fn open(run: &Path) -> Result<StateReader, StateError> {
        let path = run.join(STATE_DB);
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
    /// Opens the state of the run folder `run`, and creates folder and file if they are absent.
    ///
    /// # Errors
    /// Another process uses the folder, or the file is damaged, foreign, or of a newer schema.
    pub fn open_or_create(run: &Path) -> Result<StateDb, StateError> {
        fs::create_dir_all(run).map_err(|error| StateError {
            action: "create the run folder",
            path: run.to_owned(),
            problem: error.into(),
        })?;
        let lock = RunLock::acquire(run)?;
        let path = run.join(STATE_DB);
        match open(run, &path) {
            Ok((connection, file)) => {
                Ok(StateDb { reader: StateReader { connection, path }, file, level: None, _lock: lock })
            }
            Err(problem) => Err(StateError { action: "open", path, problem }),
        }
    }

    /// File that is open.
    pub fn file(&self) -> FileId {
        self.file
    }

    /// Records an event with the current time.
    ///
    /// # Errors
    /// A [`StateError`].
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

    /// Runs `work` as one transaction, which an error rolls back.
    fn write<T>(
        &mut self,
        action: &'static str,
        synced: Synced,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, Problem>,
    ) -> Result<T, StateError> {
        let Self { reader: StateReader { connection, path }, level, file, .. } = self;
        let run = || {
            if *level != Some(synced) {
                *level = None;
                connection.pragma_update(None, "synchronous", synced.level())?;
                *level = Some(synced);
            }
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let value = work(&tx)?;
            // SQLite continues to write to a file that was moved, deleted or replaced.
            file.check(path)?;
            failpoint::point("commit", action)?;
            tx.commit()?;
            failpoint::point("committed", action)?;
            if let Synced::AtOnce = synced {
                move_log(connection)?;
                file.check(path)?;
            }
            Ok(value)
        };
        run().map_err(|problem| StateError { action, path: path.clone(), problem })
    }
}

/// Device and inode of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FileId(u64, u64);

impl FileId {
    /// File at a path.
    ///
    /// # Errors
    /// An I/O error.
    pub fn of(path: &Path) -> io::Result<FileId> {
        let data = fs::metadata(path)?;
        Ok(FileId(data.dev(), data.ino()))
    }

    /// Compares the open file with the file at the path.
    fn check(self, path: &Path) -> Result<(), Problem> {
        match FileId::of(path) {
            Ok(found) if found == self => Ok(()),
            Ok(_) => Err(Problem::Replaced),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Problem::Vanished),
            Err(error) => Err(error.into()),
        }
    }
}

/// Milliseconds since 1970, UTC, for all time stamps in state.db.
pub fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Time at which a transaction survives loss of power.
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

/// Moves the write-ahead log into the database file, so that losing the log loses no synced data. Readers may delay a part of
/// it until the next call.
fn move_log(connection: &Connection) -> Result<(), Problem> {
    Ok(connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()))?)
}

fn open_to_read(path: &Path) -> Result<Connection, Problem> {
    if !exists(path)? {
        return Err(Problem::NoRun);
    }
    readable(path)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
    let normal = Connection::open_with_flags(path, flags)?;
    normal.busy_timeout(BUSY_TIMEOUT)?;
    let connection = match schema_version(&normal) {
        // In a read-only folder SQLite cannot create the log's index, which is not needed without a log.
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
    // This transaction stays open until the connection closes, so all queries see the same snapshot.
    connection.execute_batch("BEGIN; SELECT count(*) FROM meta;")?;
    Ok(connection)
}

/// Cause of an unreadable file, which SQLite does not tell. The file is not opened: closing it would release SQLite's locks.
fn readable(path: &Path) -> io::Result<()> {
    regular(path)?;
    let name = std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)?;
    // SAFETY: the name is NUL-terminated and outlives the call.
    match unsafe { libc::access(name.as_ptr(), libc::R_OK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Refuses a pipe or device, which SQLite would wait for.
fn regular(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(()),
        Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn has_log(path: &Path) -> bool {
    fs::metadata(path.with_extension("db-wal")).is_ok_and(|log| log.len() > 0)
}

fn open(run: &Path, path: &Path) -> Result<(Connection, FileId), Problem> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    regular(path)?;
    let mut connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    // Nothing is written before the file is known to be Draftmill's, or empty.
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
        migrate(&mut connection, version)?;
        sync_folder(run)?;
    }
    Ok((connection, FileId::of(path)?))
}

/// Schema version of a database; `None` if it is empty, as after a kill before the tables were committed.
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
            // Table `meta` of another program.
            Problem::Sqlite(_) => Problem::Foreign,
            problem => problem,
        })?;
    value.and_then(|text| text.parse().ok()).map(Some).ok_or(Problem::Foreign)
}

/// Migrates a file of schema `version` (0 if empty) to the newest version in one transaction.
fn migrate(connection: &mut Connection, version: u32) -> Result<(), Problem> {
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

/// Syncs the run folder and its parent. SQLite syncs the content of the file only, not the folder entries.
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
