//! What was measured while a run trained: a line of `evals.jsonl` for each measure, and what follows from them.

use crate::common::jsonl::{self, JsonlLog};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
};

/// One measure of the weights after `step` steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    pub step: u64,
    /// Seconds since 1970.
    pub at: f64,
    /// Time that it took.
    pub seconds: f64,
    pub held_out: Option<HeldOut>,
    pub decoded: Option<Decoded>,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after step {}, in {:.1} s", self.step, self.seconds)?;
        if let Some(decoded) = &self.decoded {
            let Decoded { acceptance, responses, .. } = decoded;
            write!(f, "; {acceptance:.3} tokens per step in {responses} decoded responses")?;
        }
        if let Some(held_out) = &self.held_out {
            let HeldOut { loss, accuracy, samples, predicted_acceptance, .. } = held_out;
            write!(f, "; loss {loss:.4} and accuracy {accuracy:.4} on {samples} held-out samples")?;
            if let Some(predicted) = predicted_acceptance {
                write!(f, ", which predict {predicted:.3}")?;
            }
        }
        Ok(())
    }
}

/// On samples that are never trained, every token before a block being given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOut {
    pub samples: usize,
    /// Mean loss in nats, as training has it.
    pub loss: f64,
    /// Share of supervised positions that were right, in 0..=1.
    pub accuracy: f64,
    /// The same by slot; the first predicted one comes first.
    pub accuracy_by_position: Vec<Option<f64>>,
    /// 1 + the sum of the cumulative products of these.
    pub predicted_acceptance: Option<f64>,
}

/// In real decoding, greedily.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Decoded {
    pub responses: usize,
    /// Verifications of all responses, and the tokens that they brought.
    pub steps: usize,
    pub tokens: u64,
    /// All tokens over all steps.
    pub acceptance: f64,
    /// Mean over the responses of the tokens per step of each.
    pub acceptance_mean: f64,
}

/// Everything that was measured of a run, in the order of its steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History(pub Vec<Measured>);

impl History {
    /// Adds a measure. One of the same weights as the last one completes that.
    pub fn push(&mut self, measured: Measured) {
        match self.0.last_mut().filter(|last| last.step == measured.step) {
            Some(last) => {
                let former = std::mem::take(last);
                *last = Measured {
                    seconds: former.seconds + measured.seconds,
                    held_out: measured.held_out.or(former.held_out),
                    decoded: measured.decoded.or(former.decoded),
                    ..measured
                };
            }
            None => self.0.push(measured),
        }
    }

    /// Acceptance by step, of those that were decoded with.
    pub fn curve(&self) -> impl Iterator<Item = (u64, f64)> + '_ {
        self.0.iter().filter_map(|measured| Some((measured.step, measured.decoded.as_ref()?.acceptance)))
    }

    /// The best acceptance and its step; of two that are as good the later one.
    pub fn best(&self) -> Option<(u64, f64)> {
        best(self.curve())
    }

    /// The newest measure on held-out samples.
    pub fn held_out(&self) -> Option<(u64, &HeldOut)> {
        self.0.iter().rev().find_map(|measured| Some((measured.step, measured.held_out.as_ref()?)))
    }
}

/// `evals.jsonl` of a run, open for appending.
pub struct EvalLog(JsonlLog);

impl EvalLog {
    /// Path of the log of the run in folder `run`.
    pub fn file(run: &Path) -> PathBuf {
        run.join("evals.jsonl")
    }

    /// Opens the log of a run whose weights hold `start_step` steps, and reads it. Later lines are of weights that are gone
    /// and are removed, as is a last line that was cut short. Damaged lines are reported and stay.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(run: &Path, start_step: u64) -> io::Result<(EvalLog, History)> {
        let path = EvalLog::file(run);
        let mut history = History::default();
        let (log, damaged) = JsonlLog::open(&path, |measured: Measured| {
            let keep = measured.step <= start_step;
            if keep {
                history.push(measured);
            }
            keep
        })?;
        report_damage(&path, damaged);
        Ok((EvalLog(log), history))
    }

    /// Appends a measurement.
    ///
    /// # Errors
    /// An I/O error.
    pub fn push(&mut self, measured: &Measured) -> io::Result<()> {
        self.0.push(measured)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Reads the evaluations of the run in folder `run`; none if there is no log.
///
/// # Errors
/// An I/O error.
pub fn read(run: &Path) -> io::Result<History> {
    let path = EvalLog::file(run);
    let lines = jsonl::read(&path)?;
    report_damage(&path, lines.damaged);
    let mut history = History::default();
    lines.values.into_iter().for_each(|measured| history.push(measured));
    Ok(history)
}

fn report_damage(path: &Path, damaged: usize) {
    if damaged > 0 {
        tracing::warn!(damaged, path = %path.display(), "evaluation log has damaged lines");
    }
}

/// The step of the best score and that score; of two that are as good the later one.
pub fn best(scores: impl Iterator<Item = (u64, f64)>) -> Option<(u64, f64)> {
    scores.max_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))
}

/// Measured acceptance by step: how good a checkpoint is. A file that cannot be read scores nothing.
pub fn scores(run: &Path) -> BTreeMap<u64, f64> {
    read(run).unwrap_or_default().curve().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(step: u64, acceptance: Option<f64>) -> Measured {
        let decoded = acceptance.map(|acceptance| Decoded { acceptance, ..Decoded::default() });
        Measured {
            step,
            decoded,
            held_out: Some(HeldOut { loss: step as f64, ..HeldOut::default() }),
            ..Measured::default()
        }
    }

    #[test]
    fn a_log_is_read_back_without_what_a_crash_undid() {
        let folder = tempfile::tempdir().unwrap();
        let (mut log, history) = EvalLog::open(folder.path(), 0).unwrap();
        assert_eq!(history, History::default());
        for (step, acceptance) in [(0, Some(1.0)), (10, Some(1.5)), (20, None), (30, Some(1.5))] {
            log.push(&measured(step, acceptance)).unwrap();
        }
        let mut bytes = std::fs::read(log.path()).unwrap();
        bytes.extend(b"{\"step\": 40, \"at\"");
        std::fs::write(log.path(), bytes).unwrap();
        assert_eq!(scores(folder.path()), [(0, 1.0), (10, 1.5), (30, 1.5)].into());
        let (_, history) = EvalLog::open(folder.path(), 20).unwrap();
        assert_eq!(history.0.iter().map(|m| m.step).collect::<Vec<_>>(), [0, 10, 20]);
        assert_eq!((history.best(), history.held_out().map(|(step, _)| step)), (Some((10, 1.5)), Some(20)));
        assert_eq!(read(folder.path()).unwrap(), history);
        assert_eq!(History(vec![measured(3, Some(2.0)), measured(5, Some(2.0))]).best(), Some((5, 2.0)));
        // What was measured of the same weights in two parts is one measure.
        let mut history = History(vec![measured(3, None)]);
        let decoded = Some(Decoded { acceptance: 1.5, ..Decoded::default() });
        history.push(Measured { step: 3, decoded, ..Measured::default() });
        assert_eq!(history, History(vec![measured(3, Some(1.5))]));
    }
}
