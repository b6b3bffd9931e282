//! Configuration controller: applies a changed configuration file and commands to the running pipeline.
//!
//! Inputs: the file (read every `reload.poll`, and on SIGHUP) and commands. Outputs: settings for the actors and their other
//! readers, run info, metrics, log lines, rows of `state.db`. A change is applied completely or not at all.

use super::reload::{ReloadDecision, ReloadPolicy};
use crate::{
    admin::{
        commands::{Command, Request},
        run_info::{Acceptance, Reload, RunInfo},
    },
    check::pipeline_settings::{RunProgress, pipeline_settings},
    common::clock::now,
    run_dir::RunDir,
};
use crate::{
    config::{self, Config, Loaded, Source, annotated},
    engines::checkpointing::CheckpointSettings,
    run_dir::{db::STEP_SIZE, eval_log::EvalHistory},
};
use draftmill_actors::{
    pipeline::ControlHandle,
    planner::ledger::{Change, Note},
    runtime::metrics as m,
};
use metrics::{counter, gauge};
use std::{collections::VecDeque, io, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    signal::unix::Signal,
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

/// Interval between two reads of a file that is being written.
const SETTLE_INTERVAL: Duration = Duration::from_millis(50);
/// Limit of reads of a changing file; then its current text is used.
const MAX_READS: usize = 20;
/// Consecutive reads without a file before it is reported as missing. Editors remove a file for a moment.
const MISSING_READS: u32 = 3;

/// Limit of notes that wait for the planner.
const MAX_NOTES: usize = 1000;

/// Sets the log filter.
pub type SetLevel = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Configuration controller of one run: its inputs and outputs.
pub struct ConfigController {
    pub source: Source,
    pub policy: ReloadPolicy,
    pub lengths: Arc<[u32]>,
    pub folder: RunDir,
    pub control: ControlHandle,
    /// Settings in force, for readers that are not actors.
    pub in_force: watch::Sender<Loaded>,
    pub checkpoint_settings: watch::Sender<CheckpointSettings>,
    pub info: watch::Sender<RunInfo>,
    /// `None` if the command line fixes the level.
    pub set_level: Option<SetLevel>,
    pub commands: mpsc::Receiver<Request>,
    pub hangup: Signal,
    /// Position of the run.
    pub position: watch::Receiver<RunProgress>,
    /// Results of the evaluations during training.
    pub evaluations: watch::Receiver<EvalHistory>,
    /// Notes that wait for the planner, which writes them to state.db.
    pub notes: VecDeque<Note>,
}

/// Result of the last read of the file.
#[derive(Default)]
struct Seen {
    text: Option<String>,
    missing: u32,
}

impl ConfigController {
    /// Runs until `ended`.
    pub async fn run(mut self, close: CancellationToken, ended: CancellationToken) {
        self.publish();
        let mut seen = Seen::default();
        let mut last_poll = Instant::now();
        let mut stopping = false;
        loop {
            self.flush_notes();
            let poll = self.in_force.borrow().config.reload.poll.0;
            tokio::select! {
                biased;
                () = ended.cancelled() => return,
                () = close.cancelled(), if !stopping => {
                    stopping = true;
                    self.info.send_modify(|info| info.stopping = true);
                }
                Some(request) = self.commands.recv() => self.on_request(request, &mut seen, stopping).await,
                // Closed if there are no further evaluations.
                Ok(()) = self.evaluations.changed() => self.on_evaluation(),
                _ = self.hangup.recv() => {
                    tracing::info!("SIGHUP received; reloading the configuration");
                    // The log has the result.
                    let _ = self.reload(&mut seen).await;
                }
                () = sleep_until(last_poll + poll), if poll > Duration::ZERO && self.source.file.is_some() => {
                    last_poll = Instant::now();
                    self.poll(&mut seen).await;
                }
            }
        }
    }

    async fn on_request(&mut self, Request { command, reply }: Request, seen: &mut Seen, stopping: bool) {
        let result = match command {
            Command::Reload => self.reload(seen).await,
            Command::Checkpoint => {
                let Err(reply) = self.control.checkpoint(reply) else { return };
                // The client may have disconnected, here and below.
                let _ =
                    reply.send(Err("the run is ending, or too many checkpoints are queued; try again later".into()));
                return;
            }
            Command::Pause | Command::Resume if stopping => Err("the run is ending".into()),
            Command::Pause => self.pause(true),
            Command::Resume => self.pause(false),
        };
        let _ = reply.send(result);
    }

    /// Publishes the newest evaluation.
    fn on_evaluation(&mut self) {
        let history = self.evaluations.borrow_and_update().clone();
        self.info.send_modify(|info| info.acceptance = Acceptance::of(&history));
        if let Some(evaluation) = history.0.last() {
            self.note(Note::Event { kind: "evaluated".into(), text: evaluation.to_string() });
        }
    }

    fn pause(&mut self, paused: bool) -> Result<String, String> {
        let was = self.info.borrow().paused;
        let text = match (was, paused) {
            (true, true) => "the run is paused already",
            (false, false) => "the run is not paused",
            (false, true) => "paused: targets get no new jobs, jobs in progress are finished",
            (true, false) => "resumed: targets get jobs again",
        };
        if was != paused {
            let kind = if paused { "paused" } else { "resumed" };
            tracing::info!("run {kind}");
            self.note(Note::Event { kind: kind.into(), text: text.into() });
            self.info.send_modify(|info| info.paused = paused);
            gauge!(m::PAUSED).set(f64::from(u8::from(paused)));
            self.apply();
        }
        Ok(text.into())
    }

    /// Reads the file and applies it if it changed since the last read.
    async fn poll(&mut self, seen: &mut Seen) {
        let Some(path) = self.source.file.clone() else { return };
        match read(path).await {
            Ok(text) => {
                seen.missing = 0;
                if seen.text.as_ref() != Some(&text) {
                    let text = self.settled(text).await;
                    let first = seen.text.replace(text.clone()).is_none();
                    // The first read may find a change since the start; without one it stays silent.
                    let _ = self.load(&text, first);
                }
            }
            Err(error) => {
                seen.missing += 1;
                if seen.missing == MISSING_READS {
                    let _ = self.refuse(error);
                }
            }
        }
    }

    /// Reads and applies the file now.
    async fn reload(&mut self, seen: &mut Seen) -> Result<String, String> {
        let Some(path) = self.source.file.clone() else {
            return Err("the service was started without --config: there is no file to reload".into());
        };
        match read(path).await {
            Ok(text) => {
                let text = self.settled(text).await;
                *seen = Seen { text: Some(text.clone()), missing: 0 };
                self.load(&text, false)
            }
            Err(error) => self.refuse(error),
        }
    }

    /// Text of the file after it stops changing. A file that is written in place is incomplete for a moment.
    async fn settled(&self, mut text: String) -> String {
        for _ in 0..MAX_READS {
            sleep(SETTLE_INTERVAL).await;
            let Some(path) = self.source.file.clone() else { break };
            match read(path).await {
                Ok(now) if now == text => break,
                Ok(now) => text = now,
                Err(_) => {}
            }
        }
        text
    }

    /// Applies the configuration `text` with the command line's settings, or returns the reason of the refusal. With `quiet`, an
    /// unchanged configuration is not logged.
    fn load(&mut self, text: &str, quiet: bool) -> Result<String, String> {
        let name = self.source.file.as_ref().map_or_else(String::new, |path| path.display().to_string());
        let new = match config::load_text(text, &name, &self.source.sets) {
            Ok(new) => new,
            Err(problems) => return self.refuse(problems.to_string()),
        };
        let decision = self.policy.decide(&self.in_force.borrow(), &new);
        match decision {
            ReloadDecision::Refused(problems) => self.refuse(problems.to_string()),
            ReloadDecision::Unchanged => {
                let text = "configuration unchanged";
                if !quiet {
                    tracing::info!("{text}");
                    counter!(m::CONFIG_RELOADS, "result" => "unchanged").increment(1);
                }
                // Line numbers may have changed.
                self.in_force.send_replace(new);
                Ok(text.into())
            }
            ReloadDecision::Applied(mut changes) => {
                let sizes = [&self.in_force.borrow().config, &new.config].map(Config::micro_batches_per_step);
                if sizes[0] != sizes[1] {
                    let [old, new] = sizes.map(|size| size.to_string());
                    changes.push(Change { key: STEP_SIZE.into(), old, new });
                }
                let list: Vec<_> = changes.iter().map(|c| format!("{}: {} -> {}", c.key, c.old, c.new)).collect();
                let list = list.join("; ");
                let step = self.position.borrow().step;
                if changes.iter().any(|change| change.key == "log.level") {
                    self.set_level(&new.config.log.level);
                }
                if let Err(error) = self.folder.write_config(&annotated(&new.written.wire)) {
                    tracing::warn!(%error, "run.toml not written; it has the previous settings");
                }
                self.in_force.send_replace(new);
                self.apply();
                self.publish();
                counter!(m::CONFIG_RELOADS, "result" => "applied").increment(1);
                tracing::info!(step, changes = %list, "settings changed");
                self.note(Note::Changed { step, changes });
                self.record_reload(true, &list);
                Ok(format!("applied after step {step}: {list}"))
            }
        }
    }

    fn set_level(&self, level: &str) {
        match &self.set_level {
            None => tracing::info!("log.level has no effect with -v or --log-level"),
            Some(set) => {
                if let Err(error) = set(level) {
                    tracing::warn!(error, "log.level not changed");
                }
            }
        }
    }

    fn refuse(&mut self, reason: String) -> Result<String, String> {
        counter!(m::CONFIG_RELOADS, "result" => "refused").increment(1);
        tracing::warn!(%reason, "configuration refused; the settings are unchanged");
        self.note(Note::Event { kind: "reload-refused".into(), text: reason.clone() });
        self.record_reload(false, &reason);
        Err(format!("the settings are unchanged: {reason}"))
    }

    /// Sends the settings in force to the actors.
    fn apply(&self) {
        let (in_force, position) = (self.in_force.borrow(), *self.position.borrow());
        let mut settings = pipeline_settings(&in_force.config, &self.policy.forecast, &self.lengths, position);
        settings.dispatcher.paused = self.info.borrow().paused;
        self.control.change(&settings);
    }

    /// Publishes the settings in force to checkpoints, run info and metrics.
    fn publish(&self) {
        let in_force = self.in_force.borrow();
        let (config, position) = (&in_force.config, *self.position.borrow());
        let text = annotated(&in_force.written.wire);
        self.checkpoint_settings.send_replace(CheckpointSettings::new(&in_force));
        let (hash, since) = (crate::common::hash::sha256(&text), now());
        gauge!(m::CONFIG_HASH).set(u64::from_str_radix(&hash[..12], 16).unwrap_or_default() as f64);
        gauge!(m::CONFIG_APPLIED).set(since);
        for (name, workers, paused) in [
            (m::TARGET_PAUSED, config.target.devices.len(), &config.target.paused),
            (m::DRAFTER_PAUSED, config.drafter.devices.len(), &config.drafter.paused),
        ] {
            for index in 0..workers {
                gauge!(name, "index" => index.to_string()).set(f64::from(u8::from(paused.contains(&index))));
            }
        }
        let planned_steps = self.policy.planned_steps(config, position.step, position.micro_batches);
        gauge!(m::PLANNED_STEPS).set(planned_steps as f64);
        self.info.send_modify(|info| {
            info.planned_steps = planned_steps;
            (info.config_hash, info.config_since) = (hash, since);
        });
    }

    fn record_reload(&self, applied: bool, text: &str) {
        self.info.send_modify(|info| info.add_reload(Reload { at: now(), applied, text: text.into() }));
    }

    fn note(&mut self, note: Note) {
        match self.notes.len() < MAX_NOTES {
            true => self.notes.push_back(note),
            false => tracing::warn!(?note, "event not recorded in state.db: the disk hangs"),
        }
        self.flush_notes();
    }

    /// Sends notes to the planner until its queue is full.
    fn flush_notes(&mut self) {
        while let Some(note) = self.notes.pop_front() {
            if let Err(note) = self.control.note(note) {
                self.notes.push_front(note);
                return;
            }
        }
    }
}

/// Text of the configuration file, or a sentence with the reason and the remedy.
async fn read(path: PathBuf) -> Result<String, String> {
    let name = path.display().to_string();
    let read = move || {
        // Opening a pipe would wait for its other end.
        match std::fs::metadata(&path)?.is_file() {
            true => config::read_text(&path),
            false => Err(io::Error::other("not a regular file")),
        }
    };
    let text = tokio::task::spawn_blocking(read).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    text.map_err(|error| {
        format!("the configuration file {name} cannot be read: {error}; restore it, or correct its permissions")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        admin::commands,
        check::{Machine, forecast},
        config::load_text,
    };
    use metrics_exporter_prometheus::PrometheusBuilder;
    use tokio::signal::unix::{SignalKind, signal};

    #[tokio::test]
    async fn gauge_and_actors_follow_a_pause() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let metrics = recorder.handle();
        let _recording = metrics::set_default_local_recorder(&recorder);
        let loaded =
            load_text("[run]\nengine = \"simulated\"\n[simulate]\nfeature_bytes_per_token = \"1 KiB\"", "x.toml", &[])
                .unwrap();
        let lengths: Arc<[u32]> = (40..340).collect();
        let forecast = forecast(&loaded.config, &lengths, None).unwrap();
        let machine = Machine::detect(&loaded.config);
        let (control, inbox) =
            ControlHandle::new(&pipeline_settings(&loaded.config, &forecast, &lengths, RunProgress::default()));
        let folder = tempfile::tempdir().unwrap();
        let (commands, requests) = commands::channel();
        let (info, published) = watch::channel(RunInfo::default());
        let (_reached, position) = watch::channel(RunProgress::default());
        let controller = ConfigController {
            source: Source::default(),
            policy: ReloadPolicy { forecast, machine },
            lengths,
            folder: RunDir::new(folder.path()),
            control,
            checkpoint_settings: watch::channel(CheckpointSettings::new(&loaded)).0,
            in_force: watch::channel(loaded).0,
            info,
            set_level: None,
            commands: requests,
            hangup: signal(SignalKind::hangup()).unwrap(),
            position,
            evaluations: watch::channel(EvalHistory::default()).1,
            notes: VecDeque::new(),
        };
        let (close, ended) = (CancellationToken::new(), CancellationToken::new());
        let task = tokio::spawn(controller.run(close.clone(), ended.clone()));
        let dispatcher = inbox.dispatcher_settings();
        for (command, paused) in
            [(Command::Pause, true), (Command::Pause, true), (Command::Resume, false), (Command::Pause, true)]
        {
            commands.send(command).await.unwrap();
            let gauge = format!("{} {}\n", m::PAUSED, u8::from(paused));
            assert!(metrics.render().contains(&gauge), "{gauge} is not in {}", metrics.render());
            assert_eq!((published.borrow().paused, dispatcher.borrow().paused), (paused, paused));
        }
        close.cancel();
        while !published.borrow().stopping {
            tokio::task::yield_now().await;
        }
        assert!(commands.send(Command::Resume).await.unwrap_err().contains("ending"));
        ended.cancel();
        task.await.unwrap();
    }
}
