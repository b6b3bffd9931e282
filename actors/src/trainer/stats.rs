//! Statistics of the trainer: one record per step, and its metrics.

use super::messages::Settings;
use crate::runtime::metrics as m;
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use serde::Serialize;

/// Record of one optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, serde::Deserialize)]
pub struct StepRecord {
    pub step: u64,
    /// Mean loss in nats.
    pub loss: f64,
    /// Fraction of supervised positions that were predicted correctly.
    pub accuracy: f64,
    /// Mean leading correct run of a block, in tokens; 0 in logs from before it was measured.
    #[serde(default)]
    pub leading_run: f64,
    /// Fraction of labels among the candidates of a selector, and its gain in tokens of the leading run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidate_recall: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector_gain: Option<f64>,
    pub learning_rate: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    pub micro_batches: u64,
    /// Real context tokens.
    pub tokens: u64,
    pub supervised: u64,
    pub anchors: u64,
    /// Distinct length buckets among the micro-batches.
    pub buckets: u64,
    /// Seconds since the trainer started.
    pub seconds: f64,
}

/// Metrics of the trainer, looked up once.
pub(crate) struct Series {
    step: Gauge,
    steps: Counter,
    step_seconds: Histogram,
    buckets: Gauge,
    loss: Gauge,
    accuracy: Gauge,
    leading_run: Gauge,
    candidate_recall: Gauge,
    selector_gain: Gauge,
    learning_rate: Gauge,
    grad_norm: Gauge,
    max_grad_norm: Gauge,
    correct: Counter,
    supervised: Counter,
    checkpoint_every: Gauge,
    /// End of the previous step, in seconds since the trainer started.
    ended: f64,
}

impl Series {
    pub(crate) fn new() -> Self {
        Self {
            step: gauge!(m::STEP),
            steps: counter!(m::STEPS),
            step_seconds: histogram!(m::STEP_SECONDS),
            buckets: gauge!(m::STEP_BUCKETS),
            loss: gauge!(m::LOSS),
            accuracy: gauge!(m::ACCURACY),
            leading_run: gauge!(m::LEADING_RUN),
            candidate_recall: gauge!(m::CANDIDATE_RECALL),
            selector_gain: gauge!(m::SELECTOR_GAIN),
            learning_rate: gauge!(m::LEARNING_RATE),
            grad_norm: gauge!(m::GRAD_NORM),
            max_grad_norm: gauge!(m::MAX_GRAD_NORM),
            correct: counter!(m::CORRECT),
            supervised: counter!(m::SUPERVISED),
            checkpoint_every: gauge!(m::CHECKPOINT_EVERY),
            ended: 0.0,
        }
    }

    /// Publishes the start of a run, new or resumed.
    pub(crate) fn begin(&self, settings: &Settings) {
        self.step.set(settings.start_step as f64);
        gauge!(m::CHECKPOINT_STEP).set(settings.start_step as f64);
        self.settings(settings);
    }

    /// Publishes a step that is in the weights.
    pub(crate) fn observe(&mut self, r: &StepRecord, settings: &Settings) {
        self.settings(settings);
        self.step.set(r.step as f64);
        self.steps.increment(1);
        self.step_seconds.record(r.seconds - self.ended);
        self.ended = r.seconds;
        self.buckets.set(r.buckets as f64);
        self.loss.set(r.loss);
        self.accuracy.set(r.accuracy);
        self.leading_run.set(r.leading_run);
        self.candidate_recall.set(r.candidate_recall.unwrap_or(0.0));
        self.selector_gain.set(r.selector_gain.unwrap_or(0.0));
        self.learning_rate.set(r.learning_rate);
        self.grad_norm.set(r.grad_norm);
        self.correct.increment((r.accuracy * r.supervised as f64).round() as u64);
        self.supervised.increment(r.supervised);
    }

    fn settings(&self, settings: &Settings) {
        self.max_grad_norm.set(settings.max_grad_norm);
        self.checkpoint_every.set(settings.checkpoint_every as f64);
    }
}
