//! A run that is open: settings, models, store, run folder and resume point. Only the engines are missing.

use super::{Failed, Start, Summary, identity, models::Models};
use crate::{
    check::{Forecast, Machine, Samples, Stored, examine, pipeline_settings::plan_settings},
    common::exit::{Exit, Failure},
    config::{Config, Loaded},
    data::{Split, Store, StoreSource},
    run_dir::{About, Opened, RunFolder, db::RunEnd},
};
use std::sync::Arc;

/// Everything that a run needs but the engines.
pub struct PreparedRun {
    pub loaded: Loaded,
    pub models: Option<Models>,
    pub store: Arc<Store>,
    pub source: StoreSource,
    pub lengths: Arc<[u32]>,
    pub machine: Machine,
    pub forecast: Forecast,
    pub opened: Opened,
}

impl PreparedRun {
    pub fn open(loaded: Loaded, start: Start) -> Result<PreparedRun, Failure> {
        let config = &loaded.config;
        let store = Arc::new(Store::open(&config.data.store).failed(Exit::Data)?);
        let lengths: Arc<[u32]> = store.lengths(Split::Train).into();
        let samples = Samples { lengths: lengths.to_vec(), validation: store.len(Split::Validation) };
        let machine = Machine { ask_port: false, ..Machine::detect(config) };
        let report = examine(&loaded, &machine, &Stored::Ready(samples)).sound()?;
        let forecast =
            report.plan.ok_or_else(|| Failure::new(Exit::Internal, "there is no forecast of a sound run"))?;
        let models = report.models.map(|(target, draft)| Models { target, draft });
        let plan = plan_settings(config, &forecast);
        let source = StoreSource::new(store.clone(), Split::Train);
        let mut identity = identity::of(config, &plan, &store, models.as_ref())?;
        if let Some(window) = forecast.pool.replay_window {
            // The order of the rest of an epoch follows from it.
            identity.insert("pool.replay_window".into(), window.to_string());
        }
        let folder = RunFolder::new(&config.run.dir);
        let about = About { identity, samples: lengths.len() as u64, fresh: start.fresh, force: start.force };
        let opened = folder.open(&loaded, &about)?;
        Ok(PreparedRun { loaded, models, store, source, lengths, machine, forecast, opened })
    }

    pub fn start_step(&self) -> u64 {
        self.opened.from.as_ref().map_or(0, |checkpoint| checkpoint.step)
    }

    /// The summary of a run that has nothing left to do.
    pub fn finished(&mut self) -> Result<Option<Summary>, Failure> {
        let path = self.opened.folder.summary();
        let Config { run, .. } = &self.loaded.config;
        let counts = self.opened.state.counts().failed(Exit::Run)?;
        let planned = (0..run.epochs).all(|epoch| counts.iter().any(|c| c.epoch == epoch && c.open() == 0));
        let done = planned || run.max_steps.is_some_and(|limit| self.start_step() >= limit);
        if !done || !path.exists() {
            return Ok(None);
        }
        let text = std::fs::read_to_string(&path).failed(Exit::Run)?;
        // Written by an earlier end, of fewer epochs, or damaged: then the end is written anew.
        let of_this_end = |s: &Summary| {
            s.finished && s.steps == self.start_step() && s.export_dir.as_ref().is_none_or(|dir| dir.exists())
        };
        let summary = serde_json::from_str::<Summary>(&text).ok().filter(of_this_end);
        if summary.is_some() {
            let end = if planned { RunEnd::Finished } else { RunEnd::StepLimit };
            let step = self.start_step();
            let Opened { state, begun, .. } = &mut self.opened;
            state.end_run(begun.run, &end, Some(step)).failed(Exit::Run)?;
        }
        Ok(summary)
    }

    pub fn workers(&self) -> (usize, usize) {
        (self.loaded.config.target.devices.len(), self.loaded.config.drafter.devices.len())
    }

    /// Where this start goes on; `None` at the beginning of a run.
    pub fn resumed(&self) -> Option<String> {
        let Opened { folder, state, from, begun, .. } = &self.opened;
        let reopened = match begun.reopened {
            1 => "1 job that ended after it is open again".to_owned(),
            n => format!("{n} jobs that ended after it are open again"),
        };
        if let Some(from) = from {
            let trained: u64 = state.counts().map_or(0, |counts| counts.iter().map(|c| c.trained).sum());
            let folder = folder.root().display();
            Some(format!("going on from checkpoint {} of {folder}, which holds {trained} jobs; {reopened}", from.name))
        } else if begun.run > 1 {
            Some(format!("no checkpoint was written yet, so the run begins again at its start; {reopened}"))
        } else {
            None
        }
    }
}
