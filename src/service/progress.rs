//! Progress display of a run: a progress bar on a terminal, else a log line every `log.progress_every`.

use crate::admin::run_info::RunInfo;
use crate::common::text::{grouped, percent};
use crate::config::Loaded;
use draftmill_actors::trainer::StepRecord;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{
    io::{IsTerminal, stderr},
    time::Duration,
};
use tokio::{sync::watch, time::Instant};

/// Progress display.
pub struct Progress {
    bar: Option<ProgressBar>,
    in_force: watch::Receiver<Loaded>,
    info: watch::Receiver<RunInfo>,
    last: Option<Instant>,
    born: Instant,
    start_step: u64,
    tokens: u64,
}

impl Progress {
    /// Progress of a run that has done `start_step` steps. Planned steps and interval are read at each step.
    pub fn new(start_step: u64, in_force: watch::Receiver<Loaded>, info: watch::Receiver<RunInfo>) -> Progress {
        let total = info.borrow().planned_steps;
        let style = ProgressStyle::with_template("{spinner} step {pos}/{len} {msg}");
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(4));
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.set_position(start_step);
            bar.set_message("filling the pool");
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        Progress { bar, in_force, info, last: None, born: Instant::now(), start_step, tokens: 0 }
    }

    /// Shows a completed step.
    pub fn on_step(&mut self, record: &StepRecord) {
        self.tokens += record.tokens;
        let total = self.info.borrow().planned_steps;
        let interval = self.in_force.borrow().config.log.progress_every.0;
        let text = self.text(record, total);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(record.step);
            bar.set_message(text);
        } else if self.last.is_none_or(|at| at.elapsed() >= interval) || record.step == total {
            self.last = Some(Instant::now());
            tracing::info!("step {}/{total} {text}", record.step);
        }
    }

    /// Clears the progress bar.
    pub fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }

    fn text(&self, r: &StepRecord, total: u64) -> String {
        let seconds = self.born.elapsed().as_secs_f64().max(1e-9);
        let done = (r.step - self.start_step).max(1) as f64;
        let left = Duration::from_secs_f64(seconds / done * total.saturating_sub(r.step) as f64);
        format!(
            "loss {:.3} acc {} lr {:.1e} {} tok/s, {} left",
            r.loss,
            percent(r.accuracy),
            r.learning_rate,
            grouped((self.tokens as f64 / seconds).round() as u64),
            clock(left)
        )
    }
}

fn clock(time: Duration) -> String {
    let s = time.as_secs();
    match (s / 3600, s / 60 % 60, s % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s:02}s"),
        (h, m, _) => format!("{h}h{m:02}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units_at_most() {
        let text = |s| clock(Duration::from_secs(s));
        assert_eq!((text(7), text(67), text(7_267)), ("7s".into(), "1m07s".into(), "2h01m".into()));
    }
}
