//! Soak test: hours of virtual time with reloads, pauses, checkpoints and every kind of fault mixed in. No job is lost,
//! and at the end the run holds no more memory and tasks than at the beginning.

use crate::{
    control::any_settings,
    world::{Breakage, Outcomes, World, Wrong},
};
use draftmill_actors::{
    messages::types::{JobId, Outcome},
    pipeline::{ControlHandle, Settings},
    planner::{
        ledger::{Ledger, Note},
        plan::Plan,
    },
    simulated::CostModel,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    hash::{BuildHasher, Hasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::oneshot, time::sleep};

/// Allocator that counts the bytes of its thread: a pipeline under paused time has one thread.
struct Counting;

thread_local! {
    static HELD: Cell<i64> = const { Cell::new(0) };
}

fn add(bytes: i64) {
    // At the very end of a thread the counter no longer exists.
    let _ = HELD.try_with(|held| held.set(held.get() + bytes));
}

// SAFETY: the system's allocator does the work; only a counter of the thread, which allocates nothing, is added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as i64);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        add(-(layout.size() as i64));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Ledger that only counts, so that it needs no memory.
#[derive(Debug, Default)]
struct Tally {
    epochs: u64,
    trained: u64,
    skipped: u64,
    checkpoints: u64,
}

impl Ledger for Tally {
    const BLOCKING: bool = false;

    fn begin_epoch(&mut self, plan: &Plan) -> Result<Vec<bool>, String> {
        self.epochs += 1;
        Ok(vec![false; plan.jobs.len()])
    }

    fn record(&mut self, outcomes: &[(JobId, Outcome)]) -> Result<(), String> {
        for (_, outcome) in outcomes {
            match outcome {
                Outcome::Trained { .. } => self.trained += 1,
                Outcome::Skipped { .. } => self.skipped += 1,
            }
        }
        Ok(())
    }

    fn checkpoint(&mut self, _: u64, _: &str) -> Result<(), String> {
        self.checkpoints += 1;
        Ok(())
    }

    fn note(&mut self, _: &Note) -> Result<(), String> {
        Ok(())
    }
}

/// Sample of one moment.
#[derive(Clone, Copy, Debug)]
struct Look {
    bytes: i64,
    tasks: usize,
}

impl Look {
    fn now() -> Look {
        Look { bytes: HELD.get(), tasks: Handle::current().metrics().num_alive_tasks() }
    }
}

const HOUR: Duration = Duration::from_secs(3600);
/// Virtual hours; the first one is for settling.
const HOURS: usize = 6;
/// Epochs: many steps per second and failures make the soak; the lengths stay small.
const EPOCHS: u32 = 100_000;

/// Returns a node in which everything fails now and then.
fn node(rng: &mut ChaCha8Rng) -> World {
    let mut every =
        |from, to, wrong| Breakage { every: Some((rng.random_range(from..to), wrong)), ..Breakage::default() };
    let targets = vec![
        every(20, 60, Wrong::QuietPanic),
        every(5, 20, Wrong::Fail),
        every(20, 60, Wrong::Lose),
        every(9, 30, Wrong::Nan),
    ];
    let drafters = vec![every(10, 30, Wrong::Fail), every(40, 90, Wrong::LoseFeatures)];
    World {
        targets,
        drafters,
        lengths: (0..120).map(|i| 100 + (i * 37) % 800).collect(),
        costs: CostModel { seconds_per_micro_batch: 2.0, ..World::default().costs },
        epochs: EPOCHS,
        checkpoint_every: 25,
        checkpoint_takes: Duration::from_secs(7),
        bad_checkpoints: (1..40).map(|n| n * 100).collect(),
        max_skip_fraction: 1.0,
        max_restarts: 1_000_000,
        forgetful: true,
        stop_at: Some(HOUR * HOURS as u32),
        ..World::default()
    }
}

/// Reloads, pauses and requests checkpoints at random moments. Once an hour everything rests, and a sample is taken.
fn soak(seed: u64) -> (Outcomes<Tally>, Vec<Look>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let world = node(&mut rng);
    let looks: Arc<[[AtomicI64; 2]]> = (0..HOURS).map(|_| [AtomicI64::new(0), AtomicI64::new(0)]).collect();
    let seen = looks.clone();
    let control = move |handle: ControlHandle, base: Settings| {
        let (mut rng, seen) = (rng.clone(), seen.clone());
        Box::pin(async move {
            for look in seen.iter() {
                let hour = tokio::time::Instant::now();
                while hour.elapsed() < HOUR - Duration::from_secs(600) {
                    sleep(Duration::from_millis(rng.random_range(100..40_000))).await;
                    let mut settings = any_settings(&base, &mut rng, 4);
                    settings.max_restarts = base.max_restarts;
                    handle.change(&settings);
                    if rng.random_range(0..4) == 0 {
                        let (answer, answered) = oneshot::channel();
                        let _ = handle.checkpoint(answer);
                        tokio::spawn(answered);
                    }
                }
                // Paused until nothing is in flight: memory held then is held permanently.
                let mut quiet = base.clone();
                quiet.dispatcher.paused = true;
                quiet.pool.min_ready = 0;
                handle.change(&quiet);
                sleep(Duration::from_secs(500)).await;
                let Look { bytes, tasks } = Look::now();
                look[0].store(bytes, Relaxed);
                look[1].store(tasks as i64, Relaxed);
                handle.change(&base);
            }
            std::future::pending().await
        }) as std::pin::Pin<Box<dyn Future<Output = ()> + Send>>
    };
    let ended = World { control: Some(Arc::new(control)), ..world }.run_with(Tally::default(), 0);
    let looks =
        looks.iter().map(|[bytes, tasks]| Look { bytes: bytes.load(Relaxed), tasks: tasks.load(Relaxed) as usize });
    (ended, looks.collect())
}

#[test]
fn hours_of_reloads_and_faults_end_with_flat_memory_and_no_leaked_task() {
    let again = std::env::var("SOAK_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = again.unwrap_or_else(|| RandomState::new().build_hasher().finish());
    println!("SOAK_SEED={seed}");
    let before = HELD.get();
    let (ended, looks) = soak(seed);
    let report = ended.report();
    println!("{looks:#?} {:?}, {} steps", report.jobs, ended.records.len());
    assert!(
        report.jobs.trained > 2000 && report.targets.iter().all(|target| target.gone.is_none()),
        "{:?}",
        report.jobs
    );
    assert!(report.targets.iter().map(|target| target.restarts).sum::<u64>() > 50, "nothing went wrong");
    assert_eq!(report.jobs.planned, report.jobs.trained + report.jobs.skipped + report.jobs.unfinished);
    let tally = report.ledger.as_ref().unwrap();
    assert_eq!((tally.trained, tally.skipped), (report.jobs.trained, report.jobs.skipped));
    assert!(tally.epochs > 10 && tally.checkpoints > 20 && tally.skipped > 0, "{tally:?}");
    let (first, rest) = looks.split_first().unwrap();
    for look in rest {
        assert_eq!(look.tasks, first.tasks, "a task was leaked: {looks:#?}");
        assert!(look.bytes < first.bytes + 64 * 1024, "memory grows: {looks:#?}");
    }
    drop(ended);
    assert!(HELD.get() < before + 64 * 1024, "{} bytes are left of a run that is over", HELD.get() - before);
}
