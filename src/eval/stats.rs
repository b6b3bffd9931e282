//! From what each response brought to the figures of a whole measurement: pure arithmetic.

use serde::Serialize;
use std::collections::BTreeMap;

/// One verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Drafted tokens that were verified.
    pub drafted: usize,
    pub accepted: usize,
    /// Tokens that it brought to the response.
    pub produced: usize,
}

/// One response, decoded with the drafter and without.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    pub category: Option<String>,
    pub steps: Vec<Step>,
    /// Tokens behind the first one, and the seconds that they took.
    pub tokens: u64,
    pub seconds: f64,
    /// The same without a drafter.
    pub plain_tokens: u64,
    pub plain_seconds: f64,
    /// Whether both gave the same tokens; `None` when they are drawn by chance.
    pub identical: Option<bool>,
    /// Right and tried predictions of each slot behind the anchor, every earlier token being given.
    pub slots: Vec<(u64, u64)>,
}

/// Figures of some responses. Acceptance is tokens that a verification brings, the target's own one included.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    pub responses: usize,
    pub steps: usize,
    pub tokens: u64,
    /// Mean over responses of the tokens per step of each.
    pub acceptance_mean: Option<f64>,
    /// All tokens over all steps.
    pub acceptance_pooled: Option<f64>,
    /// Share of the steps in which the first k drafts all stood, among those that verified a k-th one.
    pub acceptance_by_position: Vec<Option<f64>>,
    /// Share of the blocks in which the k-th draft alone is right, every token before the block being true: what training
    /// reports as accuracy.
    pub accuracy_by_position: Vec<Option<f64>>,
    /// 1 + the sum of the cumulative products of `accuracy_by_position`: what acceptance would be if slots failed
    /// independently and blocks began anywhere.
    pub predicted_acceptance: Option<f64>,
    /// `acceptance_pooled` - `predicted_acceptance`.
    pub measured_minus_predicted: Option<f64>,
    /// Steps that brought 1, 2, ... tokens.
    pub tokens_per_step: Vec<usize>,
    pub greedy_identical: Option<bool>,
    /// Responses that differ from plain decoding.
    pub differing: usize,
    /// Tokens behind the first one of each response per second, without the prompt's forward.
    pub tokens_per_second: Option<f64>,
    pub plain_tokens_per_second: Option<f64>,
    pub speedup: Option<f64>,
}

/// Figures of one category of prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Category {
    pub category: String,
    #[serde(flatten)]
    pub figures: Figures,
}

/// A whole measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub target: String,
    pub draft: String,
    pub block_size: usize,
    pub max_new_tokens: usize,
    pub temperature: f64,
    pub seed: u64,
    /// Turns that were left out because nothing fits behind them.
    pub skipped_too_long: usize,
    #[serde(flatten)]
    pub all: Figures,
    pub categories: Vec<Category>,
}

impl Figures {
    /// `block_size` slots of a block, the given one included.
    pub fn of(records: &[&Record], block_size: usize) -> Figures {
        let steps: Vec<Step> = records.iter().flat_map(|record| record.steps.iter().copied()).collect();
        let produced = |steps: &[Step]| steps.iter().map(|step| step.produced).sum::<usize>() as f64;
        // A response that ended with its first token has no step, and so no acceptance.
        let means: Vec<f64> =
            records.iter().filter_map(|record| ratio(produced(&record.steps), record.steps.len() as f64)).collect();
        let by_position = (1..block_size).map(|k| {
            let tried = steps.iter().filter(|step| step.drafted >= k).count();
            ratio(steps.iter().filter(|step| step.accepted >= k).count() as f64, tried as f64)
        });
        let accuracy: Vec<Option<f64>> = (0..block_size - 1)
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
        Figures {
            responses: records.len(),
            steps: steps.len(),
            tokens: records.iter().map(|record| record.tokens).sum(),
            acceptance_mean: ratio(means.iter().sum(), means.len() as f64),
            acceptance_pooled,
            acceptance_by_position: by_position.collect(),
            accuracy_by_position: accuracy,
            predicted_acceptance,
            measured_minus_predicted: acceptance_pooled.zip(predicted_acceptance).map(|(found, said)| found - said),
            tokens_per_step: (1..=block_size)
                .map(|tokens| steps.iter().filter(|step| step.produced == tokens).count())
                .collect(),
            greedy_identical: (!compared.is_empty()).then(|| compared.iter().all(|&same| same)),
            differing: compared.iter().filter(|&&same| !same).count(),
            tokens_per_second: speed,
            plain_tokens_per_second: plain,
            speedup: speed.zip(plain).map(|(speed, plain)| speed / plain),
        }
    }

    /// By category, in the order of their names; none when no prompt carries one.
    pub fn by_category(records: &[Record], block_size: usize) -> Vec<Category> {
        let mut groups: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        for record in records {
            if let Some(category) = &record.category {
                groups.entry(category).or_default().push(record);
            }
        }
        let figures = |(category, records): (&str, Vec<&Record>)| Category {
            category: category.into(),
            figures: Figures::of(&records, block_size),
        };
        groups.into_iter().map(figures).collect()
    }
}

/// 1 + a1 + a1 a2 + ...: the expected accepted length, with the target's own token (`reference/dflash.md` section 5.2). It
/// ends at a slot that was never tried.
pub(super) fn predicted(accuracy: &[Option<f64>]) -> Option<f64> {
    accuracy.first().copied().flatten()?;
    let mut all = 1.0;
    let sum = accuracy.iter().map_while(|share| *share).map(|share| {
        all *= share;
        all
    });
    Some(1.0 + sum.sum::<f64>())
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(drafted: usize, accepted: usize, produced: usize) -> Step {
        Step { drafted, accepted, produced }
    }

    /// Two responses: 3 + 1 + 2 tokens in three steps, the last of them cut by a stop token; and 1 in one.
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
        };
        [one, two, Record { identical: Some(true), slots: vec![(0, 0); 2], ..Record::default() }]
    }

    #[test]
    fn both_ways_of_counting_and_every_other_figure() {
        let records = records();
        let all = Figures::of(&records.iter().collect::<Vec<_>>(), 3);
        assert_eq!((all.responses, all.steps, all.tokens), (3, 4, 7));
        assert_eq!(all.acceptance_mean, Some((2.0 + 1.0) / 2.0));
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
    fn categories_have_figures_of_their_own() {
        let categories = Figures::by_category(&records(), 3);
        let shown: Vec<_> = categories.iter().map(|c| (c.category.as_str(), c.figures.acceptance_pooled)).collect();
        assert_eq!(shown, [("a", Some(2.0)), ("b", Some(1.0))]);
        assert_eq!(categories[0].figures.greedy_identical, Some(true));
    }

    #[test]
    fn nothing_measured_is_nothing_said() {
        let none = Figures::of(&[], 4);
        assert_eq!((none.acceptance_mean, none.predicted_acceptance, none.greedy_identical), (None, None, None));
        assert_eq!(none.acceptance_by_position, [None; 3]);
    }
}
