//! Text table of an evaluation report.

use super::confidence::Confidence;
use super::stats::{Report, Stats};
use crate::common::text::percent;
use std::fmt;

/// Characters of the longest bar.
const BAR: f64 = 30.0;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = &self.all;
        writeln!(
            f,
            "{} with {}: {} responses, temperature {}",
            self.target, self.draft, all.responses, self.temperature
        )?;
        if self.skipped_too_long > 0 {
            writeln!(f, "  left out    {} turns too long for the target", self.skipped_too_long)?;
        }
        writeln!(
            f,
            "  acceptance  {} tokens per step pooled, {} as mean of the responses (at most {})",
            two(all.acceptance_pooled),
            two(all.acceptance_mean),
            all.tokens_per_step.len()
        )?;
        writeln!(
            f,
            "  predicted   {} from slot accuracies (1 + sum of cumulative products), difference {}",
            two(all.predicted_acceptance),
            all.measured_minus_predicted.map_or("-".into(), |off| format!("{off:+.2}"))
        )?;
        writeln!(
            f,
            "  leading run {} drafted tokens right without a gap, mean over all positions",
            two(all.leading_run)
        )?;
        writeln!(
            f,
            "  speed       {} tokens/s, plain decoding {}: {} times as fast",
            one(all.tokens_per_second),
            one(all.plain_tokens_per_second),
            two(all.speedup)
        )?;
        match all.greedy_identical {
            Some(true) => writeln!(f, "  output      identical to plain decoding, token for token")?,
            Some(false) => writeln!(f, "  output      {} responses DIFFER from plain decoding", all.differing)?,
            None => writeln!(f, "  output      sampled, not compared with plain decoding")?,
        }
        by_position(f, all)?;
        histogram(f, all)?;
        if let Some(found) = &self.confidence {
            confidence(f, found)?;
        }
        categories(f, self)
    }
}

fn by_position(f: &mut fmt::Formatter<'_>, all: &Stats) -> fmt::Result {
    writeln!(f, "\n  draft   accepted up to here   accuracy given true context")?;
    for (k, (accepted, accuracy)) in all.acceptance_by_position.iter().zip(&all.accuracy_by_position).enumerate() {
        writeln!(f, "  {:>5}   {:>19}   {:>27}", k + 1, fraction(*accepted), fraction(*accuracy))?;
    }
    Ok(())
}

fn histogram(f: &mut fmt::Formatter<'_>, all: &Stats) -> fmt::Result {
    writeln!(f, "\n  tokens   steps")?;
    let most = all.tokens_per_step.iter().copied().max().unwrap_or(0).max(1) as f64;
    for (tokens, &steps) in all.tokens_per_step.iter().enumerate() {
        let bar = "█".repeat((steps as f64 / most * BAR).round() as usize);
        writeln!(f, "{}", format!("  {:>6}   {steps:>5}  {bar}", tokens + 1).trim_end())?;
    }
    Ok(())
}

fn confidence(f: &mut fmt::Formatter<'_>, found: &Confidence) -> fmt::Result {
    writeln!(f, "\n  confidence: mean distance of predicted and measured survival {}", two(found.calibration_error))?;
    writeln!(f, "  predicted survival   tokens   accepted      cut below   verified per step   acceptance")?;
    for (bin, cut) in found.calibration.iter().zip(&found.cuts) {
        writeln!(
            f,
            "  {:>18}   {:>6}   {:>8}   {:>12}   {:>17}   {:>10}",
            fraction(bin.predicted),
            bin.tokens,
            fraction(bin.accepted),
            format!("{:.1}", cut.threshold),
            two(cut.verified),
            two(cut.acceptance)
        )?;
    }
    Ok(())
}

fn categories(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    if report.categories.is_empty() {
        return Ok(());
    }
    let width = report.categories.iter().map(|c| c.category.chars().count()).max().unwrap_or(0).max(8);
    writeln!(f, "\n  {:<width$}   responses   pooled   mean   predicted   speed-up", "category")?;
    for category in &report.categories {
        let all = &category.stats;
        writeln!(
            f,
            "  {:<width$}   {:>9}   {:>6}   {:>4}   {:>9}   {:>8}",
            category.category,
            all.responses,
            two(all.acceptance_pooled),
            two(all.acceptance_mean),
            two(all.predicted_acceptance),
            two(all.speedup)
        )?;
    }
    Ok(())
}

fn one(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.1}"))
}

fn two(value: Option<f64>) -> String {
    value.map_or("-".into(), |value| format!("{value:.2}"))
}

fn fraction(value: Option<f64>) -> String {
    value.map_or("-".into(), percent)
}
