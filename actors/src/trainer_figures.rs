//! What the trainer tells of itself: one record a step, and its series.

use crate::metrics as m;
use metrics::{Counter, Gauge, counter, gauge};
use serde::Serialize;

/// One optimizer step, for people and plots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, serde::Deserialize)]
pub struct StepRecord {
    pub step: u64,
    /// Mean loss in nats.
    pub loss: f64,
    /// Share of supervised positions that were right.
    pub accuracy: f64,
    pub learning_rate: f64,
    /// Before clipping.
    pub grad_norm: f64,
    pub micro_batches: u64,
    /// Real context tokens.
    pub tokens: u64,
    pub supervised: u64,
    pub anchors: u64,
    /// Distinct length buckets among the micro-batches.
    pub buckets: u64,
    /// Since the trainer started, in seconds.
    pub seconds: f64,
}

/// The trainer's own series, looked up once.
pub(crate) struct Series {
    pub(crate) step: Gauge,
    loss: Gauge,
    accuracy: Gauge,
    learning_rate: Gauge,
    grad_norm: Gauge,
    correct: Counter,
    supervised: Counter,
}

impl Series {
    pub(crate) fn new() -> Self {
        Self {
            step: gauge!(m::STEP),
            loss: gauge!(m::LOSS),
            accuracy: gauge!(m::ACCURACY),
            learning_rate: gauge!(m::LEARNING_RATE),
            grad_norm: gauge!(m::GRAD_NORM),
            correct: counter!(m::CORRECT),
            supervised: counter!(m::SUPERVISED),
        }
    }

    pub(crate) fn observe(&self, r: &StepRecord) {
        self.step.set(r.step as f64);
        self.loss.set(r.loss);
        self.accuracy.set(r.accuracy);
        self.learning_rate.set(r.learning_rate);
        self.grad_norm.set(r.grad_norm);
        self.correct.increment((r.accuracy * r.supervised as f64).round() as u64);
        self.supervised.increment(r.supervised);
    }
}
