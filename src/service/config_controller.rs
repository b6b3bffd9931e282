//! The keeper of the settings in force: watches the configuration file, takes orders, and steers the running mill.
//!
//! In: the file (looked at every `reload.poll`, and on SIGHUP), orders. Out: other settings for the actors and for what else reads
//! them, facts, metrics, log lines, rows of `state.db`. A change is taken as a whole or not at all.

use super::reload::{Ground, Verdict};
use crate::{
    admin::{
        commands::{Given, Order},
        run_info::{Acceptance, Facts, Reload},
    },
    check::pipeline_settings::{Place, mill_settings},
    common::clock::now,
    run_dir::{RunFolder, hash},
};
use crate::{
    config::{self, Config, Loaded, Source, annotated},
    engines::checkpointing::Kept,
    run_dir::{db::STEP_SIZE, eval_log::History},
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

/// Between two looks at a file that is being written.
const SETTLE: Duration = Duration::from_millis(50);
/// Looks after which a file that still changes is taken as it is.
const LOOKS: usize = 20;
/// Looks in a row that find no file before that is told: editors take it away for a moment.
const MISSING: u32 = 3;

/// Notes that wait for a disk that hangs.
const NOTES: usize = 1000;

/// Changes the filter of the log.
pub type SetLevel = Arc<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Where the settings come from, and who has to hear of changes.
pub struct Keeper {
    pub source: Source,
    pub ground: Ground,
    pub lengths: Arc<[u32]>,
    pub folder: RunFolder,
    pub steering: ControlHandle,
    /// The settings in force, for whoever is no actor, and what of them a checkpoint minds.
    pub in_force: watch::Sender<Loaded>,
    pub kept: watch::Sender<Kept>,
    pub facts: watch::Sender<Facts>,
    /// `None` where the command line fixes the level.
    pub set_level: Option<SetLevel>,
    pub orders: mpsc::Receiver<Given>,
    pub hangup: Signal,
    /// How far the run is.
    pub place: watch::Receiver<Place>,
    /// What is measured beside the steps.
    pub measured: watch::Receiver<History>,
    /// On their way to state.db.
    pub notes: VecDeque<Note>,
}

/// What was found at the last look at the file.
#[derive(Default)]
struct Seen {
    text: Option<String>,
    missing: u32,
}

impl Keeper {
    /// Runs until `ended`.
    pub async fn run(mut self, close: CancellationToken, ended: CancellationToken) {
        self.publish();
        let mut seen = Seen::default();
        let mut looked = Instant::now();
        let mut stopping = false;
        loop {
            self.hand_over();
            let poll = self.in_force.borrow().config.reload.poll.0;
            tokio::select! {
                biased;
                () = ended.cancelled() => return,
                () = close.cancelled(), if !stopping => {
                    stopping = true;
                    self.facts.send_modify(|facts| facts.stopping = true);
                }
                Some(given) = self.orders.recv() => self.on_order(given, &mut seen, stopping).await,
                // Where nothing is measured, or nothing more, the channel is closed.
                Ok(()) = self.measured.changed() => self.on_measured(),
                _ = self.hangup.recv() => {
                    tracing::info!("SIGHUP: reading the configuration again");
                    // The log tells what came of it.
                    let _ = self.reload(&mut seen).await;
                }
                () = sleep_until(looked + poll), if poll > Duration::ZERO && self.source.file.is_some() => {
                    looked = Instant::now();
                    self.look(&mut seen).await;
                }
            }
        }
    }

    async fn on_order(&mut self, Given { order, answer }: Given, seen: &mut Seen, stopping: bool) {
        let answered = match order {
            Order::Reload => self.reload(seen).await,
            Order::Checkpoint => {
                let Err(answer) = self.steering.checkpoint(answer) else { return };
                // Who asked may be gone, here and below.
                let _ = answer
                    .send(Err("the run is ending, or too many checkpoints were asked for; ask again later".into()));
                return;
            }
            Order::Pause | Order::Resume if stopping => Err("the run is ending".into()),
            Order::Pause => self.pause(true),
            Order::Resume => self.pause(false),
        };
        let _ = answer.send(answered);
    }

    /// Tells of the newest measure.
    fn on_measured(&mut self) {
        let history = self.measured.borrow_and_update().clone();
        self.facts.send_modify(|facts| facts.acceptance = Acceptance::of(&history));
        if let Some(measured) = history.0.last() {
            self.note(Note::Event { kind: "measured".into(), text: measured.to_string() });
        }
    }

    fn pause(&mut self, paused: bool) -> Result<String, String> {
        let was = self.facts.borrow().paused;
        let text = match (was, paused) {
            (true, true) => "the run is paused already",
            (false, false) => "the run is not paused",
            (false, true) => "paused: no further job is handed out, and what is under way is finished; resume goes on",
            (true, false) => "going on: jobs are handed out again",
        };
        if was != paused {
            tracing::info!("{text}");
            self.note(Note::Event { kind: if paused { "paused" } else { "resumed" }.into(), text: text.into() });
            self.facts.send_modify(|facts| facts.paused = paused);
            gauge!(m::PAUSED).set(f64::from(u8::from(paused)));
            self.steer();
        }
        Ok(text.into())
    }

    /// Looks whether the file changed since the last look.
    async fn look(&mut self, seen: &mut Seen) {
        let Some(path) = self.source.file.clone() else { return };
        match read(path).await {
            Ok(text) => {
                seen.missing = 0;
                if seen.text.as_ref() != Some(&text) {
                    let text = self.settled(text).await;
                    let first = seen.text.replace(text.clone()).is_none();
                    // Between the start and the first look it may have changed, too; mostly it has not.
                    let _ = self.take(&text, first);
                }
            }
            Err(error) => {
                seen.missing += 1;
                if seen.missing == MISSING {
                    let _ = self.refuse(error);
                }
            }
        }
    }

    /// Reads the file now, whether it changed or not.
    async fn reload(&mut self, seen: &mut Seen) -> Result<String, String> {
        let Some(path) = self.source.file.clone() else {
            return Err("the service was started without --config, so there is no file to read again".into());
        };
        match read(path).await {
            Ok(text) => {
                let text = self.settled(text).await;
                *seen = Seen { text: Some(text.clone()), missing: 0 };
                self.take(&text, false)
            }
            Err(error) => self.refuse(error),
        }
    }

    /// The text of the file once it rests: a file that is written in place is half there for a moment.
    async fn settled(&self, mut text: String) -> String {
        for _ in 0..LOOKS {
            sleep(SETTLE).await;
            let Some(path) = self.source.file.clone() else { break };
            match read(path).await {
                Ok(now) if now == text => break,
                Ok(now) => text = now,
                Err(_) => {}
            }
        }
        text
    }

    /// Puts the configuration in force that `text` says, with what the command line sets over it, or tells why not.
    fn take(&mut self, text: &str, quietly: bool) -> Result<String, String> {
        let name = self.source.file.as_ref().map_or_else(String::new, |path| path.display().to_string());
        let new = match config::load_text(text, &name, &self.source.sets) {
            Ok(new) => new,
            Err(problems) => return self.refuse(problems.to_string()),
        };
        let verdict = self.ground.judge(&self.in_force.borrow(), &new);
        match verdict {
            Verdict::Refused(problems) => self.refuse(problems.to_string()),
            Verdict::Unchanged => {
                let text = "the configuration says what is in force already";
                if !quietly {
                    tracing::info!("{text}");
                    counter!(m::CONFIG_RELOADS, "result" => "unchanged").increment(1);
                }
                // The lines may be others.
                self.in_force.send_replace(new);
                Ok(text.into())
            }
            Verdict::Applied(mut changes) => {
                let sizes = [&self.in_force.borrow().config, &new.config].map(Config::micro_batches_per_step);
                if sizes[0] != sizes[1] {
                    let [old, new] = sizes.map(|size| size.to_string());
                    changes.push(Change { key: STEP_SIZE.into(), old, new });
                }
                let list: Vec<_> = changes.iter().map(|c| format!("{}: {} -> {}", c.key, c.old, c.new)).collect();
                let list = list.join("; ");
                let step = self.place.borrow().step;
                if changes.iter().any(|change| change.key == "log.level") {
                    self.set_level(&new.config.log.level);
                }
                if let Err(error) = self.folder.keep_config(&annotated(&new.written.wire)) {
                    tracing::warn!(%error, "run.toml could not be written; it says what was in force before");
                }
                self.in_force.send_replace(new);
                self.steer();
                self.publish();
                counter!(m::CONFIG_RELOADS, "result" => "applied").increment(1);
                tracing::info!(step, "settings changed: {list}");
                self.note(Note::Changed { step, changes });
                self.remember(true, &list);
                Ok(format!("applied after step {step}: {list}"))
            }
        }
    }

    fn set_level(&self, level: &str) {
        match &self.set_level {
            None => tracing::info!("log.level has no effect beside -v or --log-level"),
            Some(set) => {
                if let Err(error) = set(level) {
                    tracing::warn!(error, "log.level could not be changed");
                }
            }
        }
    }

    fn refuse(&mut self, why: String) -> Result<String, String> {
        counter!(m::CONFIG_RELOADS, "result" => "refused").increment(1);
        tracing::warn!("the changed configuration is refused as a whole, and the settings stay as they are: {why}");
        self.note(Note::Event { kind: "reload-refused".into(), text: why.clone() });
        self.remember(false, &why);
        Err(format!("refused, the settings stay as they are: {why}"))
    }

    /// Tells the actors what is in force.
    fn steer(&self) {
        let (in_force, place) = (self.in_force.borrow(), *self.place.borrow());
        let mut settings = mill_settings(&in_force.config, &self.ground.forecast, &self.lengths, place);
        settings.dispatcher.paused = self.facts.borrow().paused;
        self.steering.change(&settings);
    }

    /// Tells everybody else: checkpoints, facts, metrics.
    fn publish(&self) {
        let in_force = self.in_force.borrow();
        let (config, place) = (&in_force.config, *self.place.borrow());
        let text = annotated(&in_force.written.wire);
        self.kept.send_replace(Kept::of(&in_force));
        let (hash, since) = (hash(&text), now());
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
        let planned_steps = self.ground.planned_steps(config, place.step, place.micro_batches);
        gauge!(m::PLANNED_STEPS).set(planned_steps as f64);
        self.facts.send_modify(|facts| {
            facts.planned_steps = planned_steps;
            (facts.config_hash, facts.config_since) = (hash, since);
        });
    }

    fn remember(&self, applied: bool, text: &str) {
        self.facts.send_modify(|facts| facts.reloaded(Reload { at: now(), applied, text: text.into() }));
    }

    fn note(&mut self, note: Note) {
        match self.notes.len() < NOTES {
            true => self.notes.push_back(note),
            false => tracing::warn!(?note, "this cannot be kept in state.db: the disk hangs"),
        }
        self.hand_over();
    }

    /// Gives notes to the planner; those that it cannot take now wait.
    fn hand_over(&mut self) {
        while let Some(note) = self.notes.pop_front() {
            if let Err(note) = self.steering.note(note) {
                self.notes.push_front(note);
                return;
            }
        }
    }
}

/// The text of the configuration file, or a sentence.
async fn read(path: PathBuf) -> Result<String, String> {
    let name = path.display().to_string();
    let read = move || {
        // Opening a pipe would wait for its other end.
        match std::fs::metadata(&path)?.is_file() {
            true => config::read_text(&path),
            false => Err(io::Error::other("it is not a regular file")),
        }
    };
    let text = tokio::task::spawn_blocking(read).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    text.map_err(|error| {
        format!("the configuration file {name} cannot be read: {error}; put it back, or mend its permissions")
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
    async fn the_gauge_and_the_actors_follow_a_pause() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let metrics = recorder.handle();
        let _recording = metrics::set_default_local_recorder(&recorder);
        let loaded =
            load_text("[run]\nengine = \"simulated\"\n[simulate]\nfeature_bytes_per_token = \"1 KiB\"", "x.toml", &[])
                .unwrap();
        let lengths: Arc<[u32]> = (40..340).collect();
        let forecast = forecast(&loaded.config, &lengths, None).unwrap();
        let machine = Machine::detect(&loaded.config);
        let (steering, steered) = ControlHandle::new(&mill_settings(&loaded.config, &forecast, &lengths, Place::default()));
        let folder = tempfile::tempdir().unwrap();
        let (orders, given) = commands::channel();
        let (facts, told) = watch::channel(Facts::default());
        let (_reached, place) = watch::channel(Place::default());
        let keeper = Keeper {
            source: Source::default(),
            ground: Ground { forecast, machine },
            lengths,
            folder: RunFolder::new(folder.path()),
            steering,
            kept: watch::channel(Kept::of(&loaded)).0,
            in_force: watch::channel(loaded).0,
            facts,
            set_level: None,
            orders: given,
            hangup: signal(SignalKind::hangup()).unwrap(),
            place,
            measured: watch::channel(History::default()).1,
            notes: VecDeque::new(),
        };
        let (close, ended) = (CancellationToken::new(), CancellationToken::new());
        let keeping = tokio::spawn(keeper.run(close.clone(), ended.clone()));
        let dispatcher = steered.dispatcher_settings();
        for (order, paused) in
            [(Order::Pause, true), (Order::Pause, true), (Order::Resume, false), (Order::Pause, true)]
        {
            orders.give(order).await.unwrap();
            let gauge = format!("{} {}\n", m::PAUSED, u8::from(paused));
            assert!(metrics.render().contains(&gauge), "{gauge} is not in {}", metrics.render());
            assert_eq!((told.borrow().paused, dispatcher.borrow().paused), (paused, paused));
        }
        close.cancel();
        while !told.borrow().stopping {
            tokio::task::yield_now().await;
        }
        assert!(orders.give(Order::Resume).await.unwrap_err().contains("ending"));
        ended.cancel();
        keeping.await.unwrap();
    }
}
