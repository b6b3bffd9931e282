//! Statistics of a simulated run, computed from totals, ledger and step records.

use super::{Actor, Jobs, Pool, Report, Scenario, Stage, Steps};
use crate::engines::costs::{costs, drafter_speeds, target_speeds};
use draftmill_actors::{
    messages::types::{BucketId, JobSpec, Outcome},
    pipeline,
    planner::ledger::MemoryLedger,
    runtime::meter::Totals,
    simulated::CostModel,
    trainer::StepRecord,
};
use std::{collections::BTreeSet, time::Duration};

/// Records of a simulated run.
pub(super) struct SimulatedRun {
    pub report: pipeline::Report<MemoryLedger>,
    pub steps: Vec<StepRecord>,
    /// Duration of the run on the simulated clock.
    pub elapsed: Duration,
    /// Time at which a target got the last job.
    pub last_lease: Duration,
}

impl SimulatedRun {
    /// Computes the report. The caller sets `wall_seconds`.
    pub fn stats(&self, scenario: &Scenario) -> Report {
        let config = &scenario.loaded.config;
        let (target_speeds, drafter_speeds) = (target_speeds(config), drafter_speeds(config));
        let trained = self.trained();
        let bound = Bound::of(&trained, self.steps.len(), &costs(config), &target_speeds, &drafter_speeds);
        let virtual_seconds = self.elapsed.as_secs_f64();
        let tokens_with_ends = ratio(bound.tokens, virtual_seconds);
        let steady = self.steady();
        let (tokens_per_second, steady_seconds) = match steady {
            Some((tokens, seconds)) => (ratio(tokens, seconds), seconds),
            None => (tokens_with_ends, virtual_seconds),
        };
        let actor = |totals: &Totals, speed: f64, units: u64| Actor {
            index: totals.index,
            speed,
            units,
            busy: ratio(totals.busy.as_secs_f64(), virtual_seconds),
            waits: totals.waits.iter().map(|(c, t)| (c.as_str(), ratio(t.as_secs_f64(), virtual_seconds))).collect(),
        };
        let pipeline::Report { targets, drafters, trainer, pool, jobs, .. } = &self.report;
        let (real, padded) = (jobs.real_tokens as f64, jobs.padded_tokens as f64);
        Report {
            efficiency: ratio(tokens_per_second, bound.tokens_per_second()),
            efficiency_with_ends: ratio(tokens_with_ends, bound.tokens_per_second()),
            tokens_per_second,
            tokens_per_second_with_ends: tokens_with_ends,
            bound_tokens_per_second: bound.tokens_per_second(),
            slower_stage: bound.slower(),
            imbalance: bound.imbalance(),
            policy: scenario.policy,
            draw: config.pool.draw_policy,
            targets: targets.iter().zip(&target_speeds).map(|(w, &s)| actor(&w.totals, s, w.jobs)).collect(),
            drafters: drafters
                .iter()
                .zip(&drafter_speeds)
                .map(|(w, &s)| actor(&w.totals, s, w.micro_batches))
                .collect(),
            trainer: actor(&trainer.totals, 1.0, trainer.step),
            pool: Pool {
                peak_bytes: pool.peak_bytes,
                max_bytes: config.pool.max_bytes.0,
                depth_p50: pool.ready_p50 as u64,
                depth_p95: pool.ready_p95 as u64,
            },
            steps: self.step_stats(&trained),
            jobs: Jobs { planned: jobs.planned, trained: jobs.trained, skipped: jobs.skipped },
            padding_share: ratio(padded - real, padded),
            virtual_seconds,
            steady_seconds,
            wall_seconds: 0.0,
        }
    }

    /// Returns the trained jobs with their steps, in plan order.
    fn trained(&self) -> Vec<(u64, &JobSpec)> {
        let Some(ledger) = &self.report.ledger else { return Vec::new() };
        let jobs = ledger.plans.iter().flat_map(|plan| &plan.jobs);
        let step = |job: &JobSpec| match ledger.outcomes.get(&job.id) {
            Some(Outcome::Trained { step }) => Some(*step),
            _ => None,
        };
        jobs.filter_map(|job| Some((step(job)?, job))).collect()
    }

    /// Returns tokens and seconds of the steady run, as [`Report`] defines it.
    fn steady(&self) -> Option<(f64, f64)> {
        let drain = self.last_lease.as_secs_f64();
        let until = self.steps.iter().rposition(|step| step.seconds <= drain)?;
        let first = self.steps.first().filter(|_| until > 0)?;
        let tokens: u64 = self.steps[1..=until].iter().map(|step| step.tokens).sum();
        Some((tokens as f64, self.steps[until].seconds - first.seconds))
    }

    fn step_stats(&self, trained: &[(u64, &JobSpec)]) -> Steps {
        let per_step = self.report.drafters.len() as u64;
        let mut steps: Vec<Mix> = Vec::new();
        steps.resize_with(self.steps.len(), Mix::default);
        for (step, job) in trained {
            if let Some(mix) = steps.get_mut((*step as usize).wrapping_sub(1)) {
                mix.micro_batches += 1;
                mix.samples += job.samples.len() as u64;
                mix.tokens += u64::from(job.tokens);
                mix.buckets.insert(job.bucket);
            }
        }
        let full = steps.iter().map(|mix| mix.micro_batches).max().unwrap_or(per_step);
        let full_steps: Vec<&Mix> = steps.iter().filter(|mix| mix.micro_batches == full).collect();
        let distinct: f64 = full_steps.iter().map(|mix| mix.buckets.len() as f64).sum();
        let lengths: Vec<f64> = full_steps.iter().map(|mix| ratio(mix.tokens as f64, mix.samples as f64)).collect();
        Steps {
            count: self.steps.len() as u64,
            micro_batches_per_step: full,
            buckets: self.report.ledger.iter().flat_map(|l| &l.plans).map(|plan| plan.bounds.len()).max().unwrap_or(0),
            distinct_buckets_mean: ratio(distinct, full_steps.len() as f64),
            length_correlation: lag_1_correlation(&lengths),
            length_deviation: variance(&lengths).sqrt(),
        }
    }
}

/// Content of a step.
#[derive(Debug, Default)]
struct Mix {
    micro_batches: u64,
    samples: u64,
    tokens: u64,
    buckets: BTreeSet<BucketId>,
}

/// Times of both stages without a pause, as [`Report`] defines them.
#[derive(Debug)]
struct Bound {
    tokens: f64,
    target_seconds: f64,
    drafter_seconds: f64,
}

impl Bound {
    fn of(trained: &[(u64, &JobSpec)], steps: usize, costs: &CostModel, targets: &[f64], drafters: &[f64]) -> Bound {
        let sum = |of: &dyn Fn(&JobSpec) -> f64| trained.iter().map(|(_, job)| of(job)).sum::<f64>();
        let extract =
            |job: &JobSpec| costs.extract_seconds(job.padded_tokens(), u64::from(job.width), u64::from(job.tokens));
        let micro_batches = sum(&|job| costs.micro_batch_seconds(u64::from(job.tokens)));
        Bound {
            tokens: sum(&|job| f64::from(job.tokens)),
            target_seconds: ratio(sum(&extract), targets.iter().sum()),
            drafter_seconds: ratio(micro_batches, drafters.iter().sum()) + steps as f64 * costs.step_seconds(),
        }
    }

    fn tokens_per_second(&self) -> f64 {
        ratio(self.tokens, self.target_seconds.max(self.drafter_seconds))
    }

    fn slower(&self) -> Stage {
        if self.target_seconds >= self.drafter_seconds { Stage::Targets } else { Stage::Drafters }
    }

    fn imbalance(&self) -> f64 {
        let (a, b) = (self.target_seconds, self.drafter_seconds);
        ratio(a.max(b), a.min(b)) - 1.0
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

fn mean(values: &[f64]) -> f64 {
    ratio(values.iter().sum(), values.len() as f64)
}

fn variance(values: &[f64]) -> f64 {
    let mean = mean(values);
    ratio(values.iter().map(|x| (x - mean).powi(2)).sum(), values.len() as f64)
}

/// Returns the sample autocorrelation at lag 1; 0 for constant values.
fn lag_1_correlation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let together: f64 = values.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum();
    ratio(together, variance(values) * values.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use draftmill_actors::messages::types::JobId;

    fn job(samples: u32, width: u32, tokens: u32) -> JobSpec {
        JobSpec { id: JobId::default(), bucket: 0, samples: (0..samples).collect(), tokens, width }
    }

    #[test]
    fn the_bound_is_the_slower_stage_without_a_pause() {
        let costs = CostModel {
            seconds_per_token: 0.01,
            seconds_per_token_squared: 0.001,
            bytes_per_second: 1000.0,
            taps: 1,
            hidden_size: 5,
            seconds_per_micro_batch: 2.0,
            seconds_per_context_token: 0.1,
            seconds_per_reduce: 0.25,
            seconds_per_step: 0.5,
            ..CostModel::default()
        };
        let (a, b) = (job(2, 10, 15), job(1, 20, 20));
        let trained = [(1, &a), (1, &b)];
        // 20 slots x (0.01 + 10 x 0.001) + 150 B, and 20 x (0.01 + 20 x 0.001) + 200 B.
        let extraction = (0.4 + 0.15) + (0.6 + 0.2);
        let bound = Bound::of(&trained, 1, &costs, &[1.0, 0.5], &[2.0]);
        assert!((bound.target_seconds - extraction / 1.5).abs() < 1e-12, "{bound:?}");
        assert!((bound.drafter_seconds - ((2.0 + 1.5 + 2.0 + 2.0) / 2.0 + 0.75)).abs() < 1e-12, "{bound:?}");
        assert_eq!((bound.tokens, bound.slower()), (35.0, Stage::Drafters));
        assert!((bound.tokens_per_second() - 35.0 / 4.5).abs() < 1e-12);
        assert!((bound.imbalance() - (4.5 / 0.9 - 1.0)).abs() < 1e-12);
    }

    #[test]
    fn correlation_agrees_with_known_values() {
        assert_eq!(lag_1_correlation(&[5.0; 4]), 0.0);
        // Alternating values: -(n - 1) / n.
        assert!((lag_1_correlation(&[1.0, -1.0, 1.0, -1.0]) + 0.75).abs() < 1e-12);
        assert!(lag_1_correlation(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) > 0.5);
        assert_eq!(lag_1_correlation(&[]), 0.0);
    }

    fn simulated(report: pipeline::Report<MemoryLedger>, steps: usize) -> SimulatedRun {
        let steps = vec![StepRecord::default(); steps];
        SimulatedRun { report, steps, elapsed: Duration::from_secs(100), last_lease: Duration::ZERO }
    }

    #[test]
    fn the_mix_counts_full_steps() {
        let in_bucket = |bucket, tokens| JobSpec { bucket, ..job(2, tokens, 2 * tokens) };
        let (short, long, partial) = (in_bucket(0, 10), in_bucket(1, 30), in_bucket(2, 999));
        // Means of 10, 20, 10 and 20 tokens, and a last step of one micro-batch.
        let trained = [
            (1, &short),
            (1, &short),
            (2, &short),
            (2, &long),
            (3, &short),
            (3, &short),
            (4, &short),
            (4, &long),
            (5, &partial),
        ];
        let steps = simulated(pipeline::Report::default(), 5).step_stats(&trained);
        assert_eq!((steps.count, steps.micro_batches_per_step), (5, 2));
        assert!((steps.distinct_buckets_mean - 1.5).abs() < 1e-12, "{steps:?}");
        assert!((steps.length_correlation + 0.75).abs() < 1e-12, "{steps:?}");
        assert!((steps.length_deviation - 5.0).abs() < 1e-12, "{steps:?}");
    }

    #[test]
    fn the_report_contains_the_pool_stats() {
        let pool = draftmill_actors::pool::Stats { peak_bytes: 11, peak_batches: 5, ready_p50: 3, ready_p95: 4 };
        let loaded = crate::config::load_text("", "x.toml", &[]).unwrap();
        let max_bytes = loaded.config.pool.max_bytes.0;
        let report =
            simulated(pipeline::Report { pool, ..pipeline::Report::default() }, 0).stats(&Scenario::new(loaded));
        assert_eq!(report.pool, Pool { peak_bytes: 11, max_bytes, depth_p50: 3, depth_p95: 4 });
    }
}
