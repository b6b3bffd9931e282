//! Learning rate schedule: linear warm-up, then a cosine down to a floor or a constant.

use crate::config;

/// Schedule over a known number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    pub peak: f64,
    pub floor: f64,
    pub warmup_steps: u64,
    pub total_steps: u64,
    pub cosine: bool,
}

impl Schedule {
    /// Returns the schedule of a run of `total_steps`.
    pub fn new(settings: &config::Optimizer, total_steps: u64) -> Schedule {
        Schedule {
            peak: settings.learning_rate,
            floor: settings.min_learning_rate,
            warmup_steps: (settings.warmup_fraction * total_steps as f64) as u64,
            total_steps,
            cosine: settings.schedule == config::Schedule::Cosine,
        }
    }

    /// Returns the learning rate of a step, counted from 1. A fraction is possible after a change of the step size.
    ///
    /// Warm-up as in SpecForge: step `s` of `w` has `peak s/w`. Then the cosine of transformers: the first step after the
    /// warm-up has the peak, and the step after the last one would have the floor. SpecForge's cosine is this curve times
    /// `2/(1+cos(pi/T))`, an overshoot of its recursive form.
    pub fn at(&self, step: f64) -> f64 {
        if step <= self.warmup_steps as f64 {
            return self.peak * step / self.warmup_steps as f64;
        }
        if !self.cosine {
            return self.peak;
        }
        let after = (step - 1.0 - self.warmup_steps as f64).max(0.0);
        let length = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let share = (after / length).min(1.0);
        self.floor + (self.peak - self.floor) * (1.0 + (std::f64::consts::PI * share).cos()) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(name: &str) -> Vec<f64> {
        let dir = std::env::var("DRAFTMILL_GOLDEN")
            .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden").into());
        let text = std::fs::read_to_string(format!("{dir}/specforge_case.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let lists = json["lr_schedules_used_at_step_1_to_40"].as_object().unwrap();
        let (_, list) = lists.iter().find(|(key, _)| key.starts_with(name)).unwrap();
        list.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
    }

    fn assert_follows(schedule: Schedule, golden: &[f64], steps: impl Iterator<Item = u64>) {
        for step in steps {
            let (ours, theirs) = (schedule.at(step as f64), golden[step as usize - 1]);
            assert!((ours - theirs).abs() <= 1e-12, "step {step}: {ours} against {theirs}");
        }
    }

    #[test]
    fn warm_up_is_specforges_and_cosine_is_transformers() {
        let (specforge, transformers) = (golden("specforge_cosine"), golden("speculators_cosine"));
        let total = specforge.len() as u64;
        // The constant schedule ends at the peak; the warm-up ends at its first step with the peak.
        let constant = golden("specforge_constant");
        let peak = *constant.last().unwrap();
        let warmup = constant.iter().position(|&lr| lr == peak).unwrap() as u64 + 1;
        let schedule = Schedule { peak, floor: 0.0, warmup_steps: warmup, total_steps: total, cosine: true };
        assert_follows(schedule, &specforge, 1..=warmup);
        assert_follows(schedule, &transformers, warmup + 1..=total);
        assert_follows(Schedule { cosine: false, ..schedule }, &constant, 1..=total);
        let overshoot = 2.0 / (1.0 + (std::f64::consts::PI / (total - warmup) as f64).cos());
        for step in warmup + 1..=total {
            assert!(
                (schedule.at(step as f64) * overshoot - specforge[step as usize - 1]).abs() <= 1e-12,
                "step {step}"
            );
        }
    }

    #[test]
    fn a_schedule_never_leaves_its_range() {
        for (warmup_steps, total_steps) in [(0, 1), (0, 0), (1, 1), (5, 3), (3, 100)] {
            let schedule = Schedule { peak: 1e-3, floor: 1e-5, warmup_steps, total_steps, cosine: true };
            for step in 1..200 {
                assert!((0.0..=1e-3).contains(&schedule.at(f64::from(step))), "step {step}");
            }
            assert!((schedule.at(200.0) - 1e-5).abs() < 1e-12);
        }
    }
}
