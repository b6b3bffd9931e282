//! A measure beside the steps: who is due, who has to wait, and what the service hears of it.

use crate::config::Eval;
use crate::run_dir::eval_log::History;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

/// What is to be measured of some weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct What {
    /// Loss and accuracy on held-out samples.
    pub held_out: bool,
    /// Acceptance in real decoding.
    pub decode: bool,
}

impl What {
    pub const ALL: What = What { held_out: true, decode: true };
    pub const NOTHING: What = What { held_out: false, decode: false };

    fn and(self, other: What) -> What {
        What { held_out: self.held_out && other.held_out, decode: self.decode && other.decode }
    }
}

/// How often measures are due, and how much of the time they may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rhythm {
    /// Steps between measures on held-out samples, and between decodings; `None`: never.
    pub every: Option<u64>,
    pub decode_every: Option<u64>,
    /// Most share of the time.
    pub share: f64,
}

impl Rhythm {
    pub fn of(eval: &Eval) -> Rhythm {
        Rhythm { every: eval.every_steps, decode_every: eval.decode_every_steps, share: eval.max_share }
    }

    /// What is measured at all.
    pub fn wanted(&self) -> What {
        What { held_out: self.every.is_some(), decode: self.decode_every.is_some() }
    }
}

/// What is due when, and the one turn that all measures share.
#[derive(Clone)]
pub struct Turns {
    /// In force now: a person may change it while the run goes on.
    rhythm: Arc<dyn Fn() -> Rhythm + Send + Sync>,
    /// All that can be measured.
    can: What,
    turn: Arc<Semaphore>,
}

/// The right to measure; whoever holds it keeps others from it.
#[derive(Debug)]
pub struct Turn(#[allow(dead_code, reason = "dropping it is its use")] OwnedSemaphorePermit);

/// What is due after a step.
#[derive(Debug)]
pub enum Due {
    Nothing,
    /// Another measure is under way, or rests after one.
    Skipped,
    Now(What, Turn),
}

impl Turns {
    pub fn new(can: What, rhythm: impl Fn() -> Rhythm + Send + Sync + 'static) -> Turns {
        Turns { rhythm: Arc::new(rhythm), can, turn: Arc::new(Semaphore::new(1)) }
    }

    /// What can be measured and is wanted.
    pub fn wanted(&self) -> What {
        self.can.and((self.rhythm)().wanted())
    }

    /// How long to rest after a measure that took `spent`.
    pub fn rest(&self, spent: Duration) -> Duration {
        rest(spent, (self.rhythm)().share)
    }

    /// What is due after `step`, and the turn for it where nobody else has it.
    pub fn due(&self, step: u64) -> Due {
        let Rhythm { every, decode_every, .. } = (self.rhythm)();
        let at = |every: Option<u64>| every.is_some_and(|every| step.is_multiple_of(every));
        let what = self.can.and(What { held_out: at(every), decode: at(decode_every) });
        if what == What::NOTHING {
            return Due::Nothing;
        }
        match self.turn.clone().try_acquire_owned() {
            Ok(turn) => Due::Now(what, Turn(turn)),
            Err(_) => Due::Skipped,
        }
    }
}

/// How long to rest after a measure that took `spent`, so that measures take no more than `share` of all time.
fn rest(spent: Duration, share: f64) -> Duration {
    Duration::try_from_secs_f64(spent.as_secs_f64() * (1.0 / share - 1.0)).unwrap_or(Duration::MAX)
}

/// The weights that a run ends with.
#[derive(Debug)]
pub struct Last {
    pub step: u64,
    /// Their checkpoint.
    pub checkpoint: PathBuf,
}

/// What the service holds of the measures beside its steps. Dropping it gives up the one that is under way.
pub struct Evaluator {
    pub(super) history: watch::Receiver<History>,
    pub(super) last: oneshot::Sender<Last>,
    pub(super) task: AbortOnDropHandle<()>,
}

impl Evaluator {
    /// Everything that was measured so far, and every change of it.
    pub fn history(&self) -> watch::Receiver<History> {
        self.history.clone()
    }

    /// Waits for the measure that is under way, measures the last weights, and tells everything that was measured.
    pub async fn finish(self, last: Last) -> History {
        let Evaluator { history, last: send, task } = self;
        // One that is gone has said why in the log.
        let _ = send.send(last);
        if let Err(error) = task.await {
            tracing::warn!(%error, "the measures beside the steps ended early");
        }
        history.borrow().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_has_one_turn_at_a_time() {
        let (change, rhythm) = watch::channel(Rhythm { every: Some(10), decode_every: Some(15), share: 0.5 });
        let turns = Turns::new(What::ALL, move || *rhythm.borrow());
        assert!(matches!(turns.due(7), Due::Nothing));
        let Due::Now(what, turn) = turns.due(20) else { panic!("20 is a multiple of 10") };
        assert_eq!(what, What { held_out: true, decode: false });
        assert!(matches!(turns.due(30), Due::Skipped));
        assert!(matches!(turns.due(31), Due::Nothing));
        drop(turn);
        let Due::Now(what, turn) = turns.due(30) else { panic!("the turn was given back") };
        assert_eq!(what, What::ALL);
        drop(turn);
        assert_eq!(turns.rest(Duration::from_secs(2)), Duration::from_secs(2));

        change.send_replace(Rhythm { every: Some(7), decode_every: None, share: 0.1 });
        assert!(matches!(turns.due(30), Due::Nothing), "another rhythm is in force");
        let Due::Now(what, _turn) = turns.due(7) else { panic!("7 is due now") };
        assert_eq!(what, What { held_out: true, decode: false });
        assert_eq!(turns.rest(Duration::from_secs(2)).as_secs_f64().round(), 18.0);
        change.send_replace(Rhythm { every: None, decode_every: None, share: 0.1 });
        assert_eq!(turns.wanted(), What::NOTHING);
    }

    #[test]
    fn what_cannot_be_measured_is_never_due() {
        let both = Rhythm { every: Some(10), decode_every: Some(10), share: 1.0 };
        let turns = Turns::new(What { held_out: false, decode: true }, move || both);
        assert_eq!(turns.wanted(), What { held_out: false, decode: true });
        let Due::Now(what, _turn) = turns.due(10) else { panic!("decoding is due") };
        assert_eq!(what, turns.wanted());
    }

    #[test]
    fn the_rest_keeps_the_share() {
        assert_eq!(rest(Duration::from_secs(2), 0.1).as_secs_f64().round(), 18.0);
        assert_eq!(rest(Duration::from_secs(2), 1.0), Duration::ZERO);
    }
}
