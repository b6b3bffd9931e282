//! Configuration: reads TOML and `--set`, reports all mistakes at once, and resolves every "auto".
//!
//! ```text
//! file, --set ──load──▶ Written (wire types + lines) ──rules, resolve──▶ Config ──shape──▶ hf::DraftConfig
//! ```
//! [`wire`] declares the keys. [`shape`] resolves the values that depend on the target's config.json.

mod example;
mod init;
mod load;
pub mod log_filter;
mod loss;
pub mod mask;
mod problem;
mod resolve;
mod retention;
mod rules;
pub mod shape;
pub mod values;
pub mod wire;

pub use self::{
    example::{annotated, changes, differences, example},
    init::start_from,
    load::{Written, read_text},
    loss::{LK_ETA, LossTerms},
    problem::{Problem, Problems},
    resolve::{Config, Data, Drafter, Eval, Plan, Run, Target, resolve},
    retention::RetentionPolicy,
    shape::{
        ROW_BYTES, draft_config, feature_bytes_per_token, pool_problem, pool_settings, replay_window, step_problem,
    },
    values::*,
    wire::{Admin, Apply, Checkpoint, Dispatch, FIELDS, Field, Log, Optimizer, Pool, Reload, Shutdown, Simulate, Wire},
};
pub use crate::common::device::Device;

use std::path::{Path, PathBuf};

/// Valid configuration.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    /// Wire values with their lines. [`Written::problem`] reports a value that a later check refuses.
    pub written: Written,
}

/// Reads the file, applies the overrides (`section.key=value`), and resolves. `None` as file gives the defaults.
///
/// # Errors
/// All problems of file and overrides: syntax, unknown keys, wrong types, broken rules.
pub fn load(file: Option<&Path>, sets: &[String]) -> Result<Loaded, Problems> {
    finish(load::read_file(file, sets))
}

/// Reads as much as possible: returns the configuration with defaults for bad values, and all problems.
///
/// Returns `None` if the defaults do not lead to a valid configuration.
pub fn load_leniently(file: Option<&Path>, sets: &[String]) -> (Option<Loaded>, Problems) {
    let (mut written, mut problems) = load::read_file(file, sets);
    // A rule may blame a key that depends on another bad key, so one round may not suffice.
    for _ in 0..FIELDS.len() {
        match resolve(&written) {
            Ok(config) => return (Some(Loaded { config, written }), problems),
            Err(more) => {
                let before = problems.0.len();
                let new = more.0.into_iter().filter(|new| !problems.0.iter().any(|old| old.key == new.key));
                let new: Vec<_> = new.collect();
                problems.0.extend(new);
                if problems.0.len() == before {
                    break;
                }
                written.reset(problems.0[before..].iter().map(|problem| problem.key.as_str()));
            }
        }
    }
    (None, problems)
}

/// File and overrides of a configuration, for a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    pub file: Option<PathBuf>,
    pub sets: Vec<String>,
}

/// Reads a configuration from text. Messages use `name` as the file name.
///
/// # Errors
/// As [`load`].
pub fn load_text(text: &str, name: &str, sets: &[String]) -> Result<Loaded, Problems> {
    finish(load::read(text, name, sets))
}

fn finish((written, mut problems): (Written, Problems)) -> Result<Loaded, Problems> {
    match resolve(&written) {
        Ok(config) if problems.0.is_empty() => Ok(Loaded { config, written }),
        Ok(_) => Err(problems),
        Err(more) => {
            // An unreadable key has its default here, so a rule that blames it reports nothing new.
            let more = more.0.into_iter().filter(|new| !problems.0.iter().any(|old| old.key == new.key));
            let more: Vec<_> = more.collect();
            problems.0.extend(more);
            Err(problems)
        }
    }
}
