//! Schedule of evaluations during training, and the handle of the evaluator.

use crate::config::Eval;
use crate::run_dir::eval_log::EvalHistory;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

/// Kinds of evaluation of one set of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvalKinds {
    /// Loss and accuracy on held-out samples.
    pub held_out: bool,
    /// Acceptance in real decoding.
    pub decode: bool,
}

impl EvalKinds {
    pub const ALL: EvalKinds = EvalKinds { held_out: true, decode: true };
    pub const NOTHING: EvalKinds = EvalKinds { held_out: false, decode: false };

    fn and(self, other: EvalKinds) -> EvalKinds {
        EvalKinds { held_out: self.held_out && other.held_out, decode: self.decode && other.decode }
    }
}

/// Intervals of evaluations, and the limit on their share of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalIntervals {
    /// Steps between evaluations on held-out samples, and between decodings; `None` disables them.
    pub every: Option<u64>,
    pub decode_every: Option<u64>,
    /// Limit on the fraction of time that evaluations take, in 0..=1.
    pub max_share: f64,
}

impl EvalIntervals {
    pub fn new(eval: &Eval) -> EvalIntervals {
        EvalIntervals { every: eval.every_steps, decode_every: eval.decode_every_steps, max_share: eval.max_share }
    }

    /// Kinds that have an interval.
    pub fn enabled(&self) -> EvalKinds {
        EvalKinds { held_out: self.every.is_some(), decode: self.decode_every.is_some() }
    }
}

/// Schedule of evaluations, with one slot for all of them.
#[derive(Clone)]
pub struct EvalSchedule {
    /// Current intervals; they may change during the run.
    intervals: Arc<dyn Fn() -> EvalIntervals + Send + Sync>,
    /// Kinds that the run supports.
    supported: EvalKinds,
    slot: Arc<Semaphore>,
}

/// Permit for one evaluation at a time. Dropping it frees the slot.
#[derive(Debug)]
pub struct EvalSlot(#[allow(dead_code, reason = "dropping it is its use")] OwnedSemaphorePermit);

/// Evaluation due after a step.
#[derive(Debug)]
pub enum DueEval {
    Nothing,
    /// The slot is taken: another evaluation runs, or pauses after running.
    Skipped,
    Now(EvalKinds, EvalSlot),
}

impl EvalSchedule {
    pub fn new(supported: EvalKinds, intervals: impl Fn() -> EvalIntervals + Send + Sync + 'static) -> EvalSchedule {
        EvalSchedule { intervals: Arc::new(intervals), supported, slot: Arc::new(Semaphore::new(1)) }
    }

    /// Kinds that are supported and enabled.
    pub fn enabled(&self) -> EvalKinds {
        self.supported.and((self.intervals)().enabled())
    }

    /// Pause after an evaluation that took `spent`.
    pub fn pause(&self, spent: Duration) -> Duration {
        pause(spent, (self.intervals)().max_share)
    }

    /// Evaluation due after `step`, with the slot if it is free.
    pub fn due(&self, step: u64) -> DueEval {
        let EvalIntervals { every, decode_every, .. } = (self.intervals)();
        let at = |every: Option<u64>| every.is_some_and(|every| step.is_multiple_of(every));
        let kinds = self.supported.and(EvalKinds { held_out: at(every), decode: at(decode_every) });
        if kinds == EvalKinds::NOTHING {
            return DueEval::Nothing;
        }
        match self.slot.clone().try_acquire_owned() {
            Ok(permit) => DueEval::Now(kinds, EvalSlot(permit)),
            Err(_) => DueEval::Skipped,
        }
    }
}

/// Pause after an evaluation that took `spent`, so that evaluations take at most the fraction `max_share` of all time.
fn pause(spent: Duration, max_share: f64) -> Duration {
    Duration::try_from_secs_f64(spent.as_secs_f64() * (1.0 / max_share - 1.0)).unwrap_or(Duration::MAX)
}

/// Weights at the end of a run.
#[derive(Debug)]
pub struct FinalWeights {
    pub step: u64,
    /// Folder of their checkpoint.
    pub checkpoint: PathBuf,
}

/// Handle of the evaluator. Dropping it aborts the running evaluation.
pub struct Evaluator {
    pub(super) history: watch::Receiver<EvalHistory>,
    pub(super) last: oneshot::Sender<FinalWeights>,
    pub(super) task: AbortOnDropHandle<()>,
}

impl Evaluator {
    /// Evaluations so far, with notification of changes.
    pub fn history(&self) -> watch::Receiver<EvalHistory> {
        self.history.clone()
    }

    /// Waits for the running evaluation, evaluates the final weights, and returns all evaluations.
    pub async fn finish(self, last: FinalWeights) -> EvalHistory {
        let Evaluator { history, last: send, task } = self;
        // An evaluator that ended early has logged the reason.
        let _ = send.send(last);
        if let Err(error) = task.await {
            tracing::warn!(%error, "evaluator ended early");
        }
        history.borrow().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_evaluation_runs_at_a_time() {
        let (change, intervals) =
            watch::channel(EvalIntervals { every: Some(10), decode_every: Some(15), max_share: 0.5 });
        let schedule = EvalSchedule::new(EvalKinds::ALL, move || *intervals.borrow());
        assert!(matches!(schedule.due(7), DueEval::Nothing));
        let DueEval::Now(kinds, slot) = schedule.due(20) else { panic!("20 is a multiple of 10") };
        assert_eq!(kinds, EvalKinds { held_out: true, decode: false });
        assert!(matches!(schedule.due(30), DueEval::Skipped));
        assert!(matches!(schedule.due(31), DueEval::Nothing));
        drop(slot);
        let DueEval::Now(kinds, slot) = schedule.due(30) else { panic!("the slot is free") };
        assert_eq!(kinds, EvalKinds::ALL);
        drop(slot);
        assert_eq!(schedule.pause(Duration::from_secs(2)), Duration::from_secs(2));

        change.send_replace(EvalIntervals { every: Some(7), decode_every: None, max_share: 0.1 });
        assert!(matches!(schedule.due(30), DueEval::Nothing), "other intervals are in force");
        let DueEval::Now(kinds, _slot) = schedule.due(7) else { panic!("7 is due now") };
        assert_eq!(kinds, EvalKinds { held_out: true, decode: false });
        assert_eq!(schedule.pause(Duration::from_secs(2)).as_secs_f64().round(), 18.0);
        change.send_replace(EvalIntervals { every: None, decode_every: None, max_share: 0.1 });
        assert_eq!(schedule.enabled(), EvalKinds::NOTHING);
    }

    #[test]
    fn an_unsupported_kind_is_never_due() {
        let both = EvalIntervals { every: Some(10), decode_every: Some(10), max_share: 1.0 };
        let schedule = EvalSchedule::new(EvalKinds { held_out: false, decode: true }, move || both);
        assert_eq!(schedule.enabled(), EvalKinds { held_out: false, decode: true });
        let DueEval::Now(kinds, _slot) = schedule.due(10) else { panic!("decoding is due") };
        assert_eq!(kinds, schedule.enabled());
    }

    #[test]
    fn the_pause_keeps_the_share() {
        assert_eq!(pause(Duration::from_secs(2), 0.1).as_secs_f64().round(), 18.0);
        assert_eq!(pause(Duration::from_secs(2), 1.0), Duration::ZERO);
    }
}
