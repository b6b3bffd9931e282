//! Shutdown summary: statistics of a run, printed at its end and stored in `summary.json`.

use crate::run_dir::step_log::Window;
use crate::{
    common::text::{counted, grouped, percent, shell_word},
    config::ByteSize,
    export::ServeCommands,
    run_dir::eval_log::EvalHistory,
};
use draftmill_actors::{pipeline::Report, runtime::meter::Totals};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// Summary of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Optimizer steps in the weights.
    pub steps: u64,
    /// Steps in the averaging windows at the start and at the end of the run.
    pub window: u64,
    /// Mean loss in nats over the first `window` steps of the run, over all its starts.
    pub loss_first: f64,
    /// Mean loss in nats over the last `window` steps.
    pub loss_last: f64,
    /// Share of supervised positions with a correct prediction, in 0..=1.
    pub accuracy_first: f64,
    pub accuracy_last: f64,
    /// Real tokens per second of all targets, waits included.
    pub target_tokens_per_second: f64,
    /// Real context tokens per second of all drafters, waits included.
    pub drafter_tokens_per_second: f64,
    /// Share of padding in the token slots that targets computed, in 0..=1.
    pub padding_share: f64,
    /// Peak bytes of the pool: reserved, waiting and checked out.
    pub pool_peak_bytes: u64,
    pub pool_max_bytes: u64,
    pub jobs_trained: u64,
    pub jobs_skipped: u64,
    /// Jobs in progress at the end of the run; they are not trained.
    pub jobs_unfinished: u64,
    /// Resume point of this start; 0 at the beginning. Rates, shares and counts of jobs cover this start, losses and accuracies
    /// the whole run.
    pub resumed_from: u64,
    /// Seconds from the start of the first actor to the end of the last.
    pub seconds: f64,
    pub actors: Vec<ActorShares>,
    pub run_dir: PathBuf,
    pub target_dir: PathBuf,
    /// Folder of the export; `None` if the run was stopped before its end.
    pub export_dir: Option<PathBuf>,
    /// Command lines that serve the export.
    #[serde(default)]
    pub serve: Option<ServeCommands>,
    /// Results of the evaluations during training; `None` without any.
    #[serde(default)]
    pub evaluation: Option<Evaluation>,
    /// Last checkpoint.
    pub checkpoint: Option<String>,
    pub finished: bool,
}

/// Evaluation of the drafter on held-out samples and prompts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Tokens per verification in real decoding, of the first evaluated weights.
    pub acceptance_first: Option<f64>,
    /// Tokens per verification of the last evaluated weights.
    pub acceptance_last: Option<f64>,
    /// Best tokens per verification.
    pub acceptance_best: Option<f64>,
    pub best_step: Option<u64>,
    /// Responses of the last decoding.
    pub responses: usize,
    /// Newest loss on held-out samples, in nats.
    pub loss: Option<f64>,
    /// Newest accuracy on held-out samples, in 0..=1.
    pub accuracy: Option<f64>,
    /// Acceptance that this accuracy predicts.
    pub predicted_acceptance: Option<f64>,
    /// Number of evaluations in the whole run.
    pub measures: usize,
    /// Total duration of the evaluations.
    pub seconds: f64,
}

impl Evaluation {
    /// Evaluation from the evaluation log; `None` if it is empty.
    pub fn of(history: &EvalHistory) -> Option<Evaluation> {
        let held_out = history.held_out().map(|(_, held_out)| held_out);
        let decoded = history.0.iter().rev().find_map(|evaluation| evaluation.decoded.as_ref());
        (!history.0.is_empty()).then(|| Evaluation {
            acceptance_first: history.curve().next().map(|(_, acceptance)| acceptance),
            acceptance_last: history.curve().last().map(|(_, acceptance)| acceptance),
            acceptance_best: history.best().map(|(_, acceptance)| acceptance),
            best_step: history.best().map(|(step, _)| step),
            responses: decoded.map_or(0, |decoded| decoded.responses),
            loss: held_out.map(|held_out| held_out.loss),
            accuracy: held_out.map(|held_out| held_out.accuracy),
            predicted_acceptance: held_out.and_then(|held_out| held_out.predicted_acceptance),
            measures: history.0.len(),
            seconds: history.0.iter().map(|evaluation| evaluation.seconds).sum(),
        })
    }
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(first), Some(last)) = (self.acceptance_first, self.acceptance_last) {
            write!(
                f,
                "{first:.2} -> {last:.2} tokens per step on {}",
                counted(self.responses as u64, "held-out prompt")
            )?;
        }
        if let (Some(loss), Some(predicted)) = (self.loss, self.predicted_acceptance) {
            let comma = if self.acceptance_last.is_some() { "; " } else { "" };
            write!(f, "{comma}held-out loss {loss:.3} predicts {predicted:.2}")?;
        }
        Ok(())
    }
}

/// Time shares of one actor. The rest up to 1 is its bookkeeping.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ActorShares {
    pub actor: String,
    pub index: usize,
    pub busy: f64,
    /// Share of time by wait cause.
    pub waits: BTreeMap<String, f64>,
}

impl From<&Totals> for ActorShares {
    fn from(totals: &Totals) -> Self {
        let share = |time: std::time::Duration| ratio(time.as_secs_f64(), totals.alive.as_secs_f64());
        ActorShares {
            actor: totals.actor.clone(),
            index: totals.index,
            busy: share(totals.busy),
            waits: totals.waits.iter().map(|(cause, wait)| (cause.as_str().to_owned(), share(*wait))).collect(),
        }
    }
}

impl Summary {
    /// Summary from the actors' report and the step log. The caller sets the folders.
    pub fn of<L>(report: &Report<L>, first: &Window, last: &Window, seconds: f64) -> Summary {
        let real: u64 = report.targets.iter().map(|t| t.tokens).sum();
        let padded: u64 = report.targets.iter().map(|t| t.padded_tokens).sum();
        let trained: u64 = report.drafters.iter().map(|d| d.tokens).sum();
        let targets = report.targets.iter().map(|t| &t.totals);
        let drafters = report.drafters.iter().map(|d| &d.totals);
        let trainer = std::iter::once(&report.trainer.totals);
        Summary {
            steps: report.trainer.step,
            window: first.steps,
            loss_first: first.loss,
            loss_last: last.loss,
            accuracy_first: first.accuracy,
            accuracy_last: last.accuracy,
            target_tokens_per_second: ratio(real as f64, seconds),
            drafter_tokens_per_second: ratio(trained as f64, seconds),
            padding_share: ratio(padded.saturating_sub(real) as f64, padded as f64),
            pool_peak_bytes: report.pool.peak_bytes,
            jobs_trained: report.jobs.trained,
            jobs_skipped: report.jobs.skipped,
            jobs_unfinished: report.jobs.unfinished,
            seconds,
            actors: targets.chain(drafters).chain(trainer).map(ActorShares::from).collect(),
            checkpoint: report.trainer.checkpoint.clone(),
            ..Summary::default()
        }
    }
}

fn ratio(value: f64, total: f64) -> f64 {
    if total > 0.0 { value / total } else { 0.0 }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.finished { "finished" } else { "stopped" };
        writeln!(f, "run {}: {state} after {}", self.run_dir.display(), counted(self.steps, "step"))?;
        if self.window > 0 {
            let over = match self.window {
                1 => "first and last step".to_owned(),
                n => format!("means of the first and last {n} steps"),
            };
            writeln!(f, "  loss        {:.3} -> {:.3}   ({over})", self.loss_first, self.loss_last)?;
            writeln!(f, "  accuracy    {} -> {}", percent(self.accuracy_first), percent(self.accuracy_last))?;
        }
        if let Some(evaluation) = &self.evaluation {
            writeln!(f, "  acceptance  {evaluation}")?;
        }
        if self.resumed_from > 0 {
            writeln!(f, "  since resuming at step {}:", self.resumed_from)?;
        }
        writeln!(
            f,
            "  targets     {} tokens/s, {} padding",
            grouped(self.target_tokens_per_second.round() as u64),
            percent(self.padding_share)
        )?;
        writeln!(f, "  drafters    {} tokens/s", grouped(self.drafter_tokens_per_second.round() as u64))?;
        let size = |bytes: u64| ByteSize(bytes).rounded();
        writeln!(f, "  pool        peak {} of {}", size(self.pool_peak_bytes), size(self.pool_max_bytes))?;
        write!(f, "  jobs        {} trained, {} skipped", grouped(self.jobs_trained), grouped(self.jobs_skipped))?;
        writeln!(
            f,
            "{}",
            if self.jobs_unfinished > 0 {
                format!(", {} unfinished", grouped(self.jobs_unfinished))
            } else {
                String::new()
            }
        )?;
        writeln!(f, "  actors      {:<12} {:>8}   waits", "", "busy")?;
        for a in &self.actors {
            let waits: Vec<_> =
                a.waits.iter().map(|(c, share)| format!("{} {}", c.replace('_', " "), percent(*share))).collect();
            writeln!(
                f,
                "              {:<12} {:>8}   {}",
                format!("{} {}", a.actor, a.index),
                percent(a.busy),
                waits.join(", ")
            )?;
        }
        if let Some(checkpoint) = &self.checkpoint {
            writeln!(f, "  checkpoint  {}", self.run_dir.join("checkpoints").join(checkpoint).display())?;
        }
        match &self.export_dir {
            Some(dir) => {
                writeln!(f, "  export      {}", dir.display())?;
                for (engine, command) in self.serve.iter().flat_map(ServeCommands::by_engine) {
                    writeln!(f, "\nServe with {engine}:\n  {command}")?;
                }
                writeln!(f, "\nNext: draftmill export --check {}", shell_word(&dir.display().to_string()))
            }
            None if self.finished => Ok(()),
            None => writeln!(f, "\nNext: the same command resumes from here"),
        }
    }
}
