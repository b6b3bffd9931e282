//! Retention of checkpoints: a pure function from the stored checkpoints and the settings to the ones to keep.

use crate::config::RetentionPolicy;

/// A checkpoint on disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoredCheckpoint {
    pub step: u64,
    /// Acceptance of its weights, if evaluated; higher is better.
    pub score: Option<f64>,
}

/// Reason to keep a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepReason {
    Last,
    Every,
    Best,
}

/// Decision on a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    Keep(KeepReason),
    Delete,
}

/// Decides on each checkpoint, by ascending step.
///
/// `keep.every` keeps the checkpoint of each multiple, or the next later one: a checkpoint that falls due while another is
/// written comes some steps late. It stays the first of its interval, so it is kept permanently.
pub fn retention(checkpoints: &[StoredCheckpoint], keep: RetentionPolicy) -> Vec<(u64, Decision)> {
    let mut checkpoints = checkpoints.to_vec();
    checkpoints.sort_by_key(|checkpoint| checkpoint.step);
    let mut scores: Vec<(f64, u64)> =
        checkpoints.iter().filter_map(|c| Some((c.score.filter(|score| !score.is_nan())?, c.step))).collect();
    // The later checkpoint wins a tie.
    scores.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    let best = &scores[..keep.best.min(scores.len())];
    let newest = checkpoints.len().saturating_sub(keep.last.max(1));
    // 0 below the first multiple, whose interval keeps nothing.
    let multiple = |step: u64| step.checked_div(keep.every).unwrap_or(0);
    let mut reached = 0;
    let decisions = checkpoints.iter().enumerate().map(|(index, &StoredCheckpoint { step, .. })| {
        let first = multiple(step) > reached;
        reached = multiple(step);
        let decision = if index >= newest {
            Decision::Keep(KeepReason::Last)
        } else if first {
            Decision::Keep(KeepReason::Every)
        } else if best.iter().any(|&(_, of)| of == step) {
            Decision::Keep(KeepReason::Best)
        } else {
            Decision::Delete
        };
        (step, decision)
    });
    decisions.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::btree_map, prelude::*};

    fn kept(steps: &[u64], keep: RetentionPolicy) -> Vec<u64> {
        let found: Vec<StoredCheckpoint> = steps.iter().map(|&step| StoredCheckpoint { step, score: None }).collect();
        let decisions = retention(&found, keep).into_iter();
        decisions.filter(|(_, decision)| *decision != Decision::Delete).map(|(step, _)| step).collect()
    }

    #[test]
    fn a_late_checkpoint_stands_for_its_multiple() {
        let keep = RetentionPolicy { last: 1, every: 100, best: 0 };
        // Due at 100 and 200, written at 105 and 210.
        assert_eq!(kept(&[50, 105, 150, 210, 250, 300, 350, 380], keep), [105, 210, 300, 380]);
        assert_eq!(kept(&[50, 99], keep), [99]);
        assert_eq!(kept(&[50, 99, 100], RetentionPolicy::default()), [100]);
    }

    #[test]
    fn the_best_have_the_highest_scores() {
        let scores = [Some(3.0), None, Some(f64::NAN), Some(9.0), Some(9.0), Some(1.0)];
        let found: Vec<StoredCheckpoint> =
            (1..).zip(scores).map(|(step, score)| StoredCheckpoint { step, score }).collect();
        let decisions = retention(&found, RetentionPolicy { last: 1, every: 0, best: 2 });
        let why: Vec<Decision> = decisions.into_iter().map(|(_, decision)| decision).collect();
        let (best, delete) = (Decision::Keep(KeepReason::Best), Decision::Delete);
        assert_eq!(why, [delete, delete, delete, best, best, Decision::Keep(KeepReason::Last)]);
    }

    proptest! {
        /// Applies the decisions after each new checkpoint, as a run does.
        #[test]
        fn the_newest_and_every_multiple_stay_permanently(
            steps in btree_map(1u64..500, prop::option::of(-9.0f64..9.0), 1..60),
            last in 0usize..5,
            every in 0u64..40,
            best in 0usize..4,
        ) {
            let keep = RetentionPolicy { last, every, best };
            let mut stored: Vec<StoredCheckpoint> = Vec::new();
            for (&step, &score) in &steps {
                stored.push(StoredCheckpoint { step, score });
                let decisions = retention(&stored, keep);
                let decided: Vec<u64> = decisions.iter().map(|(step, _)| *step).collect();
                prop_assert_eq!(decided, stored.iter().map(|c| c.step).collect::<Vec<_>>(), "one decision for each");
                stored.retain(|c| !decisions.contains(&(c.step, Decision::Delete)));
            }
            let still_stored = |step: u64| stored.iter().any(|c| c.step == step);
            for &step in steps.keys().rev().take(last.max(1)) {
                prop_assert!(still_stored(step), "of the newest {last}, {step}");
            }
            for &step in steps.keys().filter(|&&step| every > 0 && step % every == 0) {
                prop_assert!(still_stored(step), "multiple {step} of {every}");
            }
            let mut scores: Vec<f64> = steps.values().copied().flatten().collect();
            scores.sort_by(|a, b| b.total_cmp(a));
            for score in scores.into_iter().take(best) {
                prop_assert!(stored.iter().any(|c| c.score.is_some_and(|s| s >= score)), "{score} of the best {best}");
            }
            let most = last.max(1) + best + if every > 0 { 500 / every as usize } else { 0 };
            prop_assert!(stored.len() <= most, "{} of at most {most}", stored.len());
        }
    }
}
