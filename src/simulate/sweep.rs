//! Sweep: simulates one workload once for each split of the workers, or for each queue depth.

use super::{Policy, Report, Scenario, run};
use crate::common::exit::{Exit, Failure};
use serde::Serialize;
use std::{collections::BTreeSet, ops::RangeInclusive, str::FromStr};

/// Setting to vary, with its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Number of targets; the other workers of the node are drafters.
    Targets(Vec<usize>),
    /// Queue depth of round-robin dispatch.
    QueueDepth(Vec<usize>),
}

/// One run of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Split {
    /// True for the run with the most tokens per second.
    pub best: bool,
    #[serde(flatten)]
    pub report: Report,
}

impl Sweep {
    /// Simulates the scenario once for each value and marks the best run.
    ///
    /// # Errors
    /// If a value leaves a stage without workers, or one simulation fails.
    pub fn run(&self, scenario: &Scenario) -> Result<Vec<Split>, Failure> {
        let scenarios = self.scenarios(scenario)?;
        let mut splits = Vec::with_capacity(scenarios.len());
        for scenario in scenarios {
            splits.push(Split { best: false, report: run(&scenario)? });
        }
        let speed = |split: &Split| split.report.tokens_per_second;
        let best = splits.iter_mut().reduce(|best, split| if speed(split) > speed(best) { split } else { best });
        if let Some(best) = best {
            best.best = true;
        }
        Ok(splits)
    }

    fn scenarios(&self, scenario: &Scenario) -> Result<Vec<Scenario>, Failure> {
        let config = &scenario.loaded.config;
        let workers = config.target.devices.len() + config.drafter.devices.len();
        match self {
            Sweep::Targets(counts) => {
                if let Some(count) = counts.iter().find(|&&count| count == 0 || count >= workers) {
                    return Err(Failure::new(
                        Exit::Usage,
                        format!(
                            "--sweep targets={count}: of {workers} workers {} are left as drafters, and each stage needs at \
                             least one; choose values from 1 to {}",
                            workers.saturating_sub(*count),
                            workers.saturating_sub(1)
                        ),
                    ));
                }
                Ok(counts.iter().map(|&count| scenario.clone().targets(count).drafters(workers - count)).collect())
            }
            Sweep::QueueDepth(depths) => {
                let depth = |&queue_depth: &usize| scenario.clone().policy(Policy::RoundRobin { queue_depth });
                Ok(depths.iter().map(depth).collect())
            }
        }
    }
}

/// Maximum runs of a sweep.
const MAX_RUNS: usize = 256;

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORMS: &str = "write targets=1..7, targets=2,4,6 or queue-depth=1,4,20";
        let (name, values) = text.split_once('=').ok_or_else(|| format!("{text:?} has no \"=\"; {FORMS}"))?;
        let values = values_of(values).ok_or_else(|| format!("{values:?} is not a list of numbers; {FORMS}"))?;
        if values.is_empty() || values.len() > MAX_RUNS {
            return Err(format!("a sweep has 1 to {MAX_RUNS} runs, not {}", values.len()));
        }
        if values.contains(&0) {
            return Err(format!("{name} must be at least 1; {FORMS}"));
        }
        match name.trim() {
            "targets" => Ok(Sweep::Targets(values)),
            "queue-depth" => Ok(Sweep::QueueDepth(values)),
            _ => Err(format!("{name:?} cannot be swept; {FORMS}")),
        }
    }
}

/// Parses "1..7" (both ends) and "1,4,20". Returns the values in ascending order without duplicates.
fn values_of(text: &str) -> Option<Vec<usize>> {
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let mut values = BTreeSet::new();
    for part in text.split(',') {
        let range: RangeInclusive<usize> = match part.split_once("..") {
            Some((first, last)) => number(first)?..=number(last.strip_prefix('=').unwrap_or(last))?,
            None => number(part)?..=number(part)?,
        };
        values.extend(range.take(MAX_RUNS + 1));
    }
    Some(values.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_lists_are_parsed() {
        for (text, sweep) in [
            ("targets=1..3", Sweep::Targets(vec![1, 2, 3])),
            ("targets=1..=2", Sweep::Targets(vec![1, 2])),
            ("targets=6, 2,4", Sweep::Targets(vec![2, 4, 6])),
            ("queue-depth=1,4,20", Sweep::QueueDepth(vec![1, 4, 20])),
        ] {
            assert_eq!(text.parse(), Ok(sweep), "{text}");
        }
    }

    #[test]
    fn malformed_sweeps_are_refused_with_examples() {
        for text in ["targets", "targets=", "targets=a..b", "targets=0..3", "drafters=1..3", "queue-depth=0"] {
            let message = text.parse::<Sweep>().unwrap_err();
            assert!(message.contains("write targets=1..7"), "{text}: {message}");
        }
        for text in ["targets=7..1", "targets=1..1000000000000"] {
            let message = text.parse::<Sweep>().unwrap_err();
            assert!(message.contains("a sweep has 1 to 256 runs"), "{text}: {message}");
        }
    }
}
