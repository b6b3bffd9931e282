//! What a run did, in numbers that a person reads at its end and a program from `summary.json`.

use crate::run_dir::step_log::Window;
use crate::{config::ByteSize, run_dir::eval_log::History};
use draftmill_actors::{pipeline::Report, runtime::meter::Totals};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, path::PathBuf};

/// The closing figures of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Optimizer steps in the weights.
    pub steps: u64,
    /// Steps over which the figures of the start and of the end are means.
    pub window: u64,
    /// Mean loss in nats over the first `window` steps of the run, however often it was resumed.
    pub loss_first: f64,
    pub loss_last: f64,
    /// Share of supervised positions that were predicted right, in 0..=1.
    pub accuracy_first: f64,
    pub accuracy_last: f64,
    /// Real tokens per second of all targets together, waits included.
    pub target_tokens_per_second: f64,
    /// Real context tokens per second of all drafters together, waits included.
    pub drafter_tokens_per_second: f64,
    /// Share of the token slots that targets computed which were padding, in 0..=1.
    pub padding_share: f64,
    /// Most bytes that the pool answered for at once: reserved, waiting and with drafters.
    pub pool_peak_bytes: u64,
    pub pool_max_bytes: u64,
    pub jobs_trained: u64,
    pub jobs_skipped: u64,
    /// Jobs that were under way when the run ended; they are not trained.
    pub jobs_unfinished: u64,
    /// The step from which this start went on; 0 at the beginning. Rates, shares and counts of jobs are of this start
    /// alone, losses and accuracies of the whole run.
    pub resumed_from: u64,
    /// Seconds from the start of the first actor to the end of the last.
    pub seconds: f64,
    pub actors: Vec<ActorShares>,
    pub run_dir: PathBuf,
    pub target_dir: PathBuf,
    /// Where the drafter was exported to; absent when the run was stopped before its end.
    pub export_dir: Option<PathBuf>,
    /// What was measured beside the steps; absent where nothing was.
    #[serde(default)]
    pub evaluation: Option<Evaluation>,
    /// The last checkpoint.
    pub checkpoint: Option<String>,
    pub finished: bool,
}

/// What the drafter is worth, on samples and prompts that were never trained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Tokens per verification in real decoding, of the first weights that were measured, of the last and of the best.
    pub acceptance_first: Option<f64>,
    pub acceptance_last: Option<f64>,
    pub acceptance_best: Option<f64>,
    pub best_step: Option<u64>,
    /// Responses of the last decoding.
    pub responses: usize,
    /// Of the newest measure on held-out samples: loss in nats, accuracy in 0..=1, and the acceptance that it predicts.
    pub loss: Option<f64>,
    pub accuracy: Option<f64>,
    pub predicted_acceptance: Option<f64>,
    /// Measures of the whole run, and the seconds that they took.
    pub measures: usize,
    pub seconds: f64,
}

impl Evaluation {
    /// `None` where nothing was measured.
    pub fn of(history: &History) -> Option<Evaluation> {
        let held_out = history.held_out().map(|(_, held_out)| held_out);
        let decoded = history.0.iter().rev().find_map(|measured| measured.decoded.as_ref());
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
            seconds: history.0.iter().map(|measured| measured.seconds).sum(),
        })
    }
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(first), Some(last)) = (self.acceptance_first, self.acceptance_last) {
            write!(
                f,
                "{first:.2} -> {last:.2} tokens per step, on {} prompts that were never trained",
                self.responses
            )?;
        }
        if let (Some(loss), Some(predicted)) = (self.loss, self.predicted_acceptance) {
            let comma = if self.acceptance_last.is_some() { "; " } else { "" };
            write!(f, "{comma}held-out loss {loss:.3}, which predicts {predicted:.2}")?;
        }
        Ok(())
    }
}

/// How one actor spent its time. The shares do not add up to 1: what is left is its own bookkeeping.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ActorShares {
    pub actor: String,
    pub index: usize,
    pub busy: f64,
    /// By what it waited for.
    pub waits: BTreeMap<String, f64>,
}

impl From<&Totals> for ActorShares {
    fn from(totals: &Totals) -> Self {
        let share = |part: std::time::Duration| ratio(part.as_secs_f64(), totals.alive.as_secs_f64());
        ActorShares {
            actor: totals.actor.clone(),
            index: totals.index,
            busy: share(totals.busy),
            waits: totals.waits.iter().map(|(cause, wait)| (cause.as_str().to_owned(), share(*wait))).collect(),
        }
    }
}

impl Summary {
    /// The figures that actors and their steps give; folders are for the caller.
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
            pool_peak_bytes: report.pool.bytes,
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

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let state = if self.finished { "finished" } else { "stopped" };
        writeln!(f, "run {}: {state} after {} steps", self.run_dir.display(), self.steps)?;
        if self.window > 0 {
            let over = match self.window {
                1 => "the first and the last step".to_owned(),
                n => format!("means of the first and last {n} steps"),
            };
            writeln!(f, "  loss        {:.3} -> {:.3}   ({over})", self.loss_first, self.loss_last)?;
            writeln!(f, "  accuracy    {} -> {}", percent(self.accuracy_first), percent(self.accuracy_last))?;
        }
        if let Some(evaluation) = &self.evaluation {
            writeln!(f, "  acceptance  {evaluation}")?;
        }
        if self.resumed_from > 0 {
            writeln!(f, "  since this start, which went on from step {}:", self.resumed_from)?;
        }
        writeln!(
            f,
            "  targets     {:.0} tokens/s, {} of the slots were padding",
            self.target_tokens_per_second,
            percent(self.padding_share)
        )?;
        writeln!(f, "  drafters    {:.0} tokens/s", self.drafter_tokens_per_second)?;
        let size = |bytes: u64| ByteSize(bytes).rounded();
        writeln!(f, "  pool        at most {} of {} in use", size(self.pool_peak_bytes), size(self.pool_max_bytes))?;
        write!(f, "  jobs        {} trained, {} skipped", self.jobs_trained, self.jobs_skipped)?;
        writeln!(
            f,
            "{}",
            if self.jobs_unfinished > 0 {
                format!(", {} under way at the end and not trained", self.jobs_unfinished)
            } else {
                String::new()
            }
        )?;
        writeln!(f, "  who waited  {:<12} {:>8}   waiting for", "", "busy")?;
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
                writeln!(
                    f,
                    "  export      {}   (loads into SGLang and vLLM with the target {})",
                    dir.display(),
                    self.target_dir.display()
                )?;
                writeln!(f, "\nNext: draftmill export --check {}", dir.display())
            }
            None if self.finished => Ok(()),
            None => writeln!(f, "\nNext: the same command again goes on from here"),
        }
    }
}
