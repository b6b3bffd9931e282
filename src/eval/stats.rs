//! Statistics of an evaluation from the records of its responses: pure arithmetic.

use super::confidence::Confidence;
use super::ratio;
use super::record::{Record, Step};
use serde::Serialize;
use std::collections::BTreeMap;

/// Statistics of a set of responses. Acceptance is the number of tokens per verification, including the target's own token.
/// The field names are keys of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    pub responses: usize,
    pub steps: usize,
    pub tokens: u64,
    /// Mean over responses of their tokens per step.
    pub acceptance_mean: Option<f64>,
    /// All tokens divided by all steps.
    pub acceptance_pooled: Option<f64>,
    /// Fraction of steps that accept the first k drafts, among those that verified k drafts.
    pub acceptance_by_position: Vec<Option<f64>>,
    /// Accuracy of the k-th draft alone, given the true context before the block, as in training.
    pub accuracy_by_position: Vec<Option<f64>>,
    /// 1 + the sum of the cumulative products of `accuracy_by_position`: the acceptance if slots failed independently and blocks
    /// started at any position.
    pub predicted_acceptance: Option<f64>,
    /// Mean leading correct run of a block at any position of the plain response, in tokens: measured block by block. With
    /// greedy decoding it is the number of drafted tokens that the target accepts there.
    pub leading_run: Option<f64>,
    /// `acceptance_pooled` - `predicted_acceptance`.
    pub measured_minus_predicted: Option<f64>,
    /// Number of steps that produce 1, 2, ... tokens.
    pub tokens_per_step: Vec<usize>,
    pub greedy_identical: Option<bool>,
    /// Number of responses that differ from plain decoding.
    pub differing: usize,
    /// Tokens per second after the first token of each response, without the prompt's forward.
    pub tokens_per_second: Option<f64>,
    pub plain_tokens_per_second: Option<f64>,
    pub speedup: Option<f64>,
}

/// Statistics of one category of prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Category {
    pub category: String,
    #[serde(flatten)]
    pub stats: Stats,
}

/// Result of `draftmill eval`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub target: String,
    pub draft: String,
    pub block_size: usize,
    pub max_new_tokens: usize,
    pub temperature: f64,
    pub seed: u64,
    pub min_survival: f64,
    /// Turns skipped because the target has no positions after them.
    pub skipped_too_long: usize,
    #[serde(flatten)]
    pub all: Stats,
    /// `None` without a confidence head.
    pub confidence: Option<Confidence>,
    pub categories: Vec<Category>,
}

impl Stats {
    /// Computes the statistics of `records`. A block proposes `proposed` tokens.
    pub fn new(records: &[&Record], proposed: usize) -> Stats {
        let steps: Vec<Step> = records.iter().flat_map(|record| record.steps.iter().copied()).collect();
        let produced = |steps: &[Step]| steps.iter().map(|step| step.produced).sum::<usize>() as f64;
        // A response that ends with its first token has no step and no acceptance.
        let means: Vec<f64> =
            records.iter().filter_map(|record| ratio(produced(&record.steps), record.steps.len() as f64)).collect();
        let by_position = (1..=proposed).map(|k| {
            let tried = steps.iter().filter(|step| step.drafted >= k).count();
            ratio(steps.iter().filter(|step| step.accepted >= k).count() as f64, tried as f64)
        });
        let accuracy: Vec<Option<f64>> = (0..proposed)
            .map(|slot| {
                let counts = records.iter().filter_map(|record| record.slots.get(slot));
                let (right, tried) = counts.fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
                ratio(right as f64, tried as f64)
            })
            .collect();
        let acceptance_pooled = ratio(produced(&steps), steps.len() as f64);
        let predicted_acceptance = predicted(&accuracy);
        let sum = |of: fn(&Record) -> f64| records.iter().map(|record| of(record)).sum::<f64>();
        let speed = ratio(sum(|r| r.tokens as f64), sum(|r| r.seconds));
        let plain = ratio(sum(|r| r.plain_tokens as f64), sum(|r| r.plain_seconds));
        let compared: Vec<bool> = records.iter().filter_map(|record| record.identical).collect();
        Stats {
            responses: records.len(),
            steps: steps.len(),
            tokens: records.iter().map(|record| record.tokens).sum(),
            acceptance_mean: ratio(means.iter().sum(), means.len() as f64),
            acceptance_pooled,
            acceptance_by_position: by_position.collect(),
            accuracy_by_position: accuracy,
            predicted_acceptance,
            leading_run: {
                let (tokens, blocks) = records.iter().fold((0, 0), |sum, r| (sum.0 + r.runs.0, sum.1 + r.runs.1));
                ratio(tokens as f64, blocks as f64)
            },
            measured_minus_predicted: acceptance_pooled
                .zip(predicted_acceptance)
                .map(|(measured, predicted)| measured - predicted),
            tokens_per_step: (1..=proposed + 1)
                .map(|tokens| steps.iter().filter(|step| step.produced == tokens).count())
                .collect(),
            greedy_identical: (!compared.is_empty()).then(|| compared.iter().all(|&same| same)),
            differing: compared.iter().filter(|&&same| !same).count(),
            tokens_per_second: speed,
            plain_tokens_per_second: plain,
            speedup: speed.zip(plain).map(|(speed, plain)| speed / plain),
        }
    }

    /// Computes the statistics by category, sorted by name; empty if no prompt has a category.
    pub fn by_category(records: &[Record], proposed: usize) -> Vec<Category> {
        let mut groups: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        for record in records {
            if let Some(category) = &record.category {
                groups.entry(category).or_default().push(record);
            }
        }
        let stats = |(category, records): (&str, Vec<&Record>)| Category {
            category: category.into(),
            stats: Stats::new(&records, proposed),
        };
        groups.into_iter().map(stats).collect()
    }
}

/// Predicted acceptance, 1 + a1 + a1 a2 + ..., including the target's own token (docs/dflash.md#predicted-acceptance). The sum
/// ends at the first slot without a prediction.
pub(super) fn predicted(accuracy: &[Option<f64>]) -> Option<f64> {
    accuracy.first().copied().flatten()?;
    let mut all = 1.0;
    let sum = accuracy.iter().map_while(|accuracy| *accuracy).map(|accuracy| {
        all *= accuracy;
        all
    });
    Some(1.0 + sum.sum::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(drafted: usize, accepted: usize, produced: usize) -> Step {
        Step { drafted, accepted, produced }
    }

    /// Two responses: 3 + 1 + 2 tokens in three steps, the last one cut by a stop token, and 1 token in one step.
    fn records() -> [Record; 3] {
        let one = Record {
            category: Some("a".into()),
            steps: vec![step(2, 2, 3), step(2, 0, 1), step(2, 2, 2)],
            tokens: 6,
            seconds: 2.0,
            plain_tokens: 6,
            plain_seconds: 3.0,
            identical: Some(true),
            slots: vec![(3, 4), (1, 2)],
            survivals: Vec::new(),
            runs: (4, 4),
            shown: None,
        };
        let two = Record {
            category: Some("b".into()),
            steps: vec![step(1, 0, 1)],
            tokens: 1,
            seconds: 1.0,
            plain_tokens: 1,
            plain_seconds: 0.5,
            identical: Some(false),
            slots: vec![(0, 2), (1, 2)],
            survivals: Vec::new(),
            runs: (1, 4),
            shown: None,
        };
        [one, two, Record { identical: Some(true), slots: vec![(0, 0); 2], ..Record::default() }]
    }

    #[test]
    fn both_means_and_all_other_stats() {
        let records = records();
        let all = Stats::new(&records.iter().collect::<Vec<_>>(), 2);
        assert_eq!((all.responses, all.steps, all.tokens), (3, 4, 7));
        assert_eq!(all.acceptance_mean, Some((2.0 + 1.0) / 2.0));
        assert_eq!(all.leading_run, Some(5.0 / 8.0));
        assert_eq!(all.acceptance_pooled, Some(7.0 / 4.0));
        assert_eq!(all.acceptance_by_position, [Some(2.0 / 4.0), Some(2.0 / 3.0)]);
        assert_eq!(all.accuracy_by_position, [Some(0.5), Some(0.5)]);
        assert_eq!(all.predicted_acceptance, Some(1.75));
        assert_eq!(all.measured_minus_predicted, Some(0.0));
        assert_eq!(all.tokens_per_step, [2, 1, 1]);
        assert_eq!((all.greedy_identical, all.differing), (Some(false), 1));
        assert_eq!((all.tokens_per_second, all.plain_tokens_per_second), (Some(7.0 / 3.0), Some(2.0)));
        assert_eq!(all.speedup, Some(7.0 / 6.0));
    }

    #[test]
    fn categories_have_separate_stats() {
        let categories = Stats::by_category(&records(), 2);
        let shown: Vec<_> = categories.iter().map(|c| (c.category.as_str(), c.stats.acceptance_pooled)).collect();
        assert_eq!(shown, [("a", Some(2.0)), ("b", Some(1.0))]);
        assert_eq!(categories[0].stats.greedy_identical, Some(true));
    }

    #[test]
    fn no_responses_have_no_stats() {
        let none = Stats::new(&[], 3);
        assert_eq!((none.acceptance_mean, none.predicted_acceptance, none.greedy_identical), (None, None, None));
        assert_eq!(none.acceptance_by_position, [None; 3]);
    }
}
