//! Evaluation log of a run: one line of `evals.jsonl` per evaluation, and the history read from it.

use crate::common::jsonl::{self, JsonlLog};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
};

/// One evaluation of the weights after `step` steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    pub step: u64,
    /// Seconds since 1970.
    pub at: f64,
    /// Duration of the evaluation in seconds.
    pub seconds: f64,
    pub held_out: Option<HeldOut>,
    pub decoded: Option<Decoded>,
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after step {}, in {:.1} s", self.step, self.seconds)?;
        if let Some(decoded) = &self.decoded {
            let Decoded { acceptance, responses, .. } = decoded;
            write!(f, "; {acceptance:.3} tokens per step in {responses} decoded responses")?;
        }
        if let Some(held_out) = &self.held_out {
            let HeldOut { loss, accuracy, samples, predicted_acceptance, leading_run, .. } = held_out;
            write!(f, "; loss {loss:.4} and accuracy {accuracy:.4} on {samples} held-out samples")?;
            if let Some(predicted) = predicted_acceptance {
                write!(f, ", which predict {predicted:.3}")?;
            }
            if let Some(run) = leading_run {
                write!(f, "; leading run {run:.3}")?;
            }
        }
        Ok(())
    }
}

/// Evaluation on held-out samples, with the true context before each block.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOut {
    pub samples: usize,
    /// Mean loss in nats, as in training.
    pub loss: f64,
    /// Fraction of supervised positions predicted correctly, in 0..=1.
    pub accuracy: f64,
    /// Accuracy by slot, from the first slot after the anchor.
    pub accuracy_by_position: Vec<Option<f64>>,
    /// 1 + the sum of the cumulative products of `accuracy_by_position`: an approximation, which takes the slots of a block
    /// as independent.
    pub predicted_acceptance: Option<f64>,
    /// Mean leading correct run of a block, in tokens, measured block by block; `None` in logs from before it was measured.
    #[serde(default)]
    pub leading_run: Option<f64>,
    /// Fraction of labels among the candidates of a selector, and its gain in tokens of the leading run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidate_recall: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector_gain: Option<f64>,
}

/// Evaluation by greedy speculative decoding.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Decoded {
    pub responses: usize,
    /// Verifications of all responses, and the tokens that they produced.
    pub steps: usize,
    pub tokens: u64,
    /// All tokens divided by all steps.
    pub acceptance: f64,
    /// Mean over responses of their tokens per step.
    pub acceptance_mean: f64,
}

/// Evaluations of a run, by ascending step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvalHistory(pub Vec<Evaluation>);

impl EvalHistory {
    /// Adds an evaluation, or merges it into the last one if both are of the same step.
    pub fn push(&mut self, evaluation: Evaluation) {
        match self.0.last_mut().filter(|last| last.step == evaluation.step) {
            Some(last) => {
                let former = std::mem::take(last);
                *last = Evaluation {
                    seconds: former.seconds + evaluation.seconds,
                    held_out: evaluation.held_out.or(former.held_out),
                    decoded: evaluation.decoded.or(former.decoded),
                    ..evaluation
                };
            }
            None => self.0.push(evaluation),
        }
    }

    /// Acceptance by step, of the evaluations with decoding.
    pub fn curve(&self) -> impl Iterator<Item = (u64, f64)> + '_ {
        self.0.iter().filter_map(|eval| Some((eval.step, eval.decoded.as_ref()?.acceptance)))
    }

    /// Best acceptance and its step; the later step on a tie.
    pub fn best(&self) -> Option<(u64, f64)> {
        best(self.curve())
    }

    /// Newest evaluation on held-out samples.
    pub fn held_out(&self) -> Option<(u64, &HeldOut)> {
        self.0.iter().rev().find_map(|eval| Some((eval.step, eval.held_out.as_ref()?)))
    }
}

/// `evals.jsonl` of a run, open for appending.
pub struct EvalLog(JsonlLog);

impl EvalLog {
    /// Path of the log of the run in folder `run`.
    pub fn file(run: &Path) -> PathBuf {
        run.join(super::files::EVALS)
    }

    /// Opens and reads the log of a run that resumes at `start_step`. Removes the lines of later steps, whose weights are lost,
    /// and a torn last line. Damaged lines are logged and stay.
    ///
    /// # Errors
    /// An I/O error.
    pub fn open(run: &Path, start_step: u64) -> io::Result<(EvalLog, EvalHistory)> {
        let path = EvalLog::file(run);
        let mut history = EvalHistory::default();
        let (log, damaged) = JsonlLog::open(&path, |evaluation: Evaluation| {
            let keep = evaluation.step <= start_step;
            if keep {
                history.push(evaluation);
            }
            keep
        })?;
        report_damage(&path, damaged);
        Ok((EvalLog(log), history))
    }

    /// Appends an evaluation.
    ///
    /// # Errors
    /// An I/O error.
    pub fn push(&mut self, evaluation: &Evaluation) -> io::Result<()> {
        self.0.push(evaluation)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Reads the evaluations of the run in folder `run`; empty if there is no log.
///
/// # Errors
/// An I/O error.
pub fn read(run: &Path) -> io::Result<EvalHistory> {
    let path = EvalLog::file(run);
    let lines = jsonl::read(&path)?;
    report_damage(&path, lines.damaged);
    let mut history = EvalHistory::default();
    lines.values.into_iter().for_each(|evaluation| history.push(evaluation));
    Ok(history)
}

fn report_damage(path: &Path, damaged: usize) {
    if damaged > 0 {
        tracing::warn!(damaged, path = %path.display(), "evaluation log has damaged lines");
    }
}

/// Best score with its step; the later step on a tie.
pub fn best(scores: impl Iterator<Item = (u64, f64)>) -> Option<(u64, f64)> {
    scores.max_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))
}

/// Acceptance by step, the score of a checkpoint; empty if the log is unreadable.
pub fn scores(run: &Path) -> BTreeMap<u64, f64> {
    read(run).unwrap_or_default().curve().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluation(step: u64, acceptance: Option<f64>) -> Evaluation {
        let decoded = acceptance.map(|acceptance| Decoded { acceptance, ..Decoded::default() });
        Evaluation {
            step,
            decoded,
            held_out: Some(HeldOut { loss: step as f64, ..HeldOut::default() }),
            ..Evaluation::default()
        }
    }

    #[test]
    fn a_log_is_read_back_without_undone_steps() {
        let folder = tempfile::tempdir().unwrap();
        let (mut log, history) = EvalLog::open(folder.path(), 0).unwrap();
        assert_eq!(history, EvalHistory::default());
        for (step, acceptance) in [(0, Some(1.0)), (10, Some(1.5)), (20, None), (30, Some(1.5))] {
            log.push(&evaluation(step, acceptance)).unwrap();
        }
        let mut bytes = std::fs::read(log.path()).unwrap();
        bytes.extend(b"{\"step\": 40, \"at\"");
        std::fs::write(log.path(), bytes).unwrap();
        assert_eq!(scores(folder.path()), [(0, 1.0), (10, 1.5), (30, 1.5)].into());
        let (_, history) = EvalLog::open(folder.path(), 20).unwrap();
        assert_eq!(history.0.iter().map(|m| m.step).collect::<Vec<_>>(), [0, 10, 20]);
        assert_eq!((history.best(), history.held_out().map(|(step, _)| step)), (Some((10, 1.5)), Some(20)));
        assert_eq!(read(folder.path()).unwrap(), history);
        assert_eq!(EvalHistory(vec![evaluation(3, Some(2.0)), evaluation(5, Some(2.0))]).best(), Some((5, 2.0)));
        // Two evaluations of the same step are merged.
        let mut history = EvalHistory(vec![evaluation(3, None)]);
        let decoded = Some(Decoded { acceptance: 1.5, ..Decoded::default() });
        history.push(Evaluation { step: 3, decoded, ..Evaluation::default() });
        assert_eq!(history, EvalHistory(vec![evaluation(3, Some(1.5))]));
    }
}
