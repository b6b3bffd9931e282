//! A target pulls a job, reserves its exact bytes in the pool, runs the forward, checks the result, and moves it into the pool.
//!
//! In: leases that it pulls. Out: features, moved. When the pool is full it waits before the forward, so it never holds
//! features that have no room. It ends when the dispatcher has no more jobs. A result that is not what was expected (rows,
//! taps, width, dtype, not finite) never enters the pool: the job goes back. A target that panics, is lost or keeps failing
//! is taken out, restarted with a growing pause, and serves again when it answers; after `max_restarts` in vain it is gone.
//! Invariants: D2, L1.

use crate::{
    ask::{caught, changed},
    dispatcher::{self, Failure, Lease},
    engine::{EngineError, FeatureShape, Features, TargetEngine},
    fault::{Fault, Gone, Stops},
    meter::{Cause, Meter, Totals},
    metrics as m,
    pool::{self, Reservation},
};
use metrics::{Counter, counter, gauge};
use std::time::Duration;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

/// Pauses between restarts double up to this many times the first one.
const LONGEST_PAUSE: u32 = 64;

/// What shapes a target's work.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Failures in a row after which a target is taken out: it is broken, not its jobs.
    pub max_failures_in_a_row: u32,
    /// Restarts without a good result between them after which a target is gone for good.
    pub max_restarts: u32,
    /// Pause before the first restart; each further one doubles it.
    pub restart_pause: Duration,
}

/// What a target did.
#[derive(Clone, Debug, Default)]
pub struct Work {
    pub totals: Totals,
    pub jobs: u64,
    pub tokens: u64,
    pub padded_tokens: u64,
    pub restarts: u64,
    /// Why it is gone for good, where it is.
    pub gone: Option<String>,
}

/// Every decision of a target, without waiting for anything.
#[derive(Debug)]
pub struct State {
    settings: Settings,
    failures_in_a_row: u32,
    restarts_in_a_row: u32,
    first_cause: Option<String>,
}

/// What a target that was taken out does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovery {
    RestartAfter(Duration),
    /// Nothing helps: why it was taken out first.
    GiveUp(String),
}

impl State {
    pub fn new(settings: Settings) -> Self {
        Self { settings, failures_in_a_row: 0, restarts_in_a_row: 0, first_cause: None }
    }

    /// Judges what the engine gave for a batch.
    pub fn judge<F: Features>(
        expected: FeatureShape,
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
            return Err((
                Failure::NonFinite,
                "the hidden states, or what the target says, have a value that is NaN or infinite".into(),
            ));
        }
        Ok(features)
    }

    /// A good result: whatever was wrong is over.
    pub fn on_success(&mut self) {
        (self.failures_in_a_row, self.restarts_in_a_row, self.first_cause) = (0, 0, None);
    }

    /// A failure; `lost` when the engine cannot go on. True when the target must be taken out.
    pub fn on_failure(&mut self, message: &str, lost: bool) -> bool {
        self.failures_in_a_row += 1;
        let out = lost || self.failures_in_a_row >= self.settings.max_failures_in_a_row;
        if out {
            let n = self.failures_in_a_row;
            let cause = if lost {
                message.into()
            } else {
                format!("{n} jobs failed in a row, the last one because: {message}")
            };
            self.first_cause.get_or_insert(cause);
        }
        out
    }

    /// Other settings, in force from the next failure or restart on.
    pub fn reconfigure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// What to do while it is out.
    pub fn recover(&mut self) -> Recovery {
        let Settings { max_restarts, max_failures_in_a_row, .. } = self.settings;
        if self.restarts_in_a_row >= max_restarts {
            let cause = self.first_cause.clone().unwrap_or_default();
            return Recovery::GiveUp(format!("{cause} (it was restarted {max_restarts} times in vain)"));
        }
        self.restarts_in_a_row += 1;
        // On probation: the next failure takes it out again, before it spoils more jobs.
        self.failures_in_a_row = max_failures_in_a_row.saturating_sub(1);
        Recovery::RestartAfter(self.pause())
    }

    /// The pause before the restart that comes next, after `recover` asked for one.
    pub fn pause(&self) -> Duration {
        let doubled = 1 << self.restarts_in_a_row.saturating_sub(1).min(LONGEST_PAUSE.ilog2());
        self.settings.restart_pause.saturating_mul(doubled)
    }
}

/// Runs until there are no more jobs, or the target is gone for good: `Work::gone` says so.
pub async fn run<E: TargetEngine>(
    index: usize,
    mut settings: watch::Receiver<Settings>,
    engine: E,
    jobs: dispatcher::Handle,
    pool: pool::Handle<E::Features>,
    stops: Stops,
) -> Result<Work, Fault> {
    let label = index.to_string();
    let first = *settings.borrow_and_update();
    let mut target = Target {
        index,
        name: format!("target {index}"),
        state: State::new(first),
        settings,
        engine,
        jobs,
        pool,
        meter: Meter::new("target", index),
        delivered: counter!(m::TARGET_JOBS, "index" => label.clone()),
        failures: counter!(m::TARGET_FAILURES, "index" => label.clone()),
        tokens: counter!(m::TARGET_TOKENS, "index" => label.clone()),
        padded_tokens: counter!(m::TARGET_PADDED_TOKENS, "index" => label),
        work: Work::default(),
    };
    let ended = stops.abort.run_until_cancelled(target.live(&stops)).await;
    ended.unwrap_or_else(|| Err(Fault::aborted(target.name.clone())))?;
    Ok(Work { totals: target.meter.totals(), ..target.work })
}

struct Target<E: TargetEngine> {
    index: usize,
    name: String,
    state: State,
    settings: watch::Receiver<Settings>,
    engine: E,
    jobs: dispatcher::Handle,
    pool: pool::Handle<E::Features>,
    meter: Meter,
    delivered: Counter,
    failures: Counter,
    tokens: Counter,
    padded_tokens: Counter,
    work: Work,
}

/// Why a target serves no more.
enum Served {
    NoMoreJobs,
    TakenOut,
}

impl<E: TargetEngine> Target<E> {
    async fn live(&mut self, stops: &Stops) -> Result<(), Fault> {
        loop {
            self.set_up(true);
            let served = self.serve(stops).await?;
            self.set_up(false);
            match served {
                Served::NoMoreJobs => return Ok(()),
                Served::TakenOut => {
                    let back = stops.close.run_until_cancelled(self.come_back()).await;
                    if back != Some(true) {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn serve(&mut self, stops: &Stops) -> Result<Served, Fault> {
        loop {
            let lease = self.meter.wait(Cause::Job, self.jobs.pull(self.index)).await;
            let Some(lease) = lease.map_err(|g| self.gone(g))? else { return Ok(Served::NoMoreJobs) };
            let batch = lease.batch().clone();
            let bytes = self.engine.feature_bytes(&batch);
            let room = self.meter.wait(Cause::Room, stops.close.run_until_cancelled(self.pool.reserve(bytes))).await;
            let Some(room) = room else {
                lease.unused();
                return Ok(Served::NoMoreJobs);
            };
            let room = match room.map_err(|g| self.gone(g))? {
                Ok(room) => room,
                Err(too_large) => {
                    lease.fail(Failure::Failed, too_large.to_string());
                    continue;
                }
            };
            self.jobs.started(&lease).await.map_err(|g| self.gone(g))?;
            let expected = self.engine.expected_shape(&batch);
            let result = self.meter.busy(caught(self.engine.extract(batch.clone()))).await;
            let result = result.unwrap_or_else(|panic| Err(EngineError::Lost(panic)));
            let lost = matches!(result, Err(EngineError::Lost(_)));
            match State::judge(expected, bytes, result) {
                Ok(features) => {
                    self.state.on_success();
                    let (tokens, slots) = (batch.tokens(), (batch.rows * batch.width) as u64);
                    if self.deliver(lease, room, features).await? {
                        self.work.jobs += 1;
                        self.work.tokens += tokens;
                        self.work.padded_tokens += slots;
                        self.delivered.increment(1);
                        self.tokens.increment(tokens);
                        self.padded_tokens.increment(slots);
                    }
                }
                Err((failure, message)) => {
                    drop(room);
                    self.failures.increment(1);
                    self.state.reconfigure(*self.settings.borrow_and_update());
                    tracing::warn!(target_index = self.index, job = %lease.job(), why = message, "extraction failed");
                    let out = self.state.on_failure(&message, lost);
                    lease.fail(failure, message);
                    if out {
                        return Ok(Served::TakenOut);
                    }
                }
            }
        }
    }

    /// Moves features into the pool; false when another target was first.
    async fn deliver(
        &mut self,
        lease: Lease,
        room: Reservation<E::Features>,
        features: E::Features,
    ) -> Result<bool, Fault> {
        match self.jobs.claim(&lease).await.map_err(|g| self.gone(g))? {
            Some(job) => lease.deliver(job, room, features),
            None => {
                drop((features, room));
                lease.late();
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Restarts until the engine answers. False when it is gone for good.
    async fn come_back(&mut self) -> bool {
        loop {
            self.state.reconfigure(*self.settings.borrow_and_update());
            match self.state.recover() {
                Recovery::RestartAfter(pause) => {
                    tracing::warn!(target_index = self.index, ?pause, "the target is taken out and will be restarted");
                    self.rest().await;
                    let restarted = self.meter.wait(Cause::Out, caught(self.engine.restart())).await;
                    match restarted.unwrap_or_else(|panic| Err(EngineError::Lost(panic))) {
                        Ok(()) => {
                            self.work.restarts += 1;
                            counter!(m::TARGET_RESTARTS, "index" => self.index.to_string()).increment(1);
                            tracing::info!(target_index = self.index, "the target answers again");
                            return true;
                        }
                        Err(error) => tracing::warn!(target_index = self.index, %error, "the restart failed"),
                    }
                }
                Recovery::GiveUp(cause) => {
                    tracing::error!(target_index = self.index, cause, "the target is gone for good");
                    self.work.gone = Some(cause);
                    return false;
                }
            }
        }
    }

    /// Waits for the pause before a restart, as long as the settings say at present.
    async fn rest(&mut self) {
        let Self { meter, state, settings, .. } = self;
        let begun = Instant::now();
        let rest = async {
            loop {
                tokio::select! {
                    () = sleep_until(begun + state.pause()) => return,
                    () = changed(settings) => state.reconfigure(*settings.borrow_and_update()),
                }
            }
        };
        meter.wait(Cause::Out, rest).await;
    }

    fn set_up(&self, up: bool) {
        gauge!(m::TARGET_UP, "index" => self.index.to_string()).set(f64::from(u8::from(up)));
    }

    fn gone(&self, gone: Gone) -> Fault {
        Fault::gone(self.name.clone(), gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::FeatureDtype, sim::SimFeatures};

    const EXPECTED: FeatureShape = FeatureShape { tokens: 7, taps: 3, width: 16, dtype: FeatureDtype::Bf16 };

    fn judge(shape: FeatureShape, bytes: u64, finite: bool) -> Result<(), Failure> {
        let judged = State::judge(EXPECTED, 672, Ok(SimFeatures { shape, bytes, finite }));
        judged.map(|_| ()).map_err(|(failure, _)| failure)
    }

    #[test]
    fn only_what_was_expected_may_enter_the_pool() {
        assert_eq!(judge(EXPECTED, 672, true), Ok(()));
        let wrong = [
            FeatureShape { tokens: 6, ..EXPECTED },
            FeatureShape { taps: 2, ..EXPECTED },
            FeatureShape { width: 8, ..EXPECTED },
            FeatureShape { dtype: FeatureDtype::F32, ..EXPECTED },
        ];
        for shape in wrong {
            assert_eq!(judge(shape, 672, true), Err(Failure::WrongShape), "{shape:?}");
        }
        assert_eq!(judge(EXPECTED, 673, true), Err(Failure::WrongShape), "more bytes than were reserved");
        assert_eq!(judge(EXPECTED, 672, false), Err(Failure::NonFinite));
        let failed = State::judge::<SimFeatures>(EXPECTED, 672, Err(EngineError::Failed("no".into())));
        assert_eq!(failed.map(|_| ()), Err((Failure::Failed, "no".into())));
    }

    #[test]
    fn a_broken_target_is_restarted_with_growing_pauses_and_then_given_up() {
        let second = Duration::from_secs(1);
        let settings = Settings { max_failures_in_a_row: 3, max_restarts: 9, restart_pause: second };
        let mut state = State::new(settings);
        assert!(!state.on_failure("a", false) && !state.on_failure("b", false));
        state.on_success();
        assert!(!state.on_failure("c", false) && !state.on_failure("d", false), "in a row, not in all");
        assert!(state.on_failure("e", false));
        for doubled in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            assert_eq!(state.recover(), Recovery::RestartAfter(second * doubled));
        }
        let Recovery::GiveUp(cause) = state.recover() else { panic!("nine restarts are enough") };
        assert!(cause.contains("3 jobs failed in a row, the last one because: e"), "{cause}");
        assert!(State::new(settings).on_failure("the device is gone", true), "lost at once");
    }

    #[test]
    fn a_target_is_on_probation_after_a_restart_and_its_first_cause_stays_until_a_job_goes_well() {
        let pause = Duration::from_secs(1);
        let mut state = State::new(Settings { max_failures_in_a_row: 3, max_restarts: 1, restart_pause: pause });
        assert!(state.on_failure("the first", true));
        state.recover();
        assert!(state.on_failure("the second", false), "the next failure takes it out again");
        let Recovery::GiveUp(cause) = state.recover() else { panic!("one restart is enough") };
        assert!(cause.contains("the first") && !cause.contains("the second"), "{cause}");
        state.on_success();
        assert!(!state.on_failure("a", false) && state.on_failure("the third", true));
        state.recover();
        let Recovery::GiveUp(cause) = state.recover() else { panic!("one restart is enough") };
        assert!(cause.contains("the third"), "what was wrong before is over: {cause}");
    }
}
