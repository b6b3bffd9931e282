//! Prepared run: settings, models, store, run folder and resume point, without engines.

use super::{Failed, Start, Summary, identity, models::Models};
use crate::{
    check::{Forecast, Machine, Samples, Stored, examine, examine_store, pipeline_settings::plan_settings},
    common::{
        exit::{Exit, Failure},
        text::counted,
    },
    config::{Config, Loaded, Problem},
    data::{Split, Store, StoreSource},
    run_dir::{OpenRun, RunDir, StartContext, db::RunEnd},
};
use std::sync::Arc;

/// Everything that a run needs except the engines.
pub struct PreparedRun {
    pub loaded: Loaded,
    pub models: Option<Models>,
    pub store: Arc<Store>,
    pub source: StoreSource,
    pub lengths: Arc<[u32]>,
    pub machine: Machine,
    pub forecast: Forecast,
    pub opened: OpenRun,
}

impl PreparedRun {
    /// Opens the store and the run folder, checks the configuration and finds the resume point.
    ///
    /// # Errors
    /// An unusable store, configuration, model or run folder.
    pub fn open(loaded: Loaded, start: Start) -> Result<PreparedRun, Failure> {
        let config = &loaded.config;
        let store = Arc::new(Store::open(&config.data.store).failed(Exit::Data)?);
        let lengths: Arc<[u32]> = store.lengths(Split::Train).into();
        let samples = Samples { lengths: lengths.to_vec(), validation: store.len(Split::Validation) };
        let machine = Machine { check_port: false, ..Machine::detect(config) };
        let mut report = examine(&loaded, &machine, &Stored::Ready(samples)).sound()?;
        let before = report.notes.len();
        examine_store(&loaded, &store, &mut report);
        let report = report.sound()?;
        for Problem { key, message, remedy, .. } in &report.notes[before..] {
            tracing::warn!(%key, %message, %remedy, "store differs from configuration");
        }
        let forecast =
            report.plan.ok_or_else(|| Failure::new(Exit::Internal, "there is no forecast of a sound run"))?;
        let models = report.models.map(|(target, draft)| Models { target, draft });
        let plan = plan_settings(config, &forecast);
        let source = StoreSource::new(store.clone(), Split::Train);
        let mut identity = identity::of(config, &plan, &store, models.as_ref())?;
        if let Some(window) = forecast.pool.replay_window {
            // It determines the draw order of the rest of an epoch.
            identity.insert("pool.replay_window".into(), window.to_string());
        }
        let folder = RunDir::new(&config.run.dir);
        let context = StartContext {
            identity,
            samples: lengths.len() as u64,
            fresh: start.fresh,
            force: start.force,
            from_checkpoint: start.from_checkpoint,
        };
        let opened = folder.open(&loaded, &context)?;
        Ok(PreparedRun { loaded, models, store, source, lengths, machine, forecast, opened })
    }

    /// Step of the resume point; 0 at the beginning.
    pub fn start_step(&self) -> u64 {
        self.opened.from.as_ref().map_or(0, |checkpoint| checkpoint.step)
    }

    /// Summary of a finished run; `None` if training or the shutdown is incomplete.
    ///
    /// # Errors
    /// An unreadable summary or `state.db`.
    pub fn finished(&mut self) -> Result<Option<Summary>, Failure> {
        let path = self.opened.folder.summary();
        let Config { run, .. } = &self.loaded.config;
        let counts = self.opened.state.counts().failed(Exit::Run)?;
        let planned = (0..run.epochs).all(|epoch| counts.iter().any(|c| c.epoch == epoch && c.open() == 0));
        let done = planned || run.max_steps.is_some_and(|limit| self.start_step() >= limit);
        if !done || !path.exists() {
            return Ok(None);
        }
        let text = crate::common::fs::read_input_text(&path, 64 << 20)
            .map_err(|e| format!("{} cannot be read: {e}", path.display()))
            .failed(Exit::Run)?;
        // A damaged summary, or one of fewer epochs, is written again by a new shutdown.
        let is_current = |s: &Summary| {
            s.finished && s.steps == self.start_step() && s.export_dir.as_ref().is_none_or(|dir| dir.exists())
        };
        let summary = serde_json::from_str::<Summary>(&text).ok().filter(is_current);
        if summary.is_some() {
            let end = if planned { RunEnd::Finished } else { RunEnd::StepLimit };
            let step = self.start_step();
            let OpenRun { state, started, .. } = &mut self.opened;
            state.end_run(started.run, &end, Some(step)).failed(Exit::Run)?;
        }
        Ok(summary)
    }

    /// Number of targets and of drafters.
    pub fn workers(&self) -> (usize, usize) {
        (self.loaded.config.target.devices.len(), self.loaded.config.drafter.devices.len())
    }

    /// Sentence about the resume point; `None` at the beginning of a run.
    pub fn resumed(&self) -> Option<String> {
        let OpenRun { folder, state, from, started, .. } = &self.opened;
        let reopened = format!("{} open again", counted(started.reopened as u64, "job"));
        if let Some(from) = from {
            let trained: u64 = state.counts().map_or(0, |counts| counts.iter().map(|c| c.trained).sum());
            let folder = folder.root().display();
            let trained = counted(trained, "trained job");
            Some(format!("resuming from checkpoint {} of {folder}, with {trained}; {reopened}", from.name))
        } else if started.run > 1 {
            Some(format!("from the beginning, because there is no checkpoint; {reopened}"))
        } else {
            None
        }
    }
}
