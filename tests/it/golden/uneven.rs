//! Two drafters: the update of a step does not depend on the assignment of its micro-batches (T2), and a corrupt replica
//! is detected.

use super::{
    drafter::Case,
    engine::{drafter, target},
    files::close_to_largest,
};
use draftmill::{
    config::RetentionPolicy,
    engines::{
        checkpointing::{CheckpointSettings, CheckpointWriter},
        optimizer::TorchOptimizer,
        torch::{TorchDrafter, TorchFeatures},
    },
    model::{
        adamw::Hyper,
        params::{Gradient, Weights, init_params},
    },
};
use draftmill_actors::{
    dispatcher,
    messages::{
        engine::{
            DraftEngine, EngineError, FeatureDtype, MicroFailure, MicroReport, Optimizer, StepReport, StepRequest,
            Writing,
        },
        types::{BatchSource, JobId, JobSpec, Outcome, PaddedBatch},
    },
    pipeline::{self, Parts},
    planner::{
        self,
        ledger::MemoryLedger,
        plan::{JobOrder, PlanSettings},
    },
    pool,
    runtime::fault::Shutdown,
    trainer,
};
use metrics_exporter_prometheus::PrometheusBuilder;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};
use tch::{Device, Kind};
use tokio::sync::{mpsc, watch};
use tracing_subscriber::fmt::MakeWriter;

/// Micro-batches of a step, of two drafters.
const STEP: u64 = 6;
const LENGTHS: [u32; 24] =
    [20, 9, 14, 31, 17, 8, 26, 12, 22, 11, 30, 19, 7, 16, 25, 13, 28, 10, 21, 15, 29, 18, 24, 23];

/// Samples whose ids are a function of their number.
struct Samples {
    vocab: usize,
}

impl BatchSource for Samples {
    fn pad(&self, job: &JobSpec) -> Result<PaddedBatch, String> {
        let width = job.width as usize;
        let lengths: Vec<u32> = job.samples.iter().map(|&s| LENGTHS[s as usize]).collect();
        let mut batch = PaddedBatch { rows: lengths.len(), width, lengths, ..PaddedBatch::default() };
        for (row, &sample) in job.samples.iter().enumerate() {
            for place in 0..width {
                let real = place < batch.lengths[row] as usize;
                batch.ids.push(if real { ((sample as usize * 31 + place * 7) % self.vocab) as i32 } else { 0 });
                batch.loss_mask.push(u8::from(real && place % 5 != 4));
            }
        }
        Ok(batch)
    }
}

/// Drafter with a controlled speed: the slow one finishes no micro-batch before the fast one has done all others, two
/// thirds of each step.
struct Paced {
    inner: TorchDrafter,
    slow: bool,
    /// Flips a bit of the weights during their copy.
    flawed: bool,
    /// Micro-batches of the fast drafter, over all steps.
    done: watch::Sender<u64>,
    step: u64,
    trained: Sender<JobId>,
}

impl DraftEngine for Paced {
    type Features = TorchFeatures;
    type Gradient = Gradient;
    type Weights = Weights;

    async fn micro_batch(
        &mut self,
        job: JobId,
        features: TorchFeatures,
    ) -> Result<MicroReport, MicroFailure<TorchFeatures>> {
        let report = self.inner.micro_batch(job, features).await?;
        if self.slow {
            // The slow drafter has one in work and one prefetched.
            let enough = self.step * STEP + STEP - 2;
            let mut done = self.done.subscribe();
            done.wait_for(|&done| done >= enough).await.expect("its own sender lives");
        } else {
            self.done.send_modify(|done| *done += 1);
        }
        self.trained.send(job).unwrap();
        Ok(report)
    }

    async fn take_gradient(&mut self) -> Result<Option<Gradient>, EngineError> {
        self.inner.take_gradient().await
    }

    async fn load_weights(&mut self, mut weights: Weights) -> Result<(), EngineError> {
        self.step += 1;
        if self.flawed {
            // The lowest bit of one value.
            let last = weights.tensors_mut().last_mut().unwrap();
            let _ = last.view_dtype(Kind::Int).flatten(0, -1).get(7).bitwise_xor_(1);
        }
        if !self.slow {
            // The slow drafter's micro-batches count too, so that the next step begins at a multiple.
            self.done.send_replace(self.step * STEP);
        }
        self.inner.load_weights(weights).await
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.inner.checksum().await
    }
}

/// Optimizer that records its input and its result.
struct Watched {
    inner: TorchOptimizer,
    seen: Sender<Seen>,
}

/// One step.
struct Seen {
    /// Sum of the drafters' gradients over the denominator.
    gradient: Gradient,
    /// Weights after the update.
    weights: Weights,
}

impl Optimizer for Watched {
    type Gradient = Gradient;
    type Weights = Weights;

    async fn step(&mut self, gradients: Vec<Gradient>, request: StepRequest) -> Result<StepReport, EngineError> {
        let mut sum = gradients[0].deep_copy(Device::Cpu, Kind::Float).unwrap();
        for more in &gradients[1..] {
            for (sum, part) in sum.tensors_mut().iter_mut().zip(more.tensors()) {
                *sum += part;
            }
        }
        for tensor in sum.tensors_mut() {
            *tensor /= request.denominator;
        }
        let report = self.inner.step(gradients, request).await?;
        self.seen.send(Seen { gradient: sum, weights: self.inner.weights(0).await? }).unwrap();
        Ok(report)
    }

    async fn weights(&mut self, drafter: usize) -> Result<Weights, EngineError> {
        self.inner.weights(drafter).await
    }

    async fn checksum(&mut self) -> Result<Option<u64>, EngineError> {
        self.inner.checksum().await
    }

    async fn save(&mut self, step: u64) -> Result<Writing, EngineError> {
        self.inner.save(step).await
    }
}

struct Trained {
    seen: Vec<Seen>,
    steps: BTreeMap<u64, Vec<JobId>>,
    /// Jobs of each drafter, in order.
    jobs: Vec<Vec<JobId>>,
}

async fn train(slow: usize, flawed: Option<usize>) -> Trained {
    let case = Case::load();
    let folder = tempfile::tempdir().unwrap();
    let (config, hyper) = (case.config(), Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 });
    let saving = CheckpointWriter {
        folder: folder.path().to_path_buf(),
        settings: watch::channel(CheckpointSettings {
            keep: RetentionPolicy { last: 1, ..RetentionPolicy::default() },
            config: String::new(),
        })
        .1,
        seed: 17,
        run: String::new(),
        draft: config.clone(),
    };
    let weights = init_params(&config, 5).unwrap();
    let optimizer = TorchOptimizer::new(&weights, hyper, None, Device::Cpu, vec![Device::Cpu; 2], saving).unwrap();
    let (look, seen) = channel();
    let (done, _) = watch::channel(0);
    let (mut drafters, mut jobs): (Vec<Paced>, Vec<Receiver<JobId>>) = Default::default();
    for index in 0..2 {
        let (inner, done, (trained, seen)) = (drafter(&case).await, done.clone(), channel());
        drafters.push(Paced { inner, slow: index == slow, flawed: flawed == Some(index), done, step: 0, trained });
        jobs.push(seen);
    }
    let settings = pipeline::Settings {
        planner: planner::Settings {
            plan: PlanSettings { seed: 3, job_tokens: 40, order: JobOrder::Spread, bounds: vec![16, 31] },
            lengths: LENGTHS.into(),
            epochs: 2,
            epoch_barrier: false,
            max_skip_fraction: 0.0,
        },
        dispatcher: dispatcher::Settings {
            queue_jobs: 8,
            pad_ahead: 2,
            max_attempts: 1,
            straggler_factor: 0.0,
            offer_stragglers: false,
            paused: false,
            paused_targets: Vec::new(),
        },
        pool: pool::Settings {
            max_bytes: 1 << 30,
            max_batches: 8,
            min_ready: 1,
            draw_policy: pool::DrawPolicy::Replay,
            replay_window: 8,
            start_step: 0,
            seed: 3,
        },
        trainer: trainer::Settings {
            drafters: 2,
            accumulation: STEP as usize / 2,
            learning_rate: Arc::new(|_| 1e-3),
            max_grad_norm: 1.0,
            weight_decay: 0.0,
            paused: Vec::new(),
            anchors: 1,
            start_micro_batches: 0,
            start_step: 0,
            max_steps: 4,
            checkpoint_every: 0,
            replica_check_every: 2,
        },
        prefetch: 1,
        max_failures_in_a_row: 1,
        max_restarts: 0,
        restart_pause: Duration::from_secs(1),
        grace: Duration::from_secs(10),
        fail_at_poll: None,
    };
    let (records, mut recorded) = mpsc::channel(64);
    let parts = Parts {
        targets: vec![target(&case, FeatureDtype::F32)],
        drafters,
        optimizer: Watched { inner: optimizer, seen: look },
        source: Arc::new(Samples { vocab: config.vocab_size }),
        ledger: MemoryLedger::default(),
        records,
    };
    let drain = tokio::spawn(async move { while recorded.recv().await.is_some() {} });
    let report = pipeline::run(settings, parts, Shutdown::default()).await.unwrap();
    drain.await.unwrap();
    let mut steps = BTreeMap::<u64, Vec<JobId>>::new();
    for (job, outcome) in report.ledger.unwrap().outcomes {
        let Outcome::Trained { step } = outcome else { panic!("job {job} was skipped") };
        steps.entry(step).or_default().push(job);
    }
    Trained { seen: seen.iter().collect(), steps, jobs: jobs.iter().map(|jobs| jobs.iter().collect()).collect() }
}

#[tokio::test]
async fn the_update_does_not_depend_on_which_drafter_is_fast() {
    let (one, two) = (train(0, None).await, train(1, None).await);
    // The same jobs in the same steps on other drafters: each time the fast one did at least twice as much.
    assert_eq!(one.steps, two.steps);
    assert_eq!(one.steps.values().map(Vec::len).collect::<Vec<_>>(), [STEP as usize; 4]);
    for (slow, fast) in [(&one.jobs[0], &one.jobs[1]), (&two.jobs[1], &two.jobs[0])] {
        assert!(fast.len() >= 2 * slow.len(), "{} against {}", fast.len(), slow.len());
    }
    assert_ne!(one.jobs[0], two.jobs[0]);
    assert_eq!((one.seen.len(), two.seen.len()), (4, 4));
    for (step, (a, b)) in (1..).zip(one.seen.iter().zip(&two.seen)) {
        for ((name, a), b) in a.gradient.iter().zip(b.gradient.tensors()) {
            close_to_largest(&format!("gradient of step {step}, {name}"), a, b, 1e-6);
        }
        for ((name, a), b) in a.weights.iter().zip(b.weights.tensors()) {
            // AdamW divides by the gradient's size: if that is nearly 0, its rounding has full effect.
            close_to_largest(&format!("weights after step {step}, {name}"), a, b, 3e-6);
        }
    }
}

/// `drafter.replica_check_every`: a drafter's weights must equal the optimizer's, bit by bit.
#[tokio::test]
async fn a_single_different_bit_of_a_replica_is_logged() {
    for (flawed, want) in [(None, [4, 0]), (Some(1), [2, 2])] {
        let recorder = PrometheusBuilder::new().build_recorder();
        let _counting = metrics::set_default_local_recorder(&recorder);
        let (log, logged) = channel();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Log(log)).finish();
        let _logging = tracing::subscriber::set_default(subscriber);
        // Compared after steps 2 and 4; the first weights precede the flaw.
        train(0, flawed).await;
        let rendered = recorder.handle().render();
        let log = String::from_utf8(logged.try_iter().flatten().collect()).unwrap();
        let counted = ["same", "different"].map(|result| {
            let name = format!("draftmill_replica_checks_total{{result=\"{result}\"}} ");
            rendered.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok()).unwrap_or(0)
        });
        assert_eq!(counted, want, "{rendered}");
        for step in [2, 4] {
            let reported = log.contains(&format!("replica differs from the published weights drafter=1 step={step} "));
            assert_eq!(reported, flawed.is_some(), "{log}");
        }
        assert!(!log.contains("published weights drafter=0"), "{log}");
    }
}

/// Writer that collects log lines.
#[derive(Clone)]
struct Log(Sender<Vec<u8>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.send(bytes.to_vec()).map_err(std::io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Log;

    fn make_writer(&self) -> Log {
        self.clone()
    }
}
