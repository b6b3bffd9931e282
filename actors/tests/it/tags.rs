//! Hidden states belong to their job: a drafter gets the features of its job's ids, whatever targets do at the same
//! time. Their copy to the device has been started before it asks for a ticket.

use draftmill_actors::{
    dispatcher,
    messages::{
        engine::{
            DraftEngine, EngineError, FeatureDtype, FeatureShape, Features, MicroFailure, MicroReport, Staging,
            TargetEngine,
        },
        types::{BatchSource, JobId, JobSpec, PaddedBatch},
    },
    pipeline::{self, Parts},
    planner::{
        self,
        buckets::optimal_bounds,
        ledger::MemoryLedger,
        plan::{JobOrder, PlanSettings, plan_epoch},
    },
    pool::{self, DrawPolicy},
    runtime::fault::Shutdown,
    simulated::{CostModel, SimOptimizer},
    trainer,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::mpsc;

/// Pads with each sample's own number as its tokens.
struct Numbered;

impl BatchSource for Numbered {
    fn pad(&self, job: &JobSpec) -> Result<PaddedBatch, String> {
        let width = job.width as usize;
        let ids = job.samples.iter().flat_map(|&s| std::iter::repeat_n(s as i32, width)).collect();
        let lengths = vec![job.width; job.samples.len()];
        Ok(PaddedBatch { rows: lengths.len(), width, lengths, ids, ..PaddedBatch::default() })
    }
}

fn tag(ids: &[i32]) -> u64 {
    ids.iter().fold(7, |tag, &id| (tag ^ id as u64).wrapping_mul(0x0100_0000_01b3).rotate_left(5))
}

struct Tagged {
    tag: u64,
    /// Number of copies to the device that a drafter started.
    copies: u32,
}

const SHAPE: FeatureShape = FeatureShape { tokens: 1, taps: 1, width: 1, dtype: FeatureDtype::F32 };

impl Features for Tagged {
    fn bytes(&self) -> u64 {
        4
    }

    fn shape(&self) -> FeatureShape {
        SHAPE
    }

    fn all_finite(&self) -> bool {
        true
    }
}

/// Target with a different duration for every batch, so that results overtake each other. Sometimes it fails.
struct Tagger {
    slowness: u64,
    done: u64,
}

impl TargetEngine for Tagger {
    type Features = Tagged;

    fn expected_shape(&self, _: &PaddedBatch) -> FeatureShape {
        SHAPE
    }

    fn feature_bytes(&self, _: &PaddedBatch) -> u64 {
        4
    }

    async fn extract(&mut self, batch: Arc<PaddedBatch>) -> Result<Tagged, EngineError> {
        self.done += 1;
        let tag = tag(&batch.ids);
        tokio::time::sleep(Duration::from_millis(tag % 97 * self.slowness)).await;
        match self.done % 5 {
            0 => Err(EngineError::Failed("every fifth".into())),
            _ => Ok(Tagged { tag, copies: 0 }),
        }
    }

    async fn restart(&mut self) -> Result<(), EngineError> {
        Ok(())
    }
}

#[derive(Default)]
struct Seen {
    trained: AtomicU64,
    /// Batches whose copy started while the drafter was working on another one.
    copied_meanwhile: AtomicU64,
}

/// Drafter that compares its features with those that the job's ids must give.
struct Judge {
    tags: Arc<BTreeMap<JobId, u64>>,
    seen: Arc<Seen>,
    millis: u64,
    at_work: Arc<AtomicBool>,
}

impl DraftEngine for Judge {
    type Features = Tagged;
    type Gradient = f64;
    type Weights = f64;

    fn staging(&mut self) -> Staging<Tagged> {
        let (seen, at_work) = (self.seen.clone(), self.at_work.clone());
        Box::new(move |features| {
            features.copies += 1;
            seen.copied_meanwhile.fetch_add(at_work.load(Relaxed).into(), Relaxed);
        })
    }

    async fn micro_batch(&mut self, job: JobId, features: Tagged) -> Result<MicroReport, MicroFailure<Tagged>> {
        assert_eq!(features.tag, self.tags[&job], "job {job} got the hidden states of another");
        assert_eq!(features.copies, 1, "job {job}");
        self.at_work.store(true, Relaxed);
        tokio::time::sleep(Duration::from_millis(self.millis)).await;
        self.at_work.store(false, Relaxed);
        self.seen.trained.fetch_add(1, Relaxed);
        Ok(MicroReport { loss_numerator: 1.0, loss_denominator: 1.0, ..MicroReport::default() })
    }

    async fn take_gradient(&mut self) -> Result<Option<f64>, EngineError> {
        Ok(None)
    }

    async fn load_weights(&mut self, _: f64) -> Result<(), EngineError> {
        Ok(())
    }
}

/// Trains some hundred jobs on drafters that take this number of milliseconds for each.
fn train(millis: u64) -> (u64, Arc<Seen>) {
    let lengths: Arc<[u32]> = (0..500).map(|i| 10 + (i * 37) % 300).collect();
    let plan = PlanSettings { seed: 3, job_tokens: 1000, order: JobOrder::Spread, bounds: optimal_bounds(&lengths, 4) };
    let jobs = plan_epoch(&lengths, &plan, 0).unwrap().jobs;
    let tags: BTreeMap<JobId, u64> = jobs.iter().map(|j| (j.id, tag(&Numbered.pad(j).unwrap().ids))).collect();
    let (tags, seen) = (Arc::new(tags), Arc::<Seen>::default());
    let base = pipeline::Settings::for_test(lengths);
    let settings = pipeline::Settings {
        planner: planner::Settings { plan, ..base.planner },
        dispatcher: dispatcher::Settings {
            queue_jobs: 16,
            pad_ahead: 4,
            max_attempts: 5,
            straggler_factor: 1.5,
            ..base.dispatcher
        },
        pool: pool::Settings { max_bytes: 64, max_batches: 8, draw_policy: DrawPolicy::Uniform, ..base.pool },
        trainer: trainer::Settings { drafters: 3, ..base.trainer },
        prefetch: 2,
        ..base
    };
    let (records, mut recorded) = mpsc::channel(16);
    let costs = CostModel::default();
    let parts = Parts {
        targets: (1..5).map(|slowness| Tagger { slowness, done: 0 }).collect(),
        drafters: (0..3)
            .map(|_| Judge { tags: tags.clone(), seen: seen.clone(), millis, at_work: Arc::default() })
            .collect(),
        optimizer: SimOptimizer::new(costs, 0.0),
        source: Arc::new(Numbered),
        ledger: MemoryLedger::default(),
        records,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let report = runtime.block_on(async {
        tokio::spawn(async move { while recorded.recv().await.is_some() {} });
        pipeline::run(settings, parts, Shutdown::default()).await.unwrap()
    });
    assert_eq!(report.jobs.trained as usize, tags.len());
    assert_eq!(seen.trained.load(Relaxed), report.jobs.trained);
    (report.jobs.trained, seen)
}

#[test]
fn automodel_2479_no_batch_gets_the_hidden_states_of_another() {
    train(3);
}

/// The copy of the next batch runs while one is in work: if drafters are the slower stage, for each but the first few.
#[test]
fn a_batch_is_brought_while_the_one_before_it_is_in_work() {
    let (trained, seen) = train(500);
    let meanwhile = seen.copied_meanwhile.load(Relaxed);
    assert!(meanwhile > trained * 3 / 4, "{meanwhile} of {trained}");
}
