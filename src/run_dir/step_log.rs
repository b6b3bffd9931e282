//! Step log of a run: one line of `steps.jsonl` per optimizer step, and means over the first and last steps.

use crate::common::jsonl::JsonlLog;
use draftmill_actors::trainer::StepRecord;
use std::{
    collections::VecDeque,
    io,
    path::{Path, PathBuf},
};

/// Means over a window of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    pub steps: u64,
    /// Mean loss in nats.
    pub loss: f64,
    /// Mean fraction of supervised positions predicted correctly.
    pub accuracy: f64,
}

/// Limit on the steps of a window.
const WINDOW_LIMIT: usize = 10;

/// `steps.jsonl` of a run, open for appending. Its memory does not grow with the number of steps.
pub struct StepLog {
    log: JsonlLog,
    steps: usize,
    first: Vec<StepRecord>,
    last: VecDeque<StepRecord>,
}

impl StepLog {
    /// Path of the log of the run in folder `run`.
    pub fn file(run: &Path) -> PathBuf {
        run.join(super::files::STEPS)
    }

    /// Opens the log of a run that resumes at `start_step`. Removes the lines of later steps, which a crash undid, and a torn
    /// last line. Damaged lines are logged and stay.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(run: &Path, start_step: u64) -> io::Result<StepLog> {
        let path = StepLog::file(run);
        let mut window = (0, Vec::new(), VecDeque::new());
        let (log, damaged) = JsonlLog::open(&path, |record: StepRecord| {
            let keep = record.step <= start_step;
            if keep {
                remember(&mut window, record);
            }
            keep
        })?;
        if damaged > 0 {
            tracing::warn!(damaged, path = %path.display(), "step log has damaged lines");
        }
        let (steps, first, last) = window;
        Ok(StepLog { log, steps, first, last })
    }

    /// Appends a record.
    ///
    /// # Errors
    /// An I/O error.
    pub fn push(&mut self, record: StepRecord) -> io::Result<()> {
        self.log.push(&record)?;
        let mut window = (self.steps, std::mem::take(&mut self.first), std::mem::take(&mut self.last));
        remember(&mut window, record);
        (self.steps, self.first, self.last) = window;
        Ok(())
    }

    pub fn path(&self) -> &Path {
        self.log.path()
    }

    /// Means over the first and the last twentieth of the steps, in 1..=10 steps each.
    pub fn windows(&self) -> (Window, Window) {
        let n = (self.steps / 20).clamp(1, WINDOW_LIMIT).min(self.steps);
        (mean(self.first.iter().take(n)), mean(self.last.iter().rev().take(n).rev()))
    }
}

fn remember((steps, first, last): &mut (usize, Vec<StepRecord>, VecDeque<StepRecord>), record: StepRecord) {
    *steps += 1;
    if first.len() < WINDOW_LIMIT {
        first.push(record);
    }
    if last.len() == WINDOW_LIMIT {
        last.pop_front();
    }
    last.push_back(record);
}

fn mean<'a>(records: impl Iterator<Item = &'a StepRecord> + Clone) -> Window {
    let steps = records.clone().count() as u64;
    let n = steps.max(1) as f64;
    Window {
        steps,
        loss: records.clone().map(|r| r.loss).sum::<f64>() / n,
        accuracy: records.map(|r| r.accuracy).sum::<f64>() / n,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn record(step: u64) -> StepRecord {
        StepRecord { step, loss: 10.0 / step as f64, accuracy: 0.5, ..StepRecord::default() }
    }

    #[test]
    fn a_resume_drops_the_steps_that_a_crash_undid() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = StepLog::open(dir.path(), 0).unwrap();
        for step in 1..=40 {
            log.push(record(step)).unwrap();
        }
        fs::write(log.path(), fs::read_to_string(log.path()).unwrap() + "{\"step\":41,\"lo").unwrap();
        let mut log = StepLog::open(dir.path(), 30).unwrap();
        log.push(record(31)).unwrap();
        let text = fs::read_to_string(log.path()).unwrap();
        let steps: Vec<u64> = text.lines().map(|l| serde_json::from_str::<StepRecord>(l).unwrap().step).collect();
        assert_eq!(steps, (1..=31).collect::<Vec<_>>());
        let (first, last) = log.windows();
        assert_eq!((first.steps, first.loss), (1, 10.0));
        assert_eq!(last.loss, 10.0 / 31.0);
    }

    proptest::proptest! {
        /// Issue 17, E12: no drift of the last digit, however often a run starts.
        #[test]
        fn e12_floats_keep_every_bit(loss in proptest::num::f64::NORMAL, accuracy in proptest::num::f64::NORMAL) {
            let dir = tempfile::tempdir().unwrap();
            let record = |step| StepRecord { step, loss, accuracy, ..StepRecord::default() };
            let mut log = StepLog::open(dir.path(), 0).unwrap();
            log.push(record(1)).unwrap();
            log.push(record(2)).unwrap();
            let line = |path: &Path| fs::read_to_string(path).unwrap().lines().next().unwrap().to_owned();
            let before = line(log.path());
            let log = StepLog::open(dir.path(), 1).unwrap();
            proptest::prop_assert_eq!(line(log.path()), before);
            proptest::prop_assert_eq!(log.first[0].loss.to_bits(), loss.to_bits());
            proptest::prop_assert_eq!(log.first[0].accuracy.to_bits(), accuracy.to_bits());
        }
    }

    /// Issue 17, E15.
    #[test]
    fn e15_memory_does_not_grow_with_the_steps() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = StepLog::open(dir.path(), 0).unwrap();
        for step in 1..=20_000 {
            log.push(record(step)).unwrap();
            assert!(log.first.capacity() <= 2 * WINDOW_LIMIT && log.last.capacity() <= 2 * WINDOW_LIMIT);
        }
        let again = StepLog::open(dir.path(), 20_000).unwrap();
        assert_eq!(again.windows(), log.windows());
        assert!(again.first.len() == WINDOW_LIMIT && again.last.len() == WINDOW_LIMIT && again.steps == 20_000);
    }

    #[test]
    fn no_steps_have_no_means() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(StepLog::open(dir.path(), 0).unwrap().windows(), Default::default());
    }
}
