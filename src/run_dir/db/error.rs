//! Errors of a run folder's state. Each text names the file and the remedy.

use super::{IdentityDifference, SCHEMA_VERSION};
use crate::common::fs::read_remedy;
use draftmill_actors::messages::types::{JobId, Outcome};
use rusqlite::ErrorCode;
use std::{io, path::PathBuf};
use thiserror::Error;

/// A failed operation on a run folder's state.
#[derive(Debug, Error)]
#[error("cannot {action} {}: {problem}", path.display())]
pub struct StateError {
    /// Failed action, as a verb phrase that the path completes.
    pub action: &'static str,
    pub path: PathBuf,
    pub problem: Problem,
}

/// Cause of a [`StateError`].
#[derive(Debug, Error)]
pub enum Problem {
    #[error("{0}; {remedy}", remedy = read_remedy(.0))]
    Io(io::Error),
    #[error(
        "another draftmill process{holder} uses this run folder; wait until it ends, or give this run another folder",
        holder = holder.as_ref().map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    InUse { holder: Option<String> },
    #[error("this is not an SQLite database; restore the file from a copy, or start a new run folder")]
    NotADatabase,
    #[error("the file is damaged ({0}); restore it from a copy, or start a new run folder")]
    Damaged(String),
    #[error("this is an SQLite database, but not Draftmill's; give the run another folder")]
    Foreign,
    #[error(
        "the file has schema version {found}, and this draftmill reads versions up to {SCHEMA_VERSION}; use the newer \
         draftmill that wrote it"
    )]
    Newer { found: u32 },
    #[error(
        "the file has schema version {found}, of an older draftmill; run `draftmill train` in this folder once to migrate it \
         to version {SCHEMA_VERSION}, or read it with the draftmill that wrote it"
    )]
    Older { found: u32 },
    #[error(
        "it was moved or deleted during the run, so further writes would be lost; move it back, or start over with \
         --fresh --force"
    )]
    Vanished,
    #[error(
        "another file has taken its place during the run, so further writes would be lost; move the run's own file back, or \
         resume with the same command from the checkpoints that the new file lists"
    )]
    Replaced,
    #[error("this folder has no run; give the run.dir of a run")]
    NoRun,
    #[error("it has no recorded start of a run; this is a defect of draftmill")]
    NotBegun,
    #[error("the disk is full; free disk space and resume the run; this write was rolled back")]
    Full,
    #[error("the file or its folder is read-only; make both writable for this user")]
    ReadOnly,
    #[error(
        "the file cannot be opened or created; check that the folder exists and is writable for this user, and the \
         limit of open files (ulimit -n)"
    )]
    CannotOpen,
    #[error("another program holds the database locked; close it (perhaps an sqlite3 shell) and try again")]
    Busy,
    #[error("the file system does not support SQLite's write-ahead log; put the run folder on a local disk")]
    NoWal,
    #[error(
        "{0}; check the disk, its quota, and the limits of file sizes (ulimit -f) and open files (ulimit -n), and run the \
         command again"
    )]
    Sqlite(rusqlite::Error),
    #[error("job {job} is at index {index} of the plan of epoch {epoch}; this is a defect of the planner")]
    Misplaced { job: JobId, index: usize, epoch: u32 },
    #[error(
        "epoch {epoch} has another plan: {difference}; resume with the data, seed and settings of the run's \
         first start, or start a new run folder"
    )]
    PlanDiffers { epoch: u32, difference: String },
    #[error(
        "job {job} already ended as {old:?} and cannot end again as {new:?}; this is a defect of the pipeline (invariant D1)"
    )]
    EndedTwice { job: JobId, old: Outcome, new: Outcome },
    #[error("job {job} is in no plan of this run; this is a defect of the pipeline")]
    Unplanned { job: JobId },
    #[error(
        "job {job} is reported trained at step {step}, but only steps after the newest checkpoint (step {newest}) can \
         be recorded; this is a defect of the pipeline (invariant R1)"
    )]
    TooLate { job: JobId, step: u64, newest: u64 },
    #[error(
        "step {step} is before the newest checkpoint, of step {newest}; resume from that one, or reopen the jobs after \
         the step of the weights"
    )]
    OlderCheckpoint { step: u64, newest: u64 },
    #[error("there is no checkpoint of step {step}; resume from an existing one, or from 0")]
    NoCheckpoint { step: u64 },
    #[error(
        "this run has another identity: {}; resume with the identity of its first start, or start a new run folder",
        differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    IdentityDiffers { differences: Vec<IdentityDifference> },
}

impl From<io::Error> for Problem {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull => Problem::Full,
            io::ErrorKind::ReadOnlyFilesystem => Problem::ReadOnly,
            _ => Problem::Io(error),
        }
    }
}

impl From<rusqlite::Error> for Problem {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => Problem::NotADatabase,
            Some(ErrorCode::DatabaseCorrupt) => Problem::Damaged(error.to_string()),
            Some(ErrorCode::DiskFull) => Problem::Full,
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => Problem::ReadOnly,
            Some(ErrorCode::CannotOpen) => Problem::CannotOpen,
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Problem::Busy,
            _ => Problem::Sqlite(error),
        }
    }
}
