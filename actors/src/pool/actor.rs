//! Pool actor: holds features between targets and drafters within limits on bytes and batches.
//!
//! In: reservations (before a forward), features (moved), draws. Out: grants and checked-out batches.
//!
//! A reservation waits until enough bytes are free. A draw waits until `min_ready` batches are ready, or the pool
//! drains. The bytes of a batch count from its reservation until its drafter is done with it. A drafter that fails
//! returns its batch, so "no more" is answered only when nothing is checked out. On `Shutdown::stop` the pool answers
//! every draw with "no more". On `Shutdown::drain` it gives out its batches once the dispatcher reports that all have
//! arrived.
//!
//! Invariants: L1, L2, L3.

use super::messages::{
    Batch, BytePermit, CheckedOutBatch, Inbox, Msg, PlanNotice, PlanNoticeInbox, RETURNS, Reservation, Return, TooLarge,
};
use super::{
    state::{Action, Entry, RequestId, Settings, State},
    stats::{Depths, Series, Stats, cause},
};
use crate::runtime::{
    fault::{Fault, Shutdown},
    meter::Meter,
    metrics as m,
    util::changed,
};
use metrics::gauge;
use std::collections::BTreeMap;
use tokio::{
    sync::{
        mpsc::{self, OwnedPermit},
        oneshot, watch,
    },
    time::Instant,
};

struct Pool<F> {
    state: State<Batch<F>>,
    slots: mpsc::Sender<Return<F>>,
    reserving: BTreeMap<RequestId, oneshot::Sender<Result<Reservation<F>, TooLarge>>>,
    drawing: BTreeMap<RequestId, oneshot::Sender<Option<CheckedOutBatch<F>>>>,
    drained: Vec<oneshot::Sender<()>>,
    stats: Stats,
    depths: Depths,
    series: Series,
}

/// Runs until every sender of requests is gone. Changed `settings` apply at once, to waiting requests too.
///
/// # Errors
///
/// Fails if the run is aborted, or if more batches are in flight than the pool has slots.
pub async fn run<F: Send + 'static>(
    mut settings: watch::Receiver<Settings>,
    mut inbox: Inbox<F>,
    mut notices: PlanNoticeInbox,
    shutdown: Shutdown,
) -> Result<Stats, Fault> {
    let first = *settings.borrow_and_update();
    show(&first);
    let mut pool = Pool {
        state: State::new(first),
        slots: inbox.slots,
        reserving: BTreeMap::new(),
        drawing: BTreeMap::new(),
        drained: Vec::new(),
        stats: Stats::default(),
        depths: Depths::new(Instant::now()),
        series: Series::new(),
    };
    let mut requests: RequestId = 0;
    let (mut closing, mut stopping) = (false, false);
    let mut meter = Meter::new("pool", 0);
    loop {
        let actions = tokio::select! {
            // Notices and returns come first: free bytes serve the oldest request.
            biased;
            never = meter.rest(cause(pool.state.waiting())) => match never {},
            () = shutdown.abort.cancelled() => return Err(Fault::aborted("pool")),
            () = shutdown.stop.cancelled(), if !stopping => {
                stopping = true;
                pool.state.on_stop()
            }
            () = shutdown.drain.cancelled(), if !closing => {
                closing = true;
                pool.state.on_close()
            }
            Some(notice) = notices.notices.recv() => match notice {
                PlanNotice::Epoch { epoch, open_of_bucket, ended } => pool.state.on_epoch(epoch, &open_of_bucket, ended),
                PlanNotice::Skipped(job) => pool.state.on_skipped(job),
            },
            () = changed(&mut settings) => {
                let new = *settings.borrow_and_update();
                show(&new);
                pool.state.reconfigure(new)
            }
            Some(back) = inbox.returns.recv() => pool.on_return(back),
            msg = inbox.inbox.recv() => {
                requests += 1;
                match msg {
                    Some(Msg::Reserve { bytes, reply }) => {
                        pool.reserving.insert(requests, reply);
                        pool.state.on_reserve(requests, bytes)
                    }
                    Some(Msg::Draw { reply }) => {
                        pool.drawing.insert(requests, reply);
                        pool.state.on_draw(requests)
                    }
                    Some(Msg::Drain { last, late, done }) => {
                        pool.drained.extend(done);
                        let mut actions = pool.forget_waiting();
                        // Batches that were moved in before the drain request was sent are already in this channel.
                        while let Ok(back) = inbox.returns.try_recv() {
                            actions.extend(pool.on_return(back));
                        }
                        actions.extend(pool.state.on_drain(last, late));
                        actions
                    }
                    None => break,
                }
            }
        };
        pool.apply(actions)?;
        pool.observe();
        let passed = pool.state.passed();
        notices.passed.send_if_modified(|seen| std::mem::replace(seen, passed) != passed);
    }
    let Pool { stats, depths, .. } = pool;
    Ok(Stats { ready_p50: depths.percentile(50), ready_p95: depths.percentile(95), ..stats })
}

/// Publishes the active limits as metrics.
fn show(settings: &Settings) {
    gauge!(m::POOL_MAX_BYTES).set(settings.max_bytes as f64);
    gauge!(m::POOL_MAX_BATCHES).set(settings.max_batches as f64);
    gauge!(m::POOL_MIN_READY).set(settings.min_ready as f64);
}

impl<F> Pool<F> {
    fn on_return(&mut self, back: Return<F>) -> Vec<Action<Batch<F>>> {
        match back {
            Return::Filled { bytes, batch } => {
                let (job, bucket) = (batch.job.id(), batch.job.spec.bucket);
                self.state.on_filled(job, bucket, bytes, batch)
            }
            Return::Cancelled { bytes } => self.state.on_cancelled(bytes),
            Return::Done { bytes } => self.state.on_done(bytes),
            Return::Returned(entry) => self.state.on_returned(entry),
        }
    }

    /// Drops the requests of targets that ended before their bytes were granted.
    fn forget_waiting(&mut self) -> Vec<Action<Batch<F>>> {
        let gone: Vec<_> = self.reserving.extract_if(.., |_, reply| reply.is_closed()).map(|(id, _)| id).collect();
        self.state.on_withdrawn(&gone)
    }

    fn apply(&mut self, actions: Vec<Action<Batch<F>>>) -> Result<(), Fault> {
        let mut actions: std::collections::VecDeque<_> = actions.into();
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Grant { request, bytes } => {
                    let reservation = Reservation { bytes, slot: Some(self.slot()?) };
                    // If the target is gone, the dropped reservation returns its bytes.
                    if let Some(reply) = self.reserving.remove(&request) {
                        let _ = reply.send(Ok(reservation));
                    }
                }
                Action::Refuse { request, bytes, max_bytes } => {
                    if let Some(reply) = self.reserving.remove(&request) {
                        let _ = reply.send(Err(TooLarge { bytes, max_bytes }));
                    }
                }
                Action::Give { request, entry } => {
                    let Entry { bucket, bytes, position, returned, batch, .. } = entry;
                    let checked_out = CheckedOutBatch {
                        batch,
                        position,
                        permit: BytePermit { bytes, position, slot: Some(self.slot()?) },
                    };
                    let undelivered = match self.drawing.remove(&request) {
                        Some(reply) => reply.send(Some(checked_out)).err().flatten(),
                        None => Some(checked_out),
                    };
                    match undelivered {
                        None => {
                            self.series.bucket(usize::from(bucket)).draws.increment(1);
                            actions.extend(self.state.on_delivered());
                        }
                        Some(CheckedOutBatch { batch, mut permit, .. }) => {
                            permit.slot = None;
                            actions.extend(self.state.on_undelivered(permit.entry(batch, returned)));
                        }
                    }
                }
                Action::NoMore { request } => {
                    if let Some(reply) = self.drawing.remove(&request) {
                        let _ = reply.send(None);
                    }
                }
                Action::Drained => {
                    for done in self.drained.drain(..) {
                        let _ = done.send(());
                    }
                }
            }
        }
        Ok(())
    }

    fn slot(&self) -> Result<OwnedPermit<Return<F>>, Fault> {
        self.slots.clone().try_reserve_owned().map_err(|_| {
            Fault::new(
                "pool",
                format!("more than {RETURNS} batches are in flight; lower pool.max_batches or drafter.prefetch"),
            )
        })
    }

    fn observe(&mut self) {
        let occupancy = self.state.occupancy();
        self.series.batches.set(occupancy.ready_batches as f64);
        self.series.reserved_batches.set(occupancy.reserved_batches as f64);
        self.series.checked_out_batches.set((occupancy.checked_out_batches + occupancy.leaving_batches) as f64);
        self.series.bytes.set(occupancy.ready_bytes as f64);
        self.series.reserved_bytes.set(occupancy.reserved_bytes as f64);
        self.series.checked_out_bytes.set(occupancy.checked_out_bytes as f64);
        self.series.draining.set(f64::from(u8::from(self.state.is_draining())));
        for (bucket, depth) in self.state.depths().enumerate() {
            self.series.bucket(bucket).batches.set(depth as f64);
        }
        self.stats.peak_bytes = self.stats.peak_bytes.max(occupancy.bytes());
        self.stats.peak_batches = self.stats.peak_batches.max(occupancy.batches());
        self.depths.observe(Instant::now(), occupancy.ready_batches);
    }
}
