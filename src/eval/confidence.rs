//! Calibration of the confidence head, and the effect of a cut by it: pure arithmetic.
//!
//! The *survival* of a drafted token is the probability that it and all drafted tokens before it are accepted. The head
//! predicts it as the product of the confidences up to the token.

use super::ratio;
use super::record::Record;
use serde::Serialize;

/// Number of bins of the calibration, and of tenths among the thresholds.
const BINS: usize = 10;

/// Statistics of a drafter with a confidence head. The field names are keys of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Confidence {
    /// Verified tokens by predicted survival, in ten equal ranges.
    pub calibration: Vec<Bin>,
    /// Mean distance of predicted and measured survival over the ranges, weighted with their tokens.
    pub calibration_error: Option<f64>,
    /// Effect of a cut at each threshold: 0, 0.1, ... 0.9.
    pub cuts: Vec<Cut>,
}

/// Verified tokens whose predicted survival is in one range.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bin {
    /// Lower limit of the range.
    pub from: f64,
    pub tokens: usize,
    /// Mean predicted survival.
    pub predicted: Option<f64>,
    /// Fraction of the tokens that were accepted.
    pub accepted: Option<f64>,
}

/// Steps as they would be if each block ended before the first token whose survival is below the threshold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cut {
    pub threshold: f64,
    /// Mean verified tokens per step.
    pub verified: Option<f64>,
    /// Mean tokens per step, with the target's own: the acceptance.
    pub acceptance: Option<f64>,
}

impl Confidence {
    /// Computes the statistics of `records`; `None` if no token has a prediction.
    pub fn new(records: &[Record]) -> Option<Confidence> {
        let steps = || records.iter().flat_map(|record| record.steps.iter().zip(&record.survivals));
        let tokens = || {
            steps().flat_map(|(step, survivals)| {
                let accepted = step.accepted;
                survivals.iter().take(step.drafted).enumerate().map(move |(k, &survival)| (survival, k < accepted))
            })
        };
        tokens().next()?;
        let bin_of = |survival: f64| ((survival * BINS as f64) as usize).min(BINS - 1);
        let calibration: Vec<Bin> = (0..BINS)
            .map(|bin| {
                let own = || tokens().filter(move |&(survival, _)| bin_of(survival) == bin);
                let count = own().count();
                Bin {
                    from: tenths(bin),
                    tokens: count,
                    predicted: ratio(own().map(|(survival, _)| survival).sum(), count as f64),
                    accepted: ratio(own().filter(|&(_, accepted)| accepted).count() as f64, count as f64),
                }
            })
            .collect();
        let distance = |bin: &Bin| Some(bin.tokens as f64 * (bin.predicted? - bin.accepted?).abs());
        let calibration_error = ratio(calibration.iter().filter_map(distance).sum(), tokens().count() as f64);
        let cuts = (0..BINS).map(|tenth| {
            let threshold = tenths(tenth);
            let (mut count, mut verified, mut produced) = (0, 0, 0);
            for (step, survivals) in steps() {
                let kept = survivals.iter().take_while(|&&survival| survival >= threshold).count().min(step.drafted);
                count += 1;
                verified += kept;
                // A stop token among the accepted ones ends a step without the target's token.
                produced += if kept < step.accepted { kept + 1 } else { step.produced };
            }
            let mean = |sum: usize| ratio(sum as f64, f64::from(count));
            Cut { threshold, verified: mean(verified), acceptance: mean(produced) }
        });
        Some(Confidence { cuts: cuts.collect(), calibration, calibration_error })
    }
}

fn tenths(count: usize) -> f64 {
    count as f64 / BINS as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::Step;

    #[test]
    fn predictions_are_compared_with_acceptance_and_cut() {
        let steps = vec![
            Step { drafted: 2, accepted: 2, produced: 3 },
            Step { drafted: 2, accepted: 0, produced: 1 },
            Step { drafted: 2, accepted: 1, produced: 2 },
            Step { drafted: 1, accepted: 1, produced: 1 },
        ];
        // The third block ended at a limit; the last one ended with a stop token, before its second token.
        let survivals = vec![vec![0.95, 0.85], vec![0.15, 0.05], vec![0.95, 0.15], vec![1.0, 0.5]];
        let found = Confidence::new(&[Record { steps, survivals, ..Record::default() }]).unwrap();
        let counts: Vec<usize> = found.calibration.iter().map(|bin| bin.tokens).collect();
        assert_eq!(counts, [1, 2, 0, 0, 0, 0, 0, 0, 1, 3]);
        assert_eq!((found.calibration[1].predicted, found.calibration[1].accepted), (Some(0.15), Some(0.0)));
        assert_eq!((found.calibration[2].predicted, found.calibration[2].accepted), (None, None));
        let expected = (0.05 + 2.0 * 0.15 + 0.15 + (0.05 + 0.05 + 0.0)) / 7.0;
        assert!((found.calibration_error.unwrap() - expected).abs() < 1e-12, "{found:?}");
        let cut = |tenth: usize| (found.cuts[tenth].verified, found.cuts[tenth].acceptance);
        assert_eq!(cut(0), (Some(7.0 / 4.0), Some(7.0 / 4.0)));
        // Above 0.15 the second block verifies nothing and the third one token.
        assert_eq!(cut(2), (Some(4.0 / 4.0), Some(7.0 / 4.0)));
        assert_eq!(cut(9), (Some(3.0 / 4.0), Some(6.0 / 4.0)));
    }

    #[test]
    fn a_head_without_confidence_has_no_statistics() {
        let steps = vec![Step { drafted: 1, accepted: 1, produced: 2 }];
        let survivals = vec![Vec::new()];
        assert_eq!(Confidence::new(&[Record { steps, survivals, ..Record::default() }]), None);
    }
}
