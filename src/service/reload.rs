//! Whether a changed configuration may take the place of the one in force, as a whole, and what then changes.

use crate::{
    check::{Forecast, Machine, room_problems},
    config::{
        self, Apply, Config, Device, FIELDS, Loaded, Problem, Problems, pool_problem, replay_window, step_problem,
    },
};
use draftmill_actors::{planner::ledger::Change, pool::DrawPolicy};

/// What does not change while a run goes on, and what changes are measured by.
#[derive(Clone, Debug)]
pub struct Ground {
    pub forecast: Forecast,
    pub machine: Machine,
}

/// What becomes of a changed configuration.
#[derive(Debug)]
pub enum Verdict {
    Unchanged,
    /// Nothing of it is taken; one problem for each field.
    Refused(Problems),
    Applied(Vec<Change>),
}

impl Ground {
    /// Judges `new` beside what is in force.
    pub fn judge(&self, old: &Loaded, new: &Loaded) -> Verdict {
        let changes = config::changes(&old.written.wire, &new.written.wire);
        if changes.is_empty() {
            return Verdict::Unchanged;
        }
        let mut problems: Vec<Problem> = changes.iter().filter_map(|change| fixed(change, new)).collect();
        if problems.is_empty() {
            problems = order_problems(old, new, &changes, &self.forecast);
        }
        if problems.is_empty() {
            // What is wrong already is not the change's fault.
            let before = self.broken_rules(old, old);
            let after = self.broken_rules(old, new).into_iter();
            problems = after.filter(|new| !before.iter().any(|old| old.key == new.key)).collect();
        }
        match problems.is_empty() {
            true => Verdict::Applied(changes),
            false => Verdict::Refused(Problems(problems)),
        }
    }

    /// The rules that need to know the plan or the machine.
    fn broken_rules(&self, old: &Loaded, new: &Loaded) -> Vec<Problem> {
        let Loaded { config, written } = new;
        let mut broken: Vec<Problem> = [
            pool_problem(config, written, self.forecast.largest_job_bytes),
            step_problem(config, written, self.forecast.jobs_per_epoch),
        ]
        .into_iter()
        .flatten()
        .collect();
        let cpu = Device::Cpu.to_string();
        let host = self.forecast.devices.iter().find(|memory| memory.device == cpu).map_or(0, |memory| memory.total);
        let others = host.saturating_sub(self.forecast.pool.max_bytes);
        let raised = config.pool.max_bytes > old.config.pool.max_bytes;
        // The disk holds checkpoints by now; one that does not fit costs that one alone.
        let machine = Machine { free_disk: None, ..self.machine.clone() };
        let needed = if raised { others.saturating_add(config.pool.max_bytes.0) } else { 0 };
        broken.extend(room_problems(config, written, &machine, 0, needed));
        broken
    }

    /// Steps that the whole run will have taken, `step` of which, with `micro_batches`, are done.
    pub fn planned_steps(&self, config: &Config, step: u64, micro_batches: u64) -> u64 {
        let jobs = self.forecast.jobs_per_epoch as u64 * u64::from(config.run.epochs);
        let left = jobs.saturating_sub(micro_batches).div_ceil(config.micro_batches_per_step());
        config.run.max_steps.map_or(step + left, |most| most.min(step + left))
    }
}

/// A field that a running service cannot change.
fn fixed(change: &Change, new: &Loaded) -> Option<Problem> {
    let field = FIELDS.iter().find(|field| change.key == format!("{}.{}", field.section, field.key))?;
    (field.apply == Apply::Restart).then(|| {
        new.written.problem(
            &change.key,
            format!("it is {} in the running service and needs a restart to change", change.old),
            "put it back, or stop the service and start it again: it goes on from its last checkpoint",
        )
    })
}

/// What draw `replay` promises: that plan and seed fix which job is part of which step.
fn order_problems(old: &Loaded, new: &Loaded, changes: &[Change], forecast: &Forecast) -> Vec<Problem> {
    let (was, is) = (old.config.pool.draw_policy == DrawPolicy::Replay, new.config.pool.draw_policy == DrawPolicy::Replay);
    let changed = |key: &str| changes.iter().find(|change| change.key == key);
    let problem = |change: &Change, why: String, remedy: &str| {
        new.written.problem(&change.key, format!("it is {} in the running service, and {why}", change.old), remedy)
    };
    let restart = "put it back, or stop the service and start it again: it goes on from its last checkpoint";
    if was != is {
        let why = "an order of draws is fixed from the start or not at all".to_owned();
        return changed("pool.draw_policy").map(|change| problem(change, why, restart)).into_iter().collect();
    }
    if !was {
        return Vec::new();
    }
    let mut problems: Vec<Problem> = ["optimizer.accumulation", "drafter.paused"]
        .iter()
        .filter_map(|key| changed(key))
        .map(|change| {
            let why = "draw \"replay\" promises that timing does not decide which job is part of which step";
            problem(change, why.into(), restart)
        })
        .collect();
    let window = forecast.pool.replay_window;
    if window.is_some_and(|window| window != replay_window(&new.config.pool, forecast.largest_job_bytes)) {
        let window = window.unwrap_or_default();
        let limits = ["pool.max_bytes", "pool.max_batches"].into_iter().filter_map(changed);
        problems.extend(limits.map(|change| {
            let why = format!("the order of draw \"replay\" follows from the {window} jobs that the pool surely holds");
            problem(change, why, "put it back, or begin a new run with pool.replay_window written out")
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

    fn judge(old: &str, new: &str) -> Verdict {
        let (old, new) = (loaded(old), loaded(new));
        let lengths: Vec<u32> = (0..300).map(|i| 40 + i).collect();
        let machine = Machine { memory: Some(64 << 30), ..Machine::detect(&old.config) };
        Ground { forecast: forecast(&old.config, &lengths, None).unwrap(), machine }.judge(&old, &new)
    }

    /// `key: old -> new` of what was applied, or the sentences of what was refused.
    fn told(old: &str, new: &str) -> Result<Vec<String>, String> {
        match judge(old, new) {
            Verdict::Unchanged => Ok(Vec::new()),
            Verdict::Applied(changes) => {
                Ok(changes.iter().map(|c| format!("{}: {} -> {}", c.key, c.old, c.new)).collect())
            }
            Verdict::Refused(problems) => Err(problems.to_string()),
        }
    }

    #[test]
    fn live_fields_are_applied_together_and_nothing_changed_is_nothing() {
        let new = "[pool]\nmin_ready = 2\n[optimizer]\naccumulation = 3\n[target]\npaused = []";
        assert_eq!(told("", new).unwrap(), ["pool.min_ready: 4 -> 2", "optimizer.accumulation: 1 -> 3"]);
        assert!(told("", "# only a comment").unwrap().is_empty());
    }

    #[test]
    fn a_field_that_needs_a_restart_refuses_the_others_with_it() {
        let refused = told("", "[optimizer]\nbeta1 = 0.8\nlearning_rate = 1e-4").unwrap_err();
        assert_eq!(
            refused,
            "x.toml:13: optimizer.beta1 = 0.8: it is 0.9 in the running service and needs a restart to change; put it \
             back, or stop the service and start it again: it goes on from its last checkpoint"
        );
    }

    #[test]
    fn settings_that_could_wait_for_ever_are_refused() {
        let refused = told("", "[pool]\nmax_bytes = \"3 MiB\"").unwrap_err();
        assert!(refused.contains("the run could stop for good") && refused.contains("pool.min_ready = 4"), "{refused}");
        assert!(told("", "[pool]\nmax_bytes = \"3 MiB\"\nmin_ready = 3").is_ok());
        let refused = told("", "[optimizer]\naccumulation = 1000").unwrap_err();
        assert!(refused.contains("no step could ever fill"), "{refused}");
        let refused = told("", "[pool]\nmax_bytes = \"100 GiB\"").unwrap_err();
        assert!(refused.contains("has 64.0 GiB of memory"), "{refused}");
    }

    #[test]
    fn a_drafter_that_is_paused_makes_steps_smaller() {
        let paused = loaded("paused = [1]");
        assert_eq!((loaded("").config.micro_batches_per_step(), paused.config.micro_batches_per_step()), (2, 1));
        assert_eq!(told("", "paused = [1]").unwrap(), ["drafter.paused: [] -> [1]"]);
    }

    #[test]
    fn a_fixed_order_of_draws_refuses_what_would_change_it() {
        let replay = "[pool]\ndraw_policy = \"replay\"\nmax_bytes = \"8 MiB\"\nmin_ready = 4\n";
        for (new, key) in [
            ("[pool]\nmin_ready = 4", "pool.draw_policy"),
            (&format!("{replay}[optimizer]\naccumulation = 2"), "optimizer.accumulation"),
            (&replay.replace("8 MiB", "7 MiB"), "pool.max_bytes"),
        ] {
            let refused = told(replay, new).unwrap_err();
            assert!(refused.contains(key), "{key}: {refused}");
        }
        assert!(told("", replay).unwrap_err().contains("fixed from the start or not at all"));
        // The window is given, and what is asked for still holds it.
        let given = format!("{replay}replay_window = 4\n");
        assert!(told(&given, &given.replace("8 MiB", "7 MiB")).is_ok());
        assert!(told(&given, &given.replace("8 MiB", "3 MiB")).unwrap_err().contains("could stop for good"));
        assert!(told(replay, &replay.replace("min_ready = 4", "min_ready = 1")).is_ok(), "it has no part in it");
    }

    #[test]
    fn planned_steps_follow_accumulation_from_where_the_run_stands() {
        let lengths: Vec<u32> = (0..300).map(|i| 40 + i).collect();
        let old = loaded("");
        let forecast = forecast(&old.config, &lengths, None).unwrap();
        let (jobs, steps) = (forecast.jobs_per_epoch as u64 * 2, forecast.steps);
        let ground = Ground { forecast, machine: Machine::detect(&old.config) };
        for step in [0, 1, 7] {
            assert_eq!(ground.planned_steps(&old.config, step, 2 * step), steps);
        }
        let twice = loaded("[optimizer]\naccumulation = 2");
        assert_eq!(ground.planned_steps(&twice.config, 10, 20), 10 + (jobs - 20).div_ceil(4));
    }
}
