//! What `draftmill check` found, as JSON and as text for people.

use super::forecast::{DeviceMemory, Forecast};
use crate::common::text::percent;
use crate::{
    common::exit::{Exit, Failure},
    config::{ByteSize, Problem, Problems, mask::MaskToken},
    hf::{config::TargetConfig, draft::DraftConfig},
};
use serde::Serialize;
use std::fmt::{self, Write};

/// Problems, and what a run would do.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Each of them keeps a run from beginning.
    pub problems: Vec<Problem>,
    /// Worth knowing, but no reason not to begin.
    pub notes: Vec<Problem>,
    pub mask_token: Option<MaskToken>,
    /// Samples that are kept apart and never trained.
    pub validation_samples: Option<usize>,
    /// Absent where too little is known.
    pub plan: Option<Forecast>,
    /// The target and the drafter that fits it, as far as they are sound.
    #[serde(skip)]
    pub models: Option<(TargetConfig, DraftConfig)>,
    #[serde(skip)]
    exits: Vec<Exit>,
}

impl Report {
    /// Notes a problem, and the exit code that it stands for.
    pub fn fail(&mut self, exit: Exit, problem: Problem) {
        self.problems.push(problem);
        self.exits.push(exit);
    }

    /// Done, or what to mend first: configuration, then model, then data.
    pub fn exit(&self) -> Exit {
        let first = [Exit::Config, Exit::Model, Exit::Data].into_iter().find(|exit| self.exits.contains(exit));
        first.unwrap_or(Exit::Done)
    }

    /// Takes in what was found by looking further. A key that is blamed already is blamed once.
    pub fn add(&mut self, further: Report) {
        for (problem, exit) in further.problems.into_iter().zip(further.exits) {
            if problem.key.is_empty() || !self.problems.iter().any(|known| known.key == problem.key) {
                self.fail(exit, problem);
            }
        }
        // In the order of the file; what stands nowhere comes last.
        self.problems.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
        let Report { notes, mask_token, validation_samples, plan, models, .. } = further;
        self.notes.extend(notes);
        (self.mask_token, self.validation_samples, self.plan, self.models) =
            (mask_token, validation_samples, plan, models);
    }

    /// This report, or all its problems as the reason not to begin.
    pub fn sound(self) -> Result<Report, Failure> {
        match self.exit() {
            Exit::Done => Ok(self),
            exit => Err(Failure::new(exit, Problems(self.problems))),
        }
    }

    /// The forecast as a table; empty where there is none.
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
        row("samples", format!("{} for training, {validation} for validation", plan.samples))?;
        row("tokens", format!("{} per epoch, padding {}", plan.tokens, percent(plan.padding_share)))?;
        row("jobs", format!("{} per epoch", plan.jobs_per_epoch))?;
        row(
            "optimizer steps",
            format!(
                "{:.1} per epoch of {} micro-batches each, {} in all",
                plan.steps_per_epoch, plan.micro_batches_per_step, plan.steps
            ),
        )?;
        row(
            "hidden states",
            format!(
                "{} bytes per token, {} per job on average, {} at most",
                plan.bytes_per_token,
                size(plan.mean_job_bytes),
                size(plan.largest_job_bytes)
            ),
        )?;
        row(
            "pool",
            format!(
                "{} hold about {} jobs; min_ready of the largest take {}",
                size(plan.pool.max_bytes),
                plan.pool.typical_batches,
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
        writeln!(text, "\n{:>10} {:>10} {:>8} {:>12} {:>9}", "bucket up to", "samples", "jobs", "tokens", "padding")?;
        for bucket in &plan.buckets {
            let padding = percent(bucket.padding_share);
            let (bound, samples) = (bucket.bound, bucket.samples);
            writeln!(text, "{bound:>12} {samples:>10} {:>8} {:>12} {padding:>9}", bucket.jobs, bucket.tokens)?;
        }
        if !plan.devices.is_empty() {
            writeln!(text, "\nmemory of weights and buffers (working memory of forward and backward comes on top)")?;
        }
        for device in &plan.devices {
            writeln!(text, "{:<24}{}", device.device, parts(device))?;
        }
        Ok(())
    }
}

/// "4.10 GiB: 1 target 2.00 GiB, hidden states 100 MiB, pool 2.00 GiB".
fn parts(memory: &DeviceMemory) -> String {
    let parts = [
        (format!("{} x target", memory.targets), memory.target_weights),
        ("hidden states".into(), memory.features),
        (format!("{} x drafter", memory.drafters), memory.drafter_weights),
        ("optimizer".into(), memory.optimizer),
        ("measures ([eval])".into(), memory.evaluation),
        ("pool".into(), memory.pool),
    ];
    let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<_> = parts.map(|(name, bytes)| format!("{name} {}", ByteSize(*bytes).rounded())).collect();
    format!("{}: {}", ByteSize(memory.total).rounded(), parts.join(", "))
}

impl From<Problems> for Report {
    /// A configuration that could not be read at all.
    fn from(problems: Problems) -> Self {
        let mut report = Report::default();
        problems.0.into_iter().for_each(|problem| report.fail(Exit::Config, problem));
        report
    }
}
