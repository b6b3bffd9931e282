//! Report of `draftmill check`, as JSON and as a table.

use super::forecast::{DeviceMemory, Forecast};
use crate::{
    common::{
        exit::{Exit, Failure},
        text::{counted, grouped, percent},
    },
    config::{ByteSize, Problem, Problems, mask::MaskToken},
    hf::{config::TargetConfig, draft::DraftConfig},
};
use serde::Serialize;
use std::fmt::{self, Write};

/// Problems, notes and forecast of a check.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Problems that prevent a start.
    pub problems: Vec<Problem>,
    /// Remarks that do not prevent a start.
    pub notes: Vec<Problem>,
    pub mask_token: Option<MaskToken>,
    /// Number of held-out samples.
    pub validation_samples: Option<usize>,
    /// `None` if models or data are unknown.
    pub plan: Option<Forecast>,
    /// Target and drafter; `None` if one of them is invalid.
    #[serde(skip)]
    pub models: Option<(TargetConfig, DraftConfig)>,
    #[serde(skip)]
    exits: Vec<Exit>,
}

impl Report {
    /// Adds a problem with its exit code.
    pub fn fail(&mut self, exit: Exit, problem: Problem) {
        self.problems.push(problem);
        self.exits.push(exit);
    }

    /// Returns `Done`, or the exit code of the first problem kind: configuration, then model, then data.
    pub fn exit(&self) -> Exit {
        let first = [Exit::Config, Exit::Model, Exit::Data].into_iter().find(|exit| self.exits.contains(exit));
        first.unwrap_or(Exit::Done)
    }

    /// Merges the report of further checks. A key with a problem gets no second one.
    pub fn add(&mut self, further: Report) {
        for (problem, exit) in further.problems.into_iter().zip(further.exits) {
            if problem.key.is_empty() || !self.problems.iter().any(|known| known.key == problem.key) {
                self.fail(exit, problem);
            }
        }
        // In file order; problems without a line come last.
        self.problems.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
        let Report { notes, mask_token, validation_samples, plan, models, .. } = further;
        self.notes.extend(notes);
        (self.mask_token, self.validation_samples, self.plan, self.models) =
            (mask_token, validation_samples, plan, models);
    }

    /// Returns this report if it has no problem.
    ///
    /// # Errors
    /// All problems.
    pub fn sound(self) -> Result<Report, Failure> {
        match self.exit() {
            Exit::Done => Ok(self),
            exit => Err(Failure::new(exit, Problems(self.problems))),
        }
    }

    /// Returns the forecast as a table; empty without a forecast.
    pub fn table(&self) -> String {
        let mut text = String::new();
        if let Some(plan) = &self.plan {
            // Writing to a string cannot fail.
            let _ = self.write_table(plan, &mut text);
        }
        text
    }

    fn write_table(&self, plan: &Forecast, text: &mut String) -> fmt::Result {
        let size = |bytes: u64| ByteSize(bytes).rounded();
        let mut row = |name: &str, value: String| writeln!(text, "{name:<24}{value}");
        let validation = self.validation_samples.unwrap_or(0);
        row(
            "samples",
            format!("{} for training, {} held out", grouped(plan.samples as u64), grouped(validation as u64)),
        )?;
        row("tokens", format!("{} per epoch, padding {}", grouped(plan.tokens), percent(plan.padding_share)))?;
        row("jobs", format!("{} per epoch", grouped(plan.jobs_per_epoch as u64)))?;
        row(
            "optimizer steps",
            format!(
                "{:.1} per epoch with {} each, {} in total",
                plan.steps_per_epoch,
                counted(plan.micro_batches_per_step, "micro-batch"),
                grouped(plan.steps)
            ),
        )?;
        row(
            "hidden states",
            format!(
                "{} bytes per token, {} per job on average, {} at most",
                grouped(plan.bytes_per_token),
                size(plan.mean_job_bytes),
                size(plan.largest_job_bytes)
            ),
        )?;
        row(
            "pool",
            format!(
                "{} hold about {}; min_ready of the largest jobs take {}",
                size(plan.pool.max_bytes),
                counted(plan.pool.typical_batches, "job"),
                size(plan.pool.min_ready_bytes)
            ),
        )?;
        if let Some(parameters) = plan.drafter_parameters {
            row("drafter", format!("{:.1} M parameters", parameters as f64 / 1e6))?;
            row(
                "disk",
                format!(
                    "{}: checkpoints of {} each, and an export of {}",
                    size(plan.disk.total),
                    size(plan.disk.checkpoint),
                    size(plan.disk.export)
                ),
            )?;
        }
        if let Some(mask) = &self.mask_token {
            row("mask token", format!("{}, {}", mask.id, mask.reason))?;
        }
        writeln!(text, "\n{:>12} {:>10} {:>8} {:>12} {:>9}", "bucket up to", "samples", "jobs", "tokens", "padding")?;
        for bucket in &plan.buckets {
            let padding = percent(bucket.padding_share);
            let [bound, samples, jobs, tokens] =
                [bucket.bound.into(), bucket.samples as u64, bucket.jobs as u64, bucket.tokens].map(grouped);
            writeln!(text, "{bound:>12} {samples:>10} {jobs:>8} {tokens:>12} {padding:>9}")?;
        }
        if !plan.devices.is_empty() {
            writeln!(text, "\nmemory by device (without the temporary buffers of single operations)")?;
        }
        for device in &plan.devices {
            writeln!(text, "{:<24}{}", device.device, parts(device))?;
        }
        Ok(())
    }
}

/// Formats "4.10 GiB: 1 target 2.00 GiB, hidden states 100 MiB, pool 2.00 GiB".
fn parts(memory: &DeviceMemory) -> String {
    let parts = [
        (counted(memory.targets as u64, "target"), memory.target_weights),
        ("hidden states".into(), memory.features),
        (counted(memory.drafters as u64, "drafter"), memory.drafter_weights),
        ("optimizer".into(), memory.optimizer),
        ("activations".into(), memory.activations),
        ("evaluation".into(), memory.evaluation),
        ("pool".into(), memory.pool),
    ];
    let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<_> = parts.map(|(name, bytes)| format!("{name} {}", ByteSize(*bytes).rounded())).collect();
    format!("{}: {}", ByteSize(memory.total).rounded(), parts.join(", "))
}

impl From<Problems> for Report {
    /// Report of a configuration that could not be read.
    fn from(problems: Problems) -> Self {
        let mut report = Report::default();
        problems.0.into_iter().for_each(|problem| report.fail(Exit::Config, problem));
        report
    }
}
