//! A target pulls a job, reserves its exact bytes in the pool, runs the forward, checks the result, and moves it into the pool.
//!
//! In: leases that it pulls. Out: features, moved. When the pool is full it waits before the forward, so it never holds
//! features that have no room. It ends when the dispatcher has no more jobs. A result that is not what was expected (rows,
//! taps, width, dtype, not finite) never enters the pool: the job goes back. Invariants: D2, L1.

use crate::{
    dispatcher::{self, Failure, Lease},
    engine::{EngineError, Features, TargetEngine},
    fault::{Fault, Stops},
    meter::{Cause, Meter, Totals},
    metrics as m,
    pool::{self, Reservation},
};
use metrics::counter;

/// What shapes a target's work.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub index: usize,
    /// Failures in a row after which the target stops the run: its device is broken, not its jobs.
    pub max_failures_in_a_row: u32,
}

/// What a target did.
#[derive(Clone, Debug, Default)]
pub struct Work {
    pub totals: Totals,
    pub jobs: u64,
    pub tokens: u64,
    pub padded_tokens: u64,
}

/// Every decision of a target, without waiting for anything.
#[derive(Debug, Default)]
pub struct State {
    failures_in_a_row: u32,
}

impl State {
    /// Judges what the engine gave for a batch.
    pub fn judge<F: Features>(
        expected: crate::engine::FeatureShape,
        bytes: u64,
        result: Result<F, EngineError>,
    ) -> Result<F, (Failure, String)> {
        let features = result.map_err(|e| (Failure::Failed, e.to_string()))?;
        let (shape, held) = (features.shape(), features.bytes());
        if shape != expected {
            return Err((Failure::WrongShape, format!("the target gave {shape:?} where {expected:?} was expected")));
        }
        if held != bytes {
            return Err((Failure::WrongShape, format!("the features hold {held} bytes where {bytes} were reserved")));
        }
        if !features.all_finite() {
            return Err((Failure::NonFinite, "the hidden states have a value that is NaN or infinite".into()));
        }
        Ok(features)
    }

    /// Counts a result. `Err` when this target must not go on.
    pub fn on_result(&mut self, failure: Option<&str>, limit: u32) -> Result<(), String> {
        let Some(message) = failure else {
            self.failures_in_a_row = 0;
            return Ok(());
        };
        self.failures_in_a_row += 1;
        if self.failures_in_a_row < limit {
            return Ok(());
        }
        Err(format!("{} jobs failed in a row, the last one because: {message}", self.failures_in_a_row))
    }
}

/// Runs until there are no more jobs.
pub async fn run<E: TargetEngine>(
    settings: Settings,
    mut engine: E,
    jobs: dispatcher::Handle,
    pool: pool::Handle<E::Features>,
    stops: Stops,
) -> Result<Work, Fault> {
    let name = format!("target {}", settings.index);
    let mut work = Work::default();
    let mut meter = Meter::new("target", settings.index, &[Cause::Job, Cause::Room]);
    let ended = stops
        .abort
        .run_until_cancelled(serve(&settings, &name, &mut engine, &jobs, &pool, &stops, &mut meter, &mut work))
        .await;
    work.totals = meter.totals();
    ended.unwrap_or_else(|| Err(Fault::aborted(name))).map(|()| work)
}

#[expect(clippy::too_many_arguments, reason = "the whole of one loop's surroundings")]
async fn serve<E: TargetEngine>(
    settings: &Settings,
    name: &str,
    engine: &mut E,
    jobs: &dispatcher::Handle,
    pool: &pool::Handle<E::Features>,
    stops: &Stops,
    meter: &mut Meter,
    work: &mut Work,
) -> Result<(), Fault> {
    let index = settings.index.to_string();
    let mut state = State::default();
    while let Some(lease) = meter.wait(Cause::Job, jobs.pull(settings.index)).await.map_err(|g| Fault::gone(name, g))? {
        let batch = lease.batch().clone();
        let bytes = engine.feature_bytes(&batch);
        let room = meter.wait(Cause::Room, stops.stop.run_until_cancelled(pool.reserve(bytes))).await;
        let Some(room) = room else { return Ok(()) };
        let reservation = match room.map_err(|g| Fault::gone(name, g))? {
            Ok(reservation) => reservation,
            Err(too_large) => {
                lease.fail(Failure::Failed, too_large.to_string());
                continue;
            }
        };
        let expected = engine.expected_shape(&batch);
        let result = meter.busy(engine.extract(batch.clone())).await;
        let lost = matches!(result, Err(EngineError::Lost(_)));
        let failed = deliver(lease, reservation, State::judge(expected, bytes, result));
        if let Some(message) = &failed {
            tracing::warn!(target_index = settings.index, message, "extraction failed");
        } else {
            work.jobs += 1;
            work.tokens += batch.tokens();
            work.padded_tokens += (batch.rows * batch.width) as u64;
            counter!(m::TARGET_TOKENS, "index" => index.clone()).increment(batch.tokens());
            counter!(m::TARGET_PADDED_TOKENS, "index" => index.clone()).increment((batch.rows * batch.width) as u64);
        }
        let limit = if lost { 1 } else { settings.max_failures_in_a_row };
        state.on_result(failed.as_deref(), limit).map_err(|message| Fault::new(name, message))?;
    }
    Ok(())
}

/// Moves good features into the pool, or gives the job back; then says why.
fn deliver<F>(lease: Lease, room: Reservation<F>, judged: Result<F, (Failure, String)>) -> Option<String> {
    match judged {
        Ok(features) => {
            lease.deliver(room, features);
            None
        }
        Err((failure, message)) => {
            drop(room);
            lease.fail(failure, message.clone());
            Some(message)
        }
    }
}
