//! Target actor: pulls a job, reserves its exact bytes in the pool, runs the forward, checks the result, and moves it
//! into the pool.
//!
//! In: leases that it pulls. Out: features, moved.
//!
//! The target waits for bytes before the forward, so it never holds features without a reservation. It ends when the
//! dispatcher has no more jobs. An unexpected result (rows, taps, width, dtype, not finite) never enters the pool: the
//! job returns to the dispatcher. A target that panics, is lost or keeps failing goes out of service and is restarted
//! with growing pauses. After `max_restarts` failed restarts it is out of service permanently.
//!
//! Invariants: D2, L1.

use super::state::{Recovery, Settings, State};
use crate::{
    dispatcher::{self, Failure, Lease},
    messages::engine::{EngineError, TargetEngine},
    pool::{self, Reservation},
    runtime::{
        causes::Cause,
        fault::{Fault, Gone, Shutdown},
        meter::{Meter, Totals},
        metrics as m,
        util::{caught, changed},
    },
};
use metrics::{Counter, counter, gauge};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

/// Statistics of a target.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub totals: Totals,
    pub jobs: u64,
    pub tokens: u64,
    pub padded_tokens: u64,
    pub restarts: u64,
    /// Cause of a permanent failure.
    pub gone: Option<String>,
}

/// Runs until there are no more jobs, or the target has failed permanently, which `Stats::gone` reports.
///
/// # Errors
///
/// Fails if the dispatcher or the pool is gone, or the run is aborted.
pub async fn run<E: TargetEngine>(
    index: usize,
    mut settings: watch::Receiver<Settings>,
    engine: E,
    jobs: dispatcher::Handle,
    pool: pool::Handle<E::Features>,
    shutdown: Shutdown,
) -> Result<Stats, Fault> {
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
        stats: Stats::default(),
    };
    let ended = shutdown.abort.run_until_cancelled(target.live(&shutdown)).await;
    ended.unwrap_or_else(|| Err(Fault::aborted(target.name.clone())))?;
    Ok(Stats { totals: target.meter.totals(), ..target.stats })
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
    stats: Stats,
}

/// Reason why a target stops serving.
enum ServeEnd {
    NoMoreJobs,
    Down,
}

impl<E: TargetEngine> Target<E> {
    async fn live(&mut self, shutdown: &Shutdown) -> Result<(), Fault> {
        loop {
            self.report_up(true);
            let served = self.serve(shutdown).await?;
            self.report_up(false);
            match served {
                ServeEnd::NoMoreJobs => return Ok(()),
                ServeEnd::Down => {
                    let back = shutdown.drain.run_until_cancelled(self.recover()).await;
                    if back != Some(true) {
                        return Ok(());
                    }
                }
            }
        }
    }

    async fn serve(&mut self, shutdown: &Shutdown) -> Result<ServeEnd, Fault> {
        loop {
            let lease = self.meter.wait(Cause::Job, self.jobs.pull(self.index)).await;
            let Some(lease) = lease.map_err(|g| self.gone(g))? else { return Ok(ServeEnd::NoMoreJobs) };
            let batch = lease.batch().clone();
            let bytes = self.engine.feature_bytes(&batch);
            let reservation =
                self.meter.wait(Cause::PoolFull, shutdown.drain.run_until_cancelled(self.pool.reserve(bytes))).await;
            let Some(reservation) = reservation else {
                lease.unused();
                return Ok(ServeEnd::NoMoreJobs);
            };
            let reservation = match reservation.map_err(|g| self.gone(g))? {
                Ok(reservation) => reservation,
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
                    if self.deliver(lease, reservation, features).await? {
                        self.stats.jobs += 1;
                        self.stats.tokens += tokens;
                        self.stats.padded_tokens += slots;
                        self.delivered.increment(1);
                        self.tokens.increment(tokens);
                        self.padded_tokens.increment(slots);
                    }
                }
                Err((failure, message)) => {
                    drop(reservation);
                    self.failures.increment(1);
                    self.state.reconfigure(*self.settings.borrow_and_update());
                    tracing::warn!(target_index = self.index, job = %lease.job(), reason = message, "extraction failed");
                    let out = self.state.on_failure(&message, lost);
                    lease.fail(failure, message);
                    if out {
                        return Ok(ServeEnd::Down);
                    }
                }
            }
        }
    }

    /// Moves features into the pool. Returns false if another target was first.
    async fn deliver(
        &mut self,
        lease: Lease,
        reservation: Reservation<E::Features>,
        features: E::Features,
    ) -> Result<bool, Fault> {
        match self.jobs.claim(&lease).await.map_err(|g| self.gone(g))? {
            Some(job) => lease.deliver(job, reservation, features),
            None => {
                drop((features, reservation));
                lease.late();
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Restarts the engine until it responds. Returns false after a permanent failure.
    async fn recover(&mut self) -> bool {
        loop {
            self.state.reconfigure(*self.settings.borrow_and_update());
            match self.state.recover() {
                Recovery::RestartAfter(pause) => {
                    tracing::warn!(target_index = self.index, ?pause, "target out of service");
                    self.pause().await;
                    let restarted = self.meter.wait(Cause::Down, caught(self.engine.restart())).await;
                    match restarted.unwrap_or_else(|panic| Err(EngineError::Lost(panic))) {
                        Ok(()) => {
                            self.stats.restarts += 1;
                            counter!(m::TARGET_RESTARTS, "index" => self.index.to_string()).increment(1);
                            tracing::info!(target_index = self.index, "target back in service");
                            return true;
                        }
                        Err(error) => tracing::warn!(target_index = self.index, %error, "restart failed"),
                    }
                }
                Recovery::GiveUp(cause) => {
                    tracing::error!(target_index = self.index, cause, "target failed permanently");
                    self.stats.gone = Some(cause);
                    return false;
                }
            }
        }
    }

    /// Waits for the pause before a restart; changed settings apply at once.
    async fn pause(&mut self) {
        let Self { meter, state, settings, .. } = self;
        let begun = Instant::now();
        let pause = async {
            loop {
                tokio::select! {
                    () = sleep_until(begun + state.pause()) => return,
                    () = changed(settings) => state.reconfigure(*settings.borrow_and_update()),
                }
            }
        };
        meter.wait(Cause::Down, pause).await;
    }

    fn report_up(&self, up: bool) {
        gauge!(m::TARGET_UP, "index" => self.index.to_string()).set(f64::from(u8::from(up)));
    }

    fn gone(&self, gone: Gone) -> Fault {
        Fault::gone(self.name.clone(), gone)
    }
}
