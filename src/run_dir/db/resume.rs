//! Queries for resuming: the run's identity, its checkpoints and the job counts of its epochs.

use super::{MIGRATED_FROM, Problem, StateDb, StateError, StateReader, Synced, unsigned::Unsigned};
use crate::run_dir::checkpoint::Origin;
use rusqlite::{Connection, OptionalExtension};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// Key of `meta` with the id of the run.
const RUN_ID: &str = "run_id";

/// Values that must not change for a run to resume, by name: data, tokenizer, template, seed, buckets, target, taps.
pub type Identity = BTreeMap<String, String>;

/// Changed part of the identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityDifference {
    pub name: String,
    /// Value at the first start; `None` if the part was absent.
    pub old: Option<String>,
    pub new: Option<String>,
}

impl fmt::Display for IdentityDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| value.as_ref().map_or("absent".to_owned(), |v| format!("\"{v}\""));
        write!(f, "{} was {} and is now {}", self.name, shown(&self.old), shown(&self.new))
    }
}

/// Recorded checkpoint. Its folder was complete and synced before it was recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checkpoint {
    pub step: u64,
    pub name: String,
}

/// Job counts of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct EpochCounts {
    pub epoch: u32,
    pub jobs: u64,
    pub trained: u64,
    pub skipped: u64,
}

impl EpochCounts {
    /// Number of jobs without outcome.
    pub fn open(&self) -> u64 {
        self.jobs - self.trained - self.skipped
    }
}

impl StateDb {
    /// Writes the identity at the first start of a run, and compares it at later starts.
    ///
    /// # Errors
    /// [`Problem::IdentityDiffers`] with every difference, or another [`StateError`].
    pub fn set_identity(&mut self, new: &Identity) -> Result<(), StateError> {
        self.write("write the identity to", Synced::AtOnce, |tx| {
            let differences = changed(tx, new)?;
            if !differences.is_empty() {
                return Err(Problem::IdentityDiffers { differences });
            }
            let mut insert =
                tx.prepare_cached("INSERT OR IGNORE INTO meta (key, value) VALUES ('identity.' || ?1, ?2)")?;
            for (name, value) in new {
                insert.execute([name, value])?;
            }
            // Checkpoints carry it, so that those of another run with the same settings are recognised.
            tx.execute("INSERT OR IGNORE INTO meta (key, value) VALUES (?1, lower(hex(randomblob(8))))", [RUN_ID])?;
            Ok(())
        })
    }
}

impl StateReader {
    /// Identity of the run; empty before its first start.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn identity(&self) -> Result<Identity, StateError> {
        self.read("read the identity from", identity)
    }

    /// Run that the checkpoints must belong to.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn origin(&self) -> Result<Origin, StateError> {
        self.read("read the run from", |connection| {
            let mut statement = connection.prepare_cached("SELECT value FROM meta WHERE key = ?1")?;
            let mut value = |key| statement.query_row([key], |row| row.get::<_, String>(0)).optional();
            let (run, seed) = (value(RUN_ID)?, value("identity.run.seed")?);
            Ok(Origin { run, seed: seed.and_then(|seed| seed.parse().ok()) })
        })
    }

    /// Differences between `new` and the identity of the run, by name.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn compare_identity(&self, new: &Identity) -> Result<Vec<IdentityDifference>, StateError> {
        self.read("compare the identity with", |connection| changed(connection, new))
    }

    /// Time of the newest checkpoint, in seconds since 1970; `None` before the first.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn checkpoint_time(&self) -> Result<Option<f64>, StateError> {
        self.read("read checkpoints from", |connection| Ok(checkpoint_time(connection)?.map(|ms| ms as f64 / 1e3)))
    }

    /// Newest checkpoint; `None` before the first.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn latest_checkpoint(&self) -> Result<Option<Checkpoint>, StateError> {
        Ok(self.checkpoints()?.into_iter().next())
    }

    /// All recorded checkpoints, newest first. Retention may have deleted their folders.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>, StateError> {
        self.read("read the checkpoints from", |connection| {
            let mut statement = connection.prepare_cached("SELECT step, name FROM checkpoints ORDER BY step DESC")?;
            let read =
                |row: &rusqlite::Row<'_>| Ok(Checkpoint { step: row.get::<_, Unsigned>(0)?.0, name: row.get(1)? });
            Ok(statement.query_map([], read)?.collect::<Result<_, _>>()?)
        })
    }

    /// Planned epochs, ascending.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn planned_epochs(&self) -> Result<Vec<u32>, StateError> {
        Ok(self.counts()?.iter().map(|counts| counts.epoch).collect())
    }

    /// Job counts of each planned epoch, ascending.
    ///
    /// # Errors
    /// A [`StateError`].
    pub fn counts(&self) -> Result<Vec<EpochCounts>, StateError> {
        self.read("count outcomes in", |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT epoch, jobs, count(step), count(reason) FROM plans LEFT JOIN outcomes USING (epoch)
                 GROUP BY epoch ORDER BY epoch",
            )?;
            let counts = statement.query_map([], |row| {
                let count = |column| row.get::<_, Unsigned>(column).map(|Unsigned(n)| n);
                Ok(EpochCounts { epoch: row.get(0)?, jobs: count(1)?, trained: count(2)?, skipped: count(3)? })
            })?;
            Ok(counts.collect::<Result<_, _>>()?)
        })
    }
}

/// Time of the newest checkpoint, in milliseconds since 1970.
fn checkpoint_time(connection: &Connection) -> Result<Option<i64>, rusqlite::Error> {
    let newest = "SELECT time FROM checkpoints ORDER BY step DESC LIMIT 1";
    connection.prepare_cached(newest)?.query_row([], |row| row.get(0)).optional()
}

/// Step of the newest checkpoint; 0 before the first.
pub(super) fn newest_checkpoint(connection: &Connection) -> Result<u64, rusqlite::Error> {
    connection
        .prepare_cached("SELECT coalesce(max(step), 0) FROM checkpoints")?
        .query_row([], |row| row.get(0))
        .map(|Unsigned(step)| step)
}

fn identity(connection: &Connection) -> Result<Identity, Problem> {
    let mut statement =
        connection.prepare_cached("SELECT substr(key, 10), value FROM meta WHERE key LIKE 'identity.%'")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Relevant differences. A run without identity has none, and a run of an older draftmill may lack parts that were added to
/// the identity later.
fn changed(connection: &Connection, new: &Identity) -> Result<Vec<IdentityDifference>, Problem> {
    let old = identity(connection)?;
    if old.is_empty() {
        return Ok(Vec::new());
    }
    let since: bool =
        connection.query_row("SELECT EXISTS (SELECT 1 FROM meta WHERE key = ?1)", [MIGRATED_FROM], |row| row.get(0))?;
    let mut differences = differences(&old, new);
    differences.retain(|difference| !since || difference.old.is_some());
    Ok(differences)
}

fn differences(old: &Identity, new: &Identity) -> Vec<IdentityDifference> {
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    names
        .into_iter()
        .filter(|&name| old.get(name) != new.get(name))
        .map(|name| IdentityDifference { name: name.clone(), old: old.get(name).cloned(), new: new.get(name).cloned() })
        .collect()
}
