//! Latency of a draw on the real pool: from the first moment at which a reply is possible to the reply.

use crate::machine::{Failed, Outcome};
use draftmill_actors::{
    messages::{
        job::{Job, Receipt},
        types::{JobId, JobSpec},
    },
    pool::{
        self,
        state::{DrawPolicy, Settings},
    },
    runtime::fault::Shutdown,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{sync::Arc, time::Duration};
use tokio::{
    runtime::Runtime,
    sync::{mpsc, watch},
    time::Instant,
};

const BUCKETS: u16 = 8;
const BYTES: u64 = 1 << 20;
/// Ready batches while draws are measured.
const MIN_READY: usize = 32;

/// Sorted latencies of the draws, in nanoseconds.
pub struct Latencies {
    /// Draws that are sent while a batch is ready.
    pub asked: Vec<u64>,
    /// Draws that wait until their batch is moved in.
    pub filled: Vec<u64>,
}

/// Returns the 99th percentile of the sorted values, in microseconds.
pub fn p99_us(sorted: &[u64]) -> f64 {
    let at = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
    sorted.get(at).map_or(f64::NAN, |&ns| ns as f64 / 1000.0)
}

/// Draws `samples` times in each way. With a `pause` between the draws the workers are asleep each time.
pub fn run(runtime: &Runtime, samples: usize, pause: Option<Duration>) -> Outcome<Latencies> {
    runtime.block_on(async {
        let (mut asked, mut filled) = (Vec::new(), Vec::new());
        // Runs on a worker, as actors do, and not on this thread.
        for (waiting, into) in [(false, &mut asked), (true, &mut filled)] {
            *into = tokio::spawn(measure(samples, pause, waiting)).await.failed("measure draws")??;
            into.sort_unstable();
        }
        Ok(Latencies { asked, filled })
    })
}

async fn measure(samples: usize, pause: Option<Duration>, waiting: bool) -> Outcome<Vec<u64>> {
    let settings = Settings {
        max_bytes: BYTES * 4 * MIN_READY as u64,
        max_batches: 2 * MIN_READY,
        min_ready: MIN_READY,
        draw_policy: DrawPolicy::Proportional,
        replay_window: 1,
        start_step: 0,
        seed: 1,
    };
    let (handle, inbox) = pool::channel::<()>();
    let (course, seen) = pool::plan_notices(&settings);
    course.epoch(0, vec![100; BUCKETS as usize], Arc::from([])).await;
    let shutdown = Shutdown::default();
    let pool = tokio::spawn(pool::run(watch::channel(settings).1, inbox, seen, shutdown.clone()));
    let mut filler = Filler { pool: handle.clone(), rng: ChaCha8Rng::seed_from_u64(1), index: 0 };
    // Either one batch less than a draw needs, or enough.
    for _ in 0..MIN_READY - usize::from(waiting) {
        filler.fill().await?;
    }
    let (wanted, mut wants) = mpsc::channel::<()>(1);
    let (moved_in, mut moves) = mpsc::channel::<Instant>(1);
    let filling = tokio::spawn(async move {
        while wants.recv().await.is_some() {
            moved_in.send(filler.fill().await?).await.failed("tell of a batch")?;
        }
        Ok::<_, String>(())
    });
    let mut times = Vec::with_capacity(samples);
    for _ in 0..samples {
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
        let sent = Instant::now();
        let draw = handle.draw().await.failed("draw")?;
        if waiting {
            // The filler requests a byte permit first, so that the pool has the draw when the batch arrives.
            wanted.send(()).await.failed("fill the pool")?;
        }
        let loan = draw.await.failed("draw")?.ok_or("the pool gave nothing")?;
        let answered = Instant::now();
        drop(loan);
        if !waiting {
            wanted.send(()).await.failed("fill the pool")?;
        }
        // The next draw finds this batch: the pool handles earlier messages first.
        let moved_in = moves.recv().await.ok_or("the pool is filled no more")?;
        let ready = if waiting { moved_in } else { sent };
        times.push(answered.saturating_duration_since(ready).as_nanos() as u64);
    }
    drop(wanted);
    filling.await.failed("fill the pool")??;
    shutdown.abort.cancel();
    // The pool ends as aborted.
    let _ = pool.await.failed("end the pool")?;
    Ok(times)
}

/// Stand-in for a target.
struct Filler {
    pool: pool::Handle<()>,
    rng: ChaCha8Rng,
    index: u32,
}

impl Filler {
    /// Moves a batch of a random bucket into the pool and returns the time.
    async fn fill(&mut self) -> Outcome<Instant> {
        let room = self.pool.reserve(BYTES).await.failed("reserve room")?.failed("reserve room")?;
        let id = JobId { epoch: 0, index: self.index };
        self.index += 1;
        let bucket = self.rng.random_range(0..BUCKETS);
        let spec = JobSpec { id, bucket, samples: vec![id.index], tokens: 1, width: 1 };
        let job = Job { spec, attempts: 0, receipt: Receipt::detached(id) };
        let now = Instant::now();
        room.fill(job, ());
        Ok(now)
    }
}
