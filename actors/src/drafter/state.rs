//! Decisions of a drafter, without waiting: when to ask for a batch or a ticket, which batch to train, and what a failure means.

use crate::messages::{
    engine::{EngineError, MicroReport},
    types::JobId,
};
use std::collections::{BTreeSet, VecDeque};

/// Settings of the drafters.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Batches that a drafter holds in addition to the one in work, at least 1.
    pub prefetch: usize,
    /// Failures of a job, in targets and drafters together, after which it is skipped.
    pub max_attempts: u32,
    /// Different batches that fail in a row before the drafter stops the run: its device is broken, not its batches.
    pub max_failures_in_a_row: u32,
    /// Drafters that draw nothing for now.
    pub paused: Vec<usize>,
}

/// Message that the drafter sends next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Asks the pool for a batch.
    Batch,
    /// Asks the trainer for a ticket.
    Ticket,
    /// Reports to the trainer that this drafter trains nothing more.
    Finished,
}

/// Work that follows from a granted ticket.
#[derive(Debug, PartialEq, Eq)]
pub struct Training<B> {
    pub batch: B,
    /// Asks the pool for the next batch before this one is trained.
    pub draw: bool,
}

/// Consequence of a failed micro-batch with features `F`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovery<F> {
    /// Returns the batch to the pool, for another draw.
    ReturnBatch(F),
    /// Skips the job. `cause` is the metric's label.
    SkipJob { cause: &'static str, reason: String },
    /// Ends the run: the drafter is broken, not the job, which stays open.
    Fault(String),
}

/// Every decision of a drafter. `B` is a checked-out batch; the state never looks into it.
#[derive(Debug)]
pub struct State<B> {
    index: usize,
    settings: Settings,
    /// Prefetched batches, by position in the draw order if there is one.
    prefetched: VecDeque<(Option<u64>, B)>,
    /// A draw is pending.
    drawing: bool,
    /// A ticket is requested.
    requested: bool,
    /// The pool has no more batches.
    exhausted: bool,
    /// The trainer needs nothing more from this drafter, and knows that nothing follows.
    finished: bool,
    /// With a draw order: batches below this position may be trained now.
    below: u64,
    /// A batch went back to the pool. This drafter draws once more than usual: the others may hold only batches that come later
    /// in the order, and then none of them would draw the returned one.
    extra_draw: bool,
    /// Jobs that failed since the last success. A second failure of the same job is no new evidence against this drafter.
    failed: BTreeSet<JobId>,
}

impl<B> State<B> {
    pub fn new(index: usize, settings: Settings) -> Self {
        Self {
            index,
            settings,
            prefetched: VecDeque::new(),
            drawing: false,
            requested: false,
            exhausted: false,
            finished: false,
            below: 0,
            extra_draw: false,
            failed: BTreeSet::new(),
        }
    }

    /// Applies changed settings. Returns true if the pending draw is to be withdrawn because this drafter is paused.
    pub fn reconfigure(&mut self, settings: Settings) -> bool {
        self.settings = settings;
        self.is_paused() && self.drawing
    }

    /// Starts a step, or extends it: with a draw order, batches below position `below` belong to it.
    pub fn on_collect(&mut self, below: u64) {
        self.below = below;
    }

    /// Returns the requests to send now; each is marked as pending.
    pub fn requests(&mut self) -> Vec<Request> {
        let mut requests = Vec::new();
        if self.starts_draw() {
            requests.push(Request::Batch);
        }
        if self.finished || self.requested {
            return requests;
        }
        match self.prefetched.front() {
            Some((position, _)) if position.is_none_or(|position| position < self.below) => {
                self.requested = true;
                requests.push(Request::Ticket);
            }
            None if self.exhausted => {
                self.finished = true;
                requests.push(Request::Finished);
            }
            _ => {}
        }
        requests
    }

    /// Takes in a drawn batch. `position` is its position in the draw order, if there is one.
    pub fn on_batch(&mut self, position: Option<u64>, batch: B) {
        self.drawing = false;
        let at = self.prefetched.partition_point(|(other, _)| *other <= position);
        self.prefetched.insert(at, (position, batch));
    }

    /// The pool has no more batches.
    pub fn on_exhausted(&mut self) {
        (self.drawing, self.exhausted) = (false, true);
    }

    /// The pending draw was withdrawn before the pool replied.
    pub fn on_withdrawn(&mut self) {
        self.drawing = false;
    }

    /// Returns the work for a granted ticket; `None` returns the ticket unused.
    pub fn on_ticket(&mut self) -> Option<Training<B>> {
        self.requested = false;
        let (_, batch) = self.prefetched.pop_front()?;
        Some(Training { batch, draw: self.starts_draw() })
    }

    /// The trainer refused the ticket: no further step needs this drafter.
    pub fn on_refused(&mut self) {
        (self.requested, self.finished) = (false, true);
    }

    /// Judges the report of a micro-batch.
    ///
    /// # Errors
    ///
    /// Fails if the loss is not finite: the run must end.
    pub fn on_report(&mut self, job: JobId, report: &MicroReport) -> Result<(), String> {
        let loss = report.loss_numerator;
        if !loss.is_finite() {
            return Err(format!(
                "the loss of job {job} is {loss}; lower optimizer.learning_rate or train in f32; if the resumed run ends the same way, continue from an earlier checkpoint: draftmill train --from-checkpoint step-N"
            ));
        }
        self.failed.clear();
        Ok(())
    }

    /// Decides about a failed micro-batch. `attempts` counts all failures of the job, this one included. `features` is `None` if
    /// the engine lost them.
    pub fn on_failure<F>(
        &mut self,
        job: JobId,
        attempts: u32,
        error: &EngineError,
        features: Option<F>,
    ) -> Recovery<F> {
        self.failed.insert(job);
        let failed = self.failed.len();
        if matches!(error, EngineError::Lost(_)) || failed >= self.settings.max_failures_in_a_row as usize {
            return Recovery::Fault(format!("{failed} batches failed in a row; last error: {error}"));
        }
        let (cause, lost) = match features {
            Some(features) if attempts < self.settings.max_attempts => {
                self.extra_draw = true;
                return Recovery::ReturnBatch(features);
            }
            Some(_) => ("drafter_failed", ""),
            None => ("features_lost", " and lost its hidden states"),
        };
        Recovery::SkipJob { cause, reason: format!("the drafter failed to train the job{lost}: {error}") }
    }

    /// Returns true while only a batch from the pool lets this drafter continue.
    pub fn needs_batch(&self) -> bool {
        self.prefetched.is_empty() && !self.exhausted
    }

    fn is_paused(&self) -> bool {
        self.settings.paused.contains(&self.index)
    }

    /// Decides whether to draw now, and marks the draw as pending.
    fn starts_draw(&mut self) -> bool {
        let over = self.exhausted || self.finished || self.is_paused();
        let wanted = self.prefetched.len() < self.settings.prefetch.max(1) || self.extra_draw;
        if over || self.drawing || !wanted {
            return false;
        }
        (self.drawing, self.extra_draw) = (true, false);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: Settings = Settings { prefetch: 1, max_attempts: 3, max_failures_in_a_row: 2, paused: Vec::new() };

    fn job(index: u32) -> JobId {
        JobId { epoch: 0, index }
    }

    fn failed() -> EngineError {
        EngineError::Failed("no".into())
    }

    #[test]
    fn a_drafter_prefetches_the_next_batch_before_it_trains() {
        let mut state = State::new(0, SETTINGS);
        assert_eq!(state.requests(), [Request::Batch]);
        assert_eq!(state.requests(), [], "one draw at a time");
        assert!(state.needs_batch());
        state.on_batch(None, 'a');
        assert_eq!(state.requests(), [Request::Ticket]);
        assert_eq!(state.requests(), [], "one ticket at a time");
        assert_eq!(state.on_ticket(), Some(Training { batch: 'a', draw: true }));
        state.on_exhausted();
        assert_eq!(state.requests(), [Request::Finished]);
        assert_eq!(state.requests(), [], "reported once");
    }

    #[test]
    fn a_drafter_that_the_trainer_refuses_asks_for_nothing_more() {
        let mut state = State::new(0, SETTINGS);
        state.requests();
        state.on_batch(None, 'a');
        state.requests();
        state.on_refused();
        assert_eq!(state.requests(), []);
    }

    #[test]
    fn with_a_draw_order_a_batch_waits_for_its_step() {
        let mut state = State::new(0, Settings { prefetch: 2, ..SETTINGS });
        state.on_collect(4);
        for (order, batch) in [(5, 'b'), (3, 'a')] {
            assert_eq!(state.requests(), [Request::Batch]);
            state.on_batch(Some(order), batch);
        }
        assert_eq!(state.requests(), [Request::Ticket]);
        assert_eq!(state.on_ticket(), Some(Training { batch: 'a', draw: true }));
        assert_eq!(state.requests(), [], "position 5 belongs to a later step");
        state.on_collect(8);
        assert_eq!(state.requests(), [Request::Ticket]);
    }

    #[test]
    fn a_paused_drafter_withdraws_its_draw_and_trains_what_it_holds() {
        let mut state = State::new(1, Settings { prefetch: 2, ..SETTINGS });
        state.requests();
        state.on_batch(None, 'a');
        state.requests();
        let paused = |drafter| Settings { prefetch: 2, paused: vec![drafter], ..SETTINGS };
        assert!(!state.reconfigure(paused(0)), "another drafter is paused");
        assert!(state.reconfigure(paused(1)));
        state.on_withdrawn();
        assert!(!state.reconfigure(paused(1)), "no draw is pending");
        assert_eq!(state.on_ticket(), Some(Training { batch: 'a', draw: false }));
        assert_eq!(state.requests(), []);
        state.reconfigure(SETTINGS);
        assert_eq!(state.requests(), [Request::Batch]);
    }

    #[test]
    fn a_ticket_without_a_batch_goes_back() {
        assert_eq!(State::<char>::new(0, SETTINGS).on_ticket(), None);
    }

    #[test]
    fn a_returned_batch_is_drawn_once_more_even_with_a_full_buffer() {
        let mut state = State::new(0, SETTINGS);
        state.requests();
        state.on_batch(Some(7), 'b');
        assert_eq!(state.requests(), []);
        assert_eq!(state.on_failure(job(0), 1, &failed(), Some(())), Recovery::ReturnBatch(()));
        assert_eq!(state.requests(), [Request::Batch]);
        state.on_batch(Some(2), 'a');
        assert_eq!(state.requests(), [], "once");
    }

    #[test]
    fn a_failure_returns_the_batch_skips_the_job_or_ends_the_run() {
        let mut state = State::<char>::new(0, SETTINGS);
        assert_eq!(state.on_failure(job(0), 2, &failed(), Some(())), Recovery::ReturnBatch(()));
        let skips = |recovery| matches!(recovery, Recovery::SkipJob { cause, .. } if cause == "drafter_failed");
        assert!(skips(state.on_failure(job(0), 3, &failed(), Some(()))), "the same job is no new evidence");
        let fault = Recovery::Fault("2 batches failed in a row; last error: no".into());
        assert_eq!(state.on_failure(job(1), 1, &failed(), Some(())), fault);
        assert_eq!(state.on_report(job(2), &MicroReport::default()), Ok(()));
        let Recovery::SkipJob { cause, reason } = state.on_failure(job(3), 1, &failed(), None::<()>) else {
            panic!("without features there is nothing to return")
        };
        assert_eq!((cause, reason.contains("lost its hidden states")), ("features_lost", true));
        let lost = EngineError::Lost("off the bus".into());
        assert!(matches!(state.on_failure(job(3), 1, &lost, Some(())), Recovery::Fault(_)));
        for loss_numerator in [f64::NAN, f64::INFINITY] {
            let report = MicroReport { loss_numerator, ..MicroReport::default() };
            assert!(state.on_report(job(4), &report).is_err_and(|message| message.contains("the loss of job 0/4 is")));
        }
    }
}
