//! Names of the files and folders of a run, in one list.
//!
//! `--fresh --force` deletes exactly [`FILES`] and [`DIRS`]. The file `lock` stays, since the process holds it, and so does a
//! prepared store or any other file in the folder.

/// SQLite database: plans, outcomes, checkpoints, events and identity.
pub const STATE_DB: &str = "state.db";
/// Resolved configuration in force.
pub const CONFIG: &str = "run.toml";
/// One line per optimizer step.
pub const STEPS: &str = "steps.jsonl";
/// One line per evaluation.
pub const EVALS: &str = "evals.jsonl";
/// Statistics of the last start.
pub const SUMMARY: &str = "summary.json";
/// Folder of the checkpoints, `step-N` each.
pub const CHECKPOINTS: &str = "checkpoints";
/// Folder of the exported drafter.
pub const EXPORT: &str = "export";

/// All files of a run, including the temporary files of SQLite.
pub const FILES: [&str; 8] =
    [STATE_DB, "state.db-wal", "state.db-shm", "state.db-journal", CONFIG, STEPS, EVALS, SUMMARY];
/// All folders of a run.
pub const DIRS: [&str; 2] = [CHECKPOINTS, EXPORT];
