//! Reload policy: decides if a changed configuration may replace the one in force, and lists the changes.

use crate::{
    check::{Forecast, Machine, capacity_problems},
    config::{self, Apply, Config, FIELDS, Loaded, Problem, Problems, pool_problem, replay_window, step_problem},
};
use draftmill_actors::{planner::ledger::Change, pool::DrawPolicy};

const RESTART: &str = "restore it, or restart the service: it resumes from its last checkpoint";

/// Reload policy with the fixed facts of the run: its forecast and its machine.
#[derive(Clone, Debug)]
pub struct ReloadPolicy {
    pub forecast: Forecast,
    pub machine: Machine,
}

/// Decision about a changed configuration.
#[derive(Debug)]
pub enum ReloadDecision {
    Unchanged,
    /// Nothing is applied; one problem for each field.
    Refused(Problems),
    Applied(Vec<Change>),
}

impl ReloadPolicy {
    /// Decides about `new`, compared with the configuration in force.
    pub fn decide(&self, old: &Loaded, new: &Loaded) -> ReloadDecision {
        let changes = config::changes(&old.written.wire, &new.written.wire);
        if changes.is_empty() {
            return ReloadDecision::Unchanged;
        }
        let mut problems: Vec<Problem> = changes.iter().filter_map(|change| fixed(change, new)).collect();
        if problems.is_empty() {
            problems = replay_problems(old, new, &changes, &self.forecast);
        }
        if problems.is_empty() {
            // Ignores problems that the configuration in force has too.
            let before = self.broken_rules(old, old);
            let after = self.broken_rules(old, new).into_iter();
            problems = after.filter(|new| !before.iter().any(|old| old.key == new.key)).collect();
        }
        match problems.is_empty() {
            true => ReloadDecision::Applied(changes),
            false => ReloadDecision::Refused(Problems(problems)),
        }
    }

    /// Problems that depend on the plan or the machine.
    fn broken_rules(&self, old: &Loaded, new: &Loaded) -> Vec<Problem> {
        let Loaded { config, written } = new;
        let mut broken: Vec<Problem> = [
            pool_problem(config, written, self.forecast.largest_job_bytes),
            step_problem(config, written, self.forecast.jobs_per_epoch),
        ]
        .into_iter()
        .flatten()
        .collect();
        // The disk stores checkpoints by now; one that does not fit fails alone.
        let machine = Machine { free_disk: None, ..self.machine.clone() };
        if config.pool.max_bytes > old.config.pool.max_bytes {
            let mut host = self.forecast.host();
            host.total = host.total.saturating_sub(host.pool).saturating_add(config.pool.max_bytes.0);
            broken.extend(capacity_problems(config, written, &machine, 0, &host));
        }
        broken
    }

    /// Planned steps of the whole run, of which `step` steps with `micro_batches` are done.
    pub fn planned_steps(&self, config: &Config, step: u64, micro_batches: u64) -> u64 {
        let jobs = self.forecast.jobs_per_epoch as u64 * u64::from(config.run.epochs);
        let left = jobs.saturating_sub(micro_batches).div_ceil(config.micro_batches_per_step());
        config.run.max_steps.map_or(step + left, |limit| limit.min(step + left))
    }
}

/// Problem of a field that requires a restart.
fn fixed(change: &Change, new: &Loaded) -> Option<Problem> {
    let field = FIELDS.iter().find(|field| change.key == format!("{}.{}", field.section, field.key))?;
    (field.apply == Apply::Restart).then(|| {
        new.written.problem(
            &change.key,
            format!("it is {} in the running service and needs a restart to change", change.old),
            RESTART,
        )
    })
}

/// Problems with draw policy `replay`, for which plan and seed determine the jobs of each step.
fn replay_problems(old: &Loaded, new: &Loaded, changes: &[Change], forecast: &Forecast) -> Vec<Problem> {
    let (was, is) =
        (old.config.pool.draw_policy == DrawPolicy::Replay, new.config.pool.draw_policy == DrawPolicy::Replay);
    let changed = |key: &str| changes.iter().find(|change| change.key == key);
    let problem = |change: &Change, why: String, remedy: &str| {
        new.written.problem(&change.key, format!("it is {} in the running service, and {why}", change.old), remedy)
    };
    if was != is {
        let why = "\"replay\" can only be chosen at the start of a run".to_owned();
        return changed("pool.draw_policy").map(|change| problem(change, why, RESTART)).into_iter().collect();
    }
    if !was {
        return Vec::new();
    }
    let mut problems: Vec<Problem> = ["optimizer.accumulation", "drafter.paused"]
        .iter()
        .filter_map(|key| changed(key))
        .map(|change| {
            let why = "with draw policy \"replay\" plan and seed determine the jobs of each step";
            problem(change, why.into(), RESTART)
        })
        .collect();
    let window = forecast.pool.replay_window;
    if window.is_some_and(|window| window != replay_window(&new.config.pool, forecast.largest_job_bytes)) {
        let window = window.unwrap_or_default();
        let limits = ["pool.max_bytes", "pool.max_batches"].into_iter().filter_map(changed);
        problems.extend(limits.map(|change| {
            let why = format!("draw policy \"replay\" depends on the {window} jobs that the pool can always hold");
            problem(change, why, "restore it, or start a new run with an explicit pool.replay_window")
        }));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check::forecast, config::load_text};

    const BASE: &str = "[run]\nengine = \"simulated\"\nepochs = 2\n[simulate]\nfeature_bytes_per_token = \"1 KiB\"\n\
                        [data]\nmax_length = 512\n[plan]\njob_tokens = 1024\n[drafter]\ndevices = [\"cpu\", \"cpu\"]\n";

    fn loaded(text: &str) -> Loaded {
        load_text(&format!("{BASE}{text}"), "x.toml", &[]).unwrap()
    }

    fn decide(old: &str, new: &str) -> ReloadDecision {
        let (old, new) = (loaded(old), loaded(new));
        let lengths: Vec<u32> = (0..300).map(|i| 40 + i).collect();
        let machine = Machine { memory: Some(64 << 30), ..Machine::detect(&old.config) };
        ReloadPolicy { forecast: forecast(&old.config, &lengths, None).unwrap(), machine }.decide(&old, &new)
    }

    /// Applied changes as `key: old -> new`, or the text of the problems.
    fn reload(old: &str, new: &str) -> Result<Vec<String>, String> {
        match decide(old, new) {
            ReloadDecision::Unchanged => Ok(Vec::new()),
            ReloadDecision::Applied(changes) => {
                Ok(changes.iter().map(|c| format!("{}: {} -> {}", c.key, c.old, c.new)).collect())
            }
            ReloadDecision::Refused(problems) => Err(problems.to_string()),
        }
    }

    #[test]
    fn live_fields_are_applied_together() {
        let new = "[pool]\nmin_ready = 2\n[optimizer]\naccumulation = 3\n[target]\npaused = []";
        assert_eq!(reload("", new).unwrap(), ["pool.min_ready: 4 -> 2", "optimizer.accumulation: 1 -> 3"]);
        assert!(reload("", "# only a comment").unwrap().is_empty());
    }

    #[test]
    fn a_field_that_needs_a_restart_refuses_all_changes() {
        let refused = reload("", "[optimizer]\nbeta1 = 0.8\nlearning_rate = 1e-4").unwrap_err();
        assert_eq!(
            refused,
            "x.toml:13: optimizer.beta1 = 0.8: it is 0.9 in the running service and needs a restart to change; \
             restore it, or restart the service: it resumes from its last checkpoint"
        );
    }

    #[test]
    fn settings_that_can_deadlock_are_refused() {
        let refused = reload("", "[pool]\nmax_bytes = \"3 MiB\"").unwrap_err();
        assert!(
            refused.contains("the run could stop permanently") && refused.contains("pool.min_ready = 4"),
            "{refused}"
        );
        assert!(reload("", "[pool]\nmax_bytes = \"3 MiB\"\nmin_ready = 3").is_ok());
        let refused = reload("", "[optimizer]\naccumulation = 1000").unwrap_err();
        assert!(refused.contains("no step would ever be complete"), "{refused}");
        let refused = reload("", "[pool]\nmax_bytes = \"100 GiB\"").unwrap_err();
        assert!(refused.contains("has 64.0 GiB of memory"), "{refused}");
    }

    #[test]
    fn a_paused_drafter_makes_steps_smaller() {
        let paused = loaded("paused = [1]");
        assert_eq!((loaded("").config.micro_batches_per_step(), paused.config.micro_batches_per_step()), (2, 1));
        assert_eq!(reload("", "paused = [1]").unwrap(), ["drafter.paused: [] -> [1]"]);
    }

    #[test]
    fn replay_refuses_changes_of_the_draw_order() {
        let replay = "[pool]\ndraw_policy = \"replay\"\nmax_bytes = \"8 MiB\"\nmin_ready = 4\n";
        for (new, key) in [
            ("[pool]\nmin_ready = 4", "pool.draw_policy"),
            (&format!("{replay}[optimizer]\naccumulation = 2"), "optimizer.accumulation"),
            (&replay.replace("8 MiB", "7 MiB"), "pool.max_bytes"),
        ] {
            let refused = reload(replay, new).unwrap_err();
            assert!(refused.contains(key), "{key}: {refused}");
        }
        assert!(reload("", replay).unwrap_err().contains("can only be chosen at the start of a run"));
        // An explicit window that the smaller pool still holds.
        let explicit = format!("{replay}replay_window = 4\n");
        assert!(reload(&explicit, &explicit.replace("8 MiB", "7 MiB")).is_ok());
        assert!(reload(&explicit, &explicit.replace("8 MiB", "3 MiB")).unwrap_err().contains("could stop permanently"));
        assert!(
            reload(replay, &replay.replace("min_ready = 4", "min_ready = 1")).is_ok(),
            "min_ready does not affect the draw order"
        );
    }

    #[test]
    fn planned_steps_follow_accumulation_from_the_current_step() {
        let lengths: Vec<u32> = (0..300).map(|i| 40 + i).collect();
        let old = loaded("");
        let forecast = forecast(&old.config, &lengths, None).unwrap();
        let (jobs, steps) = (forecast.jobs_per_epoch as u64 * 2, forecast.steps);
        let policy = ReloadPolicy { forecast, machine: Machine::detect(&old.config) };
        for step in [0, 1, 7] {
            assert_eq!(policy.planned_steps(&old.config, step, 2 * step), steps);
        }
        let twice = loaded("[optimizer]\naccumulation = 2");
        assert_eq!(policy.planned_steps(&twice.config, 10, 20), 10 + (jobs - 20).div_ceil(4));
    }
}
