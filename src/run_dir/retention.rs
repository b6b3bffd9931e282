//! Which checkpoints stay and which go: one pure function of what is there and what is to be kept.

use crate::config::Keep;

/// A checkpoint that is there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    pub step: u64,
    /// How good its weights were measured to be, more is better.
    pub score: Option<f64>,
}

/// Why a checkpoint stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    Last,
    Every,
    Best,
}

/// What is to be done with a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Keep(Why),
    Delete,
}

/// What is to be done with each of the checkpoints, by ascending step.
///
/// "Of every so many steps the first" is the multiple itself where it has a checkpoint, and else the next one: a checkpoint
/// that was due while another was being written comes some steps late. It stays the first, whatever comes after it, so what
/// was kept for that once is kept for good.
pub fn retention(found: &[Found], keep: Keep) -> Vec<(u64, Action)> {
    let mut found = found.to_vec();
    found.sort_by_key(|checkpoint| checkpoint.step);
    let mut scores: Vec<(f64, u64)> =
        found.iter().filter_map(|c| Some((c.score.filter(|score| !score.is_nan())?, c.step))).collect();
    // Of two that are as good the later one.
    scores.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    let best = &scores[..keep.best.min(scores.len())];
    let newest = found.len().saturating_sub(keep.last.max(1));
    // 0 below the first multiple, where there is nothing to keep.
    let multiple = |step: u64| step.checked_div(keep.every).unwrap_or(0);
    let mut reached = 0;
    let each = found.iter().enumerate().map(|(place, &Found { step, .. })| {
        let first = multiple(step) > reached;
        reached = multiple(step);
        let action = if place >= newest {
            Action::Keep(Why::Last)
        } else if first {
            Action::Keep(Why::Every)
        } else if best.iter().any(|&(_, of)| of == step) {
            Action::Keep(Why::Best)
        } else {
            Action::Delete
        };
        (step, action)
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::btree_map, prelude::*};

    fn kept(steps: &[u64], keep: Keep) -> Vec<u64> {
        let found: Vec<Found> = steps.iter().map(|&step| Found { step, score: None }).collect();
        let actions = retention(&found, keep).into_iter();
        actions.filter(|(_, action)| *action != Action::Delete).map(|(step, _)| step).collect()
    }

    #[test]
    fn a_late_checkpoint_stands_for_its_multiple() {
        let keep = Keep { last: 1, every: 100, best: 0 };
        // Due at 100 and 200, written at 105 and 210.
        assert_eq!(kept(&[50, 105, 150, 210, 250, 300, 350, 380], keep), [105, 210, 300, 380]);
        assert_eq!(kept(&[50, 99], keep), [99]);
        assert_eq!(kept(&[50, 99, 100], Keep::default()), [100]);
    }

    #[test]
    fn the_best_are_those_that_were_measured() {
        let scores = [Some(3.0), None, Some(f64::NAN), Some(9.0), Some(9.0), Some(1.0)];
        let found: Vec<Found> = (1..).zip(scores).map(|(step, score)| Found { step, score }).collect();
        let actions = retention(&found, Keep { last: 1, every: 0, best: 2 });
        let why: Vec<Action> = actions.into_iter().map(|(_, action)| action).collect();
        let (best, delete) = (Action::Keep(Why::Best), Action::Delete);
        assert_eq!(why, [delete, delete, delete, best, best, Action::Keep(Why::Last)]);
    }

    proptest! {
        /// As a run goes: after each new checkpoint the rest is thrown away by what was kept before.
        #[test]
        fn the_newest_and_every_multiple_stay_for_good(
            steps in btree_map(1u64..500, prop::option::of(-9.0f64..9.0), 1..60),
            last in 0usize..5,
            every in 0u64..40,
            best in 0usize..4,
        ) {
            let keep = Keep { last, every, best };
            let mut there: Vec<Found> = Vec::new();
            for (&step, &score) in &steps {
                there.push(Found { step, score });
                let actions = retention(&there, keep);
                let asked: Vec<u64> = actions.iter().map(|(step, _)| *step).collect();
                prop_assert_eq!(asked, there.iter().map(|c| c.step).collect::<Vec<_>>(), "one answer for each");
                there.retain(|c| !actions.contains(&(c.step, Action::Delete)));
            }
            let there_still = |step: u64| there.iter().any(|c| c.step == step);
            for &step in steps.keys().rev().take(last.max(1)) {
                prop_assert!(there_still(step), "of the newest {last}, {step}");
            }
            for &step in steps.keys().filter(|&&step| every > 0 && step % every == 0) {
                prop_assert!(there_still(step), "multiple {step} of {every}");
            }
            let mut scores: Vec<f64> = steps.values().copied().flatten().collect();
            scores.sort_by(|a, b| b.total_cmp(a));
            for score in scores.into_iter().take(best) {
                prop_assert!(there.iter().any(|c| c.score.is_some_and(|s| s >= score)), "{score} of the best {best}");
            }
            let most = last.max(1) + best + if every > 0 { 500 / every as usize } else { 0 };
            prop_assert!(there.len() <= most, "{} of at most {most}", there.len());
        }
    }
}
