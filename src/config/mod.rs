//! The configuration: TOML and `--set` in, settings with nothing left open out, every mistake told at once.
//!
//! ```text
//! file, --set ──load──▶ Written (wire types + places) ──rules, resolve──▶ Config ──shape──▶ hf::DraftConfig
//! ```
//! The wire types are declared in [`wire`], once; what depends on the target's own config.json waits for [`shape`].

mod example;
mod init;
mod keep;
mod load;
pub mod mask;
mod problem;
mod resolve;
mod rules;
pub mod shape;
pub mod values;
pub mod wire;

pub use self::{
    example::{annotated, changes, differences, example},
    init::start_from,
    keep::Keep,
    load::{Written, read_text},
    problem::{Problem, Problems},
    resolve::{Config, Data, Drafter, Eval, Plan, Run, Target, resolve},
    shape::{
        ROW_BYTES, draft_config, feature_bytes_per_token, pool_problem, pool_settings, replay_window, step_problem,
    },
    values::*,
    wire::{Admin, Apply, Checkpoint, Dispatch, FIELDS, Field, Log, Optimizer, Pool, Reload, Shutdown, Simulate, Wire},
};
pub use crate::common::device::Device;

use std::path::{Path, PathBuf};

/// A configuration that can be worked with.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    /// What was written and where, to point at it: a value that turns out wrong later gives [`Written::problem`].
    pub written: Written,
}

/// Reads the file (none: all defaults), puts the overrides (`section.key=value`) over it, and resolves.
pub fn load(file: Option<&Path>, sets: &[String]) -> Result<Loaded, Problems> {
    finish(load::read_file(file, sets))
}

/// For those who look for every mistake: what could be read, with defaults in the place of bad values, and the problems.
/// `None` where even that gives nothing to go on with.
pub fn load_leniently(file: Option<&Path>, sets: &[String]) -> (Option<Loaded>, Problems) {
    let (mut written, mut problems) = load::read_file(file, sets);
    // A rule may blame a key that depends on another one, so one round may not be enough.
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

/// Where a configuration comes from, to read it again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    pub file: Option<PathBuf>,
    pub sets: Vec<String>,
}

/// The same from text; `name` stands for the file in messages.
pub fn load_text(text: &str, name: &str, sets: &[String]) -> Result<Loaded, Problems> {
    finish(load::read(text, name, sets))
}

fn finish((written, mut problems): (Written, Problems)) -> Result<Loaded, Problems> {
    match resolve(&written) {
        Ok(config) if problems.0.is_empty() => Ok(Loaded { config, written }),
        Ok(_) => Err(problems),
        Err(more) => {
            // A key that could not be read stands at its default here: what follows from that is no finding.
            let more = more.0.into_iter().filter(|new| !problems.0.iter().any(|old| old.key == new.key));
            let more: Vec<_> = more.collect();
            problems.0.extend(more);
            Err(problems)
        }
    }
}
