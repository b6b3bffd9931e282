//! Meter: busy and waiting time of one actor, as metrics while it runs and as totals at its end.

use super::{
    causes::{ACTORS, BUSY, Cause},
    metrics::{ACTOR_STATE, BUSY_SECONDS, WAIT_SECONDS},
};
use metrics::{Gauge, Histogram, gauge, histogram};
use serde::Serialize;
use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;

/// Busy and waiting time of one actor.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    pub actor: String,
    pub index: usize,
    pub busy: Duration,
    pub waits: Vec<(Cause, Duration)>,
    /// Time from start to end.
    pub alive: Duration,
}

/// Meter of one actor. The actor's loop owns it; once it is dropped, no state is active.
pub struct Meter {
    totals: Totals,
    born: Instant,
    busy: Histogram,
    waits: Vec<Histogram>,
    /// State gauges, busy first, then the causes: 1 for the current state. The histograms record a state only when it
    /// ends.
    now: Vec<Gauge>,
    /// End of the last [`Rest`].
    woke: Instant,
}

/// Guard of an active state: resets its gauge when the work or the wait ends or is cancelled.
struct ActiveState<'a>(&'a Gauge);

impl<'a> ActiveState<'a> {
    fn new(state: &'a Gauge) -> Self {
        state.set(1.0);
        ActiveState(state)
    }
}

impl Drop for ActiveState<'_> {
    fn drop(&mut self) {
        self.0.set(0.0);
    }
}

impl Meter {
    /// Creates the meter of one of [`ACTORS`]; its series exist from now on.
    pub fn new(actor: &'static str, index: usize) -> Self {
        let causes = ACTORS.iter().find(|(name, _)| *name == actor).map_or(&[][..], |(_, causes)| causes);
        let label = index.to_string();
        let born = Instant::now();
        let states = [BUSY].into_iter().chain(causes.iter().map(|c| c.as_str()));
        Self {
            now: states
                .map(|state| gauge!(ACTOR_STATE, "actor" => actor, "index" => label.clone(), "state" => state))
                .collect(),
            busy: histogram!(BUSY_SECONDS, "actor" => actor, "index" => label.clone()),
            waits: causes
                .iter()
                .map(|c| histogram!(WAIT_SECONDS, "actor" => actor, "index" => label.clone(), "cause" => c.as_str()))
                .collect(),
            totals: Totals {
                actor: actor.to_owned(),
                index,
                waits: causes.iter().map(|&c| (c, Duration::ZERO)).collect(),
                ..Totals::default()
            },
            born,
            woke: born,
        }
    }

    /// Runs work and counts its time as busy.
    pub async fn busy<F: Future>(&mut self, work: F) -> F::Output {
        let start = Instant::now();
        let doing = ActiveState::new(&self.now[0]);
        let out = work.await;
        drop(doing);
        self.worked(start.elapsed());
        out
    }

    /// Runs a wait and counts its time under its cause.
    pub async fn wait<F: Future>(&mut self, cause: Cause, wait: F) -> F::Output {
        let start = Instant::now();
        let index = self.totals.waits.iter().position(|(c, _)| *c == cause);
        let doing = index.map(|i| ActiveState::new(&self.now[i + 1]));
        let out = wait.await;
        drop(doing);
        if let Some(i) = index {
            self.waited(i, start.elapsed());
        }
        out
    }

    /// Returns the first branch of a biased `select!`, for an actor that does all its work between two waits. The
    /// future never completes. Time while the task sleeps counts under `cause`; all other time since the previous rest
    /// counts as busy.
    pub fn rest(&mut self, cause: Cause) -> Rest<'_> {
        let index = self.totals.waits.iter().position(|(c, _)| *c == cause);
        Rest { meter: self, index, since: None }
    }

    fn worked(&mut self, took: Duration) {
        self.totals.busy += took;
        self.busy.record(took.as_secs_f64());
    }

    fn waited(&mut self, index: usize, took: Duration) {
        self.totals.waits[index].1 += took;
        self.waits[index].record(took.as_secs_f64());
    }

    /// Returns the totals up to now.
    pub fn totals(&self) -> Totals {
        Totals { alive: self.born.elapsed(), ..self.totals.clone() }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.now.iter().for_each(|state| state.set(0.0));
    }
}

/// Future of [`Meter::rest`].
pub struct Rest<'a> {
    meter: &'a mut Meter,
    index: Option<usize>,
    since: Option<Instant>,
}

impl Rest<'_> {
    fn doing(&self, index: usize, now: bool) {
        self.meter.now[index].set(f64::from(u8::from(now)));
    }
}

impl Future for Rest<'_> {
    type Output = Infallible;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Infallible> {
        let now = Instant::now();
        match (self.since.replace(now), self.index) {
            (None, _) => {
                let took = now - self.meter.woke;
                self.meter.worked(took);
                self.doing(0, false);
                self.index.iter().for_each(|&i| self.doing(i + 1, true));
            }
            (Some(since), Some(index)) => self.meter.waited(index, now - since),
            (Some(_), None) => {}
        }
        self.meter.woke = now;
        Poll::Pending
    }
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        if self.since.is_some() {
            self.index.iter().for_each(|&i| self.doing(i + 1, false));
            self.doing(0, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{sync::mpsc, time::sleep};

    #[tokio::test(start_paused = true)]
    async fn time_between_sleeps_is_busy_and_each_sleep_has_its_cause() {
        let second = Duration::from_secs(1);
        let (tx, mut rx) = mpsc::channel(4);
        tokio::spawn(async move {
            // The second message finds the actor at work, the third finds it asleep.
            for pause in [3, 1, 10] {
                sleep(pause * second).await;
                tx.send(()).await.unwrap();
            }
            sleep(5 * second).await;
        });
        let mut meter = Meter::new("pool", 0);
        for cause in [Cause::Target, Cause::Idle, Cause::Drafter, Cause::Drafter] {
            tokio::select! {
                biased;
                never = meter.rest(cause) => match never {},
                _ = rx.recv() => {}
            }
            sleep(2 * second).await;
        }
        let totals = meter.totals();
        assert_eq!(
            totals.waits,
            [(Cause::Target, 3 * second), (Cause::Drafter, 10 * second), (Cause::Idle, Duration::ZERO)]
        );
        // The work after the last rest ends only with the next rest.
        assert_eq!((totals.busy, totals.alive), (6 * second, 21 * second));
    }
}
