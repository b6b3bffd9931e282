//! A report and a sweep as text for people.

use super::{Actor, Report, Split, Stage};
use crate::common::text::{counted, grouped, percent};
use crate::config::ByteSize;
use draftmill_actors::pool::Draw;
use std::fmt::{self, Write};

/// Workers of a stage that get a line each; more of them share one line for each speed.
const LINES: usize = 12;
/// Characters of a bar that is full.
const BAR: usize = 20;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (targets, drafters) = (self.targets.len(), self.drafters.len());
        writeln!(
            f,
            "{} and {}: {} tokens/s, {} of what they could do",
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
            x if x < 0.005 => format!("the {faster} are as fast"),
            x => format!("the {faster} could do {} more", percent(x)),
        };
        let mut row = |name: &str, value: String| writeln!(f, "  {name:<12}{value}");
        row(
            "bound",
            format!(
                "{} tokens/s if the {slower} never paused; {slack}",
                grouped(self.bound_tokens_per_second.round() as u64)
            ),
        )?;
        row(
            "efficiency",
            format!(
                "{} over the steady run, {} with fill and drain",
                percent(self.efficiency),
                percent(self.efficiency_with_ends)
            ),
        )?;
        row("policy", format!("{}, draw {}", self.policy, draw_name(self.draw)))?;
        let skipped = match self.jobs.skipped {
            0 => String::new(),
            n => format!(", {} skipped", grouped(n)),
        };
        row(
            "jobs",
            format!(
                "{} of {} trained{skipped}; {} of the token slots were padding",
                grouped(self.jobs.trained),
                grouped(self.jobs.planned),
                percent(self.padding_share)
            ),
        )?;
        let pool = &self.pool;
        row(
            "pool",
            format!(
                "{} ready, or fewer, half of the time; {} for 95 % of it; peak {} of {}",
                counted(pool.depth_p50 as u64, "batch"),
                pool.depth_p95,
                ByteSize(pool.peak_bytes).rounded(),
                ByteSize(pool.max_bytes).rounded()
            ),
        )?;
        let steps = &self.steps;
        row(
            "mix",
            format!(
                "{:.1} of {} buckets in a step of {}; mean length from step to step correlates by {:+.2}",
                steps.distinct_buckets_mean,
                steps.buckets,
                counted(steps.micro_batches_per_step as u64, "micro-batch"),
                steps.length_correlation
            ),
        )?;
        row(
            "time",
            format!(
                "{} for {} steps, simulated in {:.1} s",
                duration(self.virtual_seconds),
                grouped(steps.count),
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
    /// What a person would conclude.
    fn advice(&self) -> String {
        let (targets, drafters) = (self.targets.len(), self.drafters.len());
        let wait = |workers: &[Actor], cause: &str| {
            let sum: f64 = workers.iter().filter_map(|w| w.waits.get(cause)).sum();
            sum / workers.len().max(1) as f64
        };
        let mut text = match self.slower_stage {
            Stage::Targets => format!(
                "The targets hold this node back: drafters wait for batches {} of the time.",
                percent(wait(&self.drafters, "batch"))
            ),
            Stage::Drafters => format!(
                "The drafters hold this node back: targets wait for room in the pool {} of the time.",
                percent(wait(&self.targets, "pool_full"))
            ),
        };
        if targets + drafters > 2 {
            // Writing to a string cannot fail.
            let _ = write!(text, " Other splits: --sweep targets=1..{}", targets + drafters - 1);
        }
        text
    }
}

/// The table of a sweep.
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
    if workers.len() <= LINES {
        return workers.iter().try_for_each(|worker| line(f, &format!("{name} {}", worker.index), worker));
    }
    let mut speeds: Vec<f64> = workers.iter().map(|worker| worker.speed).collect();
    speeds.sort_by(|a, b| b.total_cmp(a));
    speeds.dedup();
    for speed in speeds {
        let alike: Vec<&Actor> = workers.iter().filter(|worker| worker.speed == speed).collect();
        line(f, &counted(alike.len() as u64, name), &mean(&alike))?;
    }
    Ok(())
}

/// One worker that stands for several.
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

/// A bar in eighths of a character.
fn bar(share: f64) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8]);
    }
    format!("{bar:<BAR$}")
}

/// "3 h 25 min", "4 min 12 s", "8.5 s".
fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole / 60 % 60),
    }
}

fn draw_name(draw: Draw) -> String {
    // The word that the configuration uses.
    toml::Value::try_from(draw).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_for_people() {
        assert_eq!([8.46, 252.0, 12_300.0].map(duration), ["8.5 s", "4 min 12 s", "3 h 25 min"]);
        assert_eq!(draw_name(Draw::Proportional), "proportional");
    }

    #[test]
    fn bars_have_one_width_and_grow() {
        let bars = [0.0, 0.004, 0.5, 0.777, 1.0, 1.2].map(bar);
        assert!(bars.iter().all(|bar| bar.chars().count() == BAR), "{bars:?}");
        assert_eq!(bars[2].trim_end().chars().count(), 10);
        assert_eq!((bars[0].trim(), bars[4].as_str()), ("", bars[5].as_str()));
    }
}
