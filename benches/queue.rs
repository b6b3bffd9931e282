//! Cost of the dispatcher's decisions with a short queue and a long one.

use crate::machine::{Outcome, median};
use draftmill_actors::{
    dispatcher::{
        Return, Settings,
        state::{Action, State},
    },
    messages::{
        job::{Job, Receipt},
        types::{JobId, JobSpec, PaddedBatch},
    },
};
use tokio::time::Instant;

pub const SHORT: u32 = 100;
pub const LONG: u32 = 100_000;
/// Jobs that pass in one measurement.
const PASSED: u32 = 20_000;
const REPETITIONS: usize = 5;

/// Measures both lengths in turns. Returns the median seconds of one job with the short and the long queue, and the median
/// ratio of the pairs.
pub fn run() -> Outcome<(f64, f64, f64)> {
    let mut pairs = Vec::new();
    for _ in 0..REPETITIONS {
        pairs.push((seconds_per_job(SHORT)?, seconds_per_job(LONG)?));
    }
    let of = |figure: fn(&(f64, f64)) -> f64| median(pairs.iter().map(figure).collect());
    Ok((of(|pair| pair.0), of(|pair| pair.1), of(|pair| pair.1 / pair.0)))
}

/// Fills the queue with `queued` jobs. Measures [`PASSED`] jobs that leave while as many enter: each is queued, padded,
/// leased, claimed and returned.
fn seconds_per_job(queued: u32) -> Outcome<f64> {
    let settings = Settings {
        queue_jobs: queued as usize,
        pad_ahead: 8,
        max_attempts: 3,
        straggler_factor: 4.0,
        offer_stragglers: true,
        paused: false,
        paused_targets: Vec::new(),
    };
    let mut dispatcher = Dispatcher { state: State::new(settings), padding: Vec::new(), leased: None };
    for index in 0..queued {
        dispatcher.enter(index);
    }
    let begin = Instant::now();
    for passed in 0..PASSED {
        dispatcher.pass(passed)?;
        dispatcher.enter(queued + passed);
    }
    Ok(begin.elapsed().as_secs_f64() / f64::from(PASSED))
}

/// State with the world around it.
struct Dispatcher {
    state: State,
    padding: Vec<JobId>,
    leased: Option<(u64, JobId)>,
}

impl Dispatcher {
    fn enter(&mut self, index: u32) {
        let id = JobId { epoch: 0, index };
        let spec = JobSpec { id, bucket: 0, samples: vec![index], tokens: 1, width: 1 };
        let actions = self.state.on_job(Job { spec, attempts: 0, receipt: Receipt::detached(id) });
        self.apply(actions);
    }

    /// Extracts the next job.
    fn pass(&mut self, pull: u32) -> Outcome<()> {
        for id in std::mem::take(&mut self.padding) {
            let actions = self.state.on_padded(id, Ok(PaddedBatch::default()));
            self.apply(actions);
        }
        let actions = self.state.on_pull(pull.into(), 0);
        self.apply(actions);
        let (lease, job) = self.leased.take().ok_or("the dispatcher leased no job")?;
        let now = Instant::now();
        self.state.on_started(lease, now);
        let claimed = self.state.on_claim(lease, now).ok_or("a lease without its job")?;
        if claimed.id() != job {
            return Err(format!("the dispatcher leased {job} and gave {}", claimed.id()));
        }
        let actions = self.state.on_return(Return::Done { lease });
        self.apply(actions);
        Ok(())
    }

    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Pad(spec) => self.padding.push(spec.id),
                Action::Lease { lease, job, .. } => self.leased = Some((lease, job)),
                Action::NoMore { .. } | Action::Drain { .. } => {}
            }
        }
    }
}
