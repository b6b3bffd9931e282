//! Text form of a report and of a sweep.

use super::{Actor, Report, Split, Stage};
use crate::{
    common::text::{counted, grouped, percent},
    config::ByteSize,
};
use draftmill_actors::pool::DrawPolicy;
use std::fmt::{self, Write};

/// Maximum workers of a stage with one line each. In a larger stage, workers of equal speed share a line.
const MAX_LINES: usize = 12;
/// Characters of a full bar.
const BAR: usize = 20;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (targets, drafters) = (self.targets.len(), self.drafters.len());
        writeln!(
            f,
            "{} and {}: {} tokens/s, {} of the bound",
            counted(targets as u64, "target"),
            counted(drafters as u64, "drafter"),
            grouped(self.tokens_per_second.round() as u64),
            percent(self.efficiency)
        )?;
        writeln!(f)?;
        let (slower, faster) = match self.slower_stage {
            Stage::Targets => ("targets", "drafters"),
            Stage::Drafters => ("drafters", "targets"),
        };
        let slack = match self.imbalance {
            x if x < 0.005 => format!("the {faster} are equally fast"),
            x => format!("the {faster} could do {} more", percent(x)),
        };
        let mut row = |name: &str, value: String| writeln!(f, "  {name:<12}{value}");
        row(
            "bound",
            format!(
                "{} tokens/s without pauses of the {slower}; {slack}",
                grouped(self.bound_tokens_per_second.round() as u64)
            ),
        )?;
        row(
            "efficiency",
            format!(
                "{} in the steady run, {} with fill and drain",
                percent(self.efficiency),
                percent(self.efficiency_with_ends)
            ),
        )?;
        row("policy", format!("{}, draw policy {}", self.policy, draw_name(self.draw)))?;
        let skipped = match self.jobs.skipped {
            0 => String::new(),
            n => format!(", {} skipped", grouped(n)),
        };
        row(
            "jobs",
            format!(
                "{} of {} trained{skipped}; {} of the token slots are padding",
                grouped(self.jobs.trained),
                grouped(self.jobs.planned),
                percent(self.padding_share)
            ),
        )?;
        let pool = &self.pool;
        row(
            "pool",
            format!(
                "median {} ready, 95th percentile {}; peak {} of {}",
                counted(pool.depth_p50, "batch"),
                grouped(pool.depth_p95),
                ByteSize(pool.peak_bytes).rounded(),
                ByteSize(pool.max_bytes).rounded()
            ),
        )?;
        let steps = &self.steps;
        row(
            "mix",
            format!(
                "{:.1} of {} in a step of {}; mean lengths of successive steps correlate by {:+.2}",
                steps.distinct_buckets_mean,
                counted(steps.buckets as u64, "bucket"),
                counted(steps.micro_batches_per_step, "micro-batch"),
                steps.length_correlation
            ),
        )?;
        row(
            "time",
            format!(
                "{} for {}, simulated in {:.1} s",
                duration(self.virtual_seconds),
                counted(steps.count, "step"),
                self.wall_seconds
            ),
        )?;
        writeln!(f, "\n  who waits for whom   {:>5}  {:>7}  {:BAR$}  waiting for", "speed", "busy", "")?;
        stage(f, "target", &self.targets)?;
        stage(f, "drafter", &self.drafters)?;
        stage(f, "trainer", std::slice::from_ref(&self.trainer))?;
        writeln!(f, "\n{}", self.advice())
    }
}

impl Report {
    /// Returns the slower stage, with a hint.
    fn advice(&self) -> String {
        let (targets, drafters) = (self.targets.len(), self.drafters.len());
        let wait = |workers: &[Actor], cause: &str| {
            let sum: f64 = workers.iter().filter_map(|w| w.waits.get(cause)).sum();
            sum / workers.len().max(1) as f64
        };
        let mut text = match self.slower_stage {
            Stage::Targets => format!(
                "The targets limit this node: drafters wait for batches {} of the time.",
                percent(wait(&self.drafters, "batch"))
            ),
            Stage::Drafters => format!(
                "The drafters limit this node: targets wait for free pool bytes {} of the time.",
                percent(wait(&self.targets, "pool_full"))
            ),
        };
        if targets + drafters > 2 {
            // Writing to a string cannot fail.
            let _ = write!(text, " Compare other splits with --sweep targets=1..{}", targets + drafters - 1);
        }
        text
    }
}

/// Returns the table of a sweep.
pub fn table(splits: &[Split]) -> String {
    let mut text = String::new();
    let _ = write_table(&mut text, splits);
    text
}

fn write_table(text: &mut String, splits: &[Split]) -> fmt::Result {
    let policy = splits.iter().map(|split| split.report.policy.to_string().len()).max().unwrap_or(0).max(6);
    writeln!(
        text,
        "{:>7} {:>8}  {:<policy$} {:>10} {:>11} {:>14} {:>14} {:>10}",
        "targets", "drafters", "policy", "tokens/s", "efficiency", "targets busy", "drafters busy", "pool peak"
    )?;
    for split in splits {
        let report = &split.report;
        let busy = |workers: &[Actor]| percent(workers.iter().map(|w| w.busy).sum::<f64>() / workers.len() as f64);
        writeln!(
            text,
            "{:>7} {:>8}  {:<policy$} {:>10} {:>11} {:>14} {:>14} {:>10}{}",
            report.targets.len(),
            report.drafters.len(),
            report.policy.to_string(),
            grouped(report.tokens_per_second.round() as u64),
            percent(report.efficiency),
            busy(&report.targets),
            busy(&report.drafters),
            ByteSize(report.pool.peak_bytes).rounded(),
            if split.best { "  <- best" } else { "" }
        )?;
    }
    Ok(())
}

fn stage(f: &mut fmt::Formatter<'_>, name: &str, workers: &[Actor]) -> fmt::Result {
    if workers.len() <= MAX_LINES {
        return workers.iter().try_for_each(|worker| line(f, &format!("{name} {}", worker.index), worker));
    }
    let mut speeds: Vec<f64> = workers.iter().map(|worker| worker.speed).collect();
    speeds.sort_by(|a, b| b.total_cmp(a));
    speeds.dedup();
    for speed in speeds {
        let equal: Vec<&Actor> = workers.iter().filter(|worker| worker.speed == speed).collect();
        line(f, &counted(equal.len() as u64, name), &mean(&equal))?;
    }
    Ok(())
}

/// Returns the mean of several workers.
fn mean(workers: &[&Actor]) -> Actor {
    let share = 1.0 / workers.len() as f64;
    let mut mean = Actor { speed: workers[0].speed, ..Actor::default() };
    for worker in workers {
        mean.busy += worker.busy * share;
        for (&cause, wait) in &worker.waits {
            *mean.waits.entry(cause).or_default() += wait * share;
        }
    }
    mean
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, worker: &Actor) -> fmt::Result {
    let speed = if name.starts_with("trainer") { String::new() } else { format!("{:.2}", worker.speed) };
    let waits: Vec<_> =
        worker.waits.iter().map(|(cause, share)| format!("{} {}", cause.replace('_', " "), percent(*share))).collect();
    writeln!(f, "  {name:<20} {speed:>5}  {:>7}  {}  {}", percent(worker.busy), bar(worker.busy), waits.join(", "))
}

/// Draws a bar in eighths of a character.
fn bar(share: f64) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8]);
    }
    format!("{bar:<BAR$}")
}

/// Formats "3 h 25 min", "4 min 12 s", "8.5 s".
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole / 60 % 60),
    }
}

fn draw_name(draw: DrawPolicy) -> String {
    // The TOML word.
    toml::Value::try_from(draw).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_policies_have_words() {
        assert_eq!([8.46, 252.0, 12_300.0].map(duration), ["8.5 s", "4 min 12 s", "3 h 25 min"]);
        assert_eq!(draw_name(DrawPolicy::Proportional), "proportional");
    }

    #[test]
    fn bars_have_one_width_and_grow() {
        let bars = [0.0, 0.004, 0.5, 0.777, 1.0, 1.2].map(bar);
        assert!(bars.iter().all(|bar| bar.chars().count() == BAR), "{bars:?}");
        assert_eq!(bars[2].trim_end().chars().count(), 10);
        assert_eq!((bars[0].trim(), bars[4].as_str()), ("", bars[5].as_str()));
    }
}
