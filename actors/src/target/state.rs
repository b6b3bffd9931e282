//! Decisions of a target, without waiting: judging results, counting failures, restarts, and permanent failure.

use crate::{
    dispatcher::Failure,
    messages::engine::{EngineError, FeatureShape, Features},
};
use std::time::Duration;

/// Limit on the doubling of restart pauses, as a multiple of the first pause.
const LONGEST_PAUSE: u32 = 64;

/// Settings of a target.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Failures in a row after which a target goes out of service: the target is broken, not its jobs.
    pub max_failures_in_a_row: u32,
    /// Restarts without a success between them after which a target has failed permanently.
    pub max_restarts: u32,
    /// Pause before the first restart; each further one doubles it.
    pub restart_pause: Duration,
}

/// Every decision of a target.
#[derive(Debug)]
pub struct State {
    settings: Settings,
    failures_in_a_row: u32,
    restarts_in_a_row: u32,
    first_cause: Option<String>,
}

/// Next step of a target that is out of service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovery {
    RestartAfter(Duration),
    /// Permanent failure, with the first cause.
    GiveUp(String),
}

impl State {
    pub fn new(settings: Settings) -> Self {
        Self { settings, failures_in_a_row: 0, restarts_in_a_row: 0, first_cause: None }
    }

    /// Judges the engine's result for a batch.
    ///
    /// # Errors
    ///
    /// Fails if the engine failed, or if shape, bytes or values are not as expected.
    pub fn judge<F: Features>(
        expected: FeatureShape,
        bytes: u64,
        result: Result<F, EngineError>,
    ) -> Result<F, (Failure, String)> {
        let features = result.map_err(|e| (Failure::Failed, e.to_string()))?;
        let (shape, held) = (features.shape(), features.bytes());
        if shape != expected {
            return Err((Failure::WrongShape, format!("the features have shape {shape:?}; expected {expected:?}")));
        }
        if held != bytes {
            return Err((Failure::WrongShape, format!("the features have {held} bytes; {bytes} were reserved")));
        }
        if !features.all_finite() {
            return Err((
                Failure::NonFinite,
                "the hidden states or label probabilities contain NaN or infinite values".into(),
            ));
        }
        Ok(features)
    }

    /// Counts a success: earlier failures no longer count.
    pub fn on_success(&mut self) {
        (self.failures_in_a_row, self.restarts_in_a_row, self.first_cause) = (0, 0, None);
    }

    /// Counts a failure; `lost` if the engine is unusable. Returns true if the target must go out of service.
    pub fn on_failure(&mut self, message: &str, lost: bool) -> bool {
        self.failures_in_a_row += 1;
        let out = lost || self.failures_in_a_row >= self.settings.max_failures_in_a_row;
        if out {
            let n = self.failures_in_a_row;
            let cause = if lost { message.into() } else { format!("{n} jobs failed in a row; last error: {message}") };
            self.first_cause.get_or_insert(cause);
        }
        out
    }

    /// Applies changed settings, from the next failure or restart on.
    pub fn reconfigure(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Decides the next step of a target that is out of service.
    pub fn recover(&mut self) -> Recovery {
        let Settings { max_restarts, max_failures_in_a_row, .. } = self.settings;
        if self.restarts_in_a_row >= max_restarts {
            let cause = self.first_cause.clone().unwrap_or_default();
            return Recovery::GiveUp(format!("{cause} ({max_restarts} restarts failed)"));
        }
        self.restarts_in_a_row += 1;
        // Probation: the next failure ends the service again, before more jobs fail.
        self.failures_in_a_row = max_failures_in_a_row.saturating_sub(1);
        Recovery::RestartAfter(self.pause())
    }

    /// Returns the pause before the next restart, after `recover` requested one.
    pub fn pause(&self) -> Duration {
        let doubled = 1 << self.restarts_in_a_row.saturating_sub(1).min(LONGEST_PAUSE.ilog2());
        self.settings.restart_pause.saturating_mul(doubled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{messages::engine::FeatureDtype, simulated::SimFeatures};

    const EXPECTED: FeatureShape = FeatureShape { tokens: 7, taps: 3, width: 16, dtype: FeatureDtype::Bf16 };

    fn judge(shape: FeatureShape, bytes: u64, finite: bool) -> Result<(), Failure> {
        let judged = State::judge(EXPECTED, 672, Ok(SimFeatures { shape, bytes, finite }));
        judged.map(|_| ()).map_err(|(failure, _)| failure)
    }

    #[test]
    fn only_what_was_expected_may_enter_the_pool() {
        assert_eq!(judge(EXPECTED, 672, true), Ok(()));
        let wrong = [
            FeatureShape { tokens: 6, ..EXPECTED },
            FeatureShape { taps: 2, ..EXPECTED },
            FeatureShape { width: 8, ..EXPECTED },
            FeatureShape { dtype: FeatureDtype::F32, ..EXPECTED },
        ];
        for shape in wrong {
            assert_eq!(judge(shape, 672, true), Err(Failure::WrongShape), "{shape:?}");
        }
        assert_eq!(judge(EXPECTED, 673, true), Err(Failure::WrongShape), "more bytes than were reserved");
        assert_eq!(judge(EXPECTED, 672, false), Err(Failure::NonFinite));
        let failed = State::judge::<SimFeatures>(EXPECTED, 672, Err(EngineError::Failed("no".into())));
        assert_eq!(failed.map(|_| ()), Err((Failure::Failed, "no".into())));
    }

    #[test]
    fn a_broken_target_is_restarted_with_growing_pauses_and_then_given_up() {
        let second = Duration::from_secs(1);
        let settings = Settings { max_failures_in_a_row: 3, max_restarts: 9, restart_pause: second };
        let mut state = State::new(settings);
        assert!(!state.on_failure("a", false) && !state.on_failure("b", false));
        state.on_success();
        assert!(!state.on_failure("c", false) && !state.on_failure("d", false), "in a row, not in all");
        assert!(state.on_failure("e", false));
        for doubled in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            assert_eq!(state.recover(), Recovery::RestartAfter(second * doubled));
        }
        let Recovery::GiveUp(cause) = state.recover() else { panic!("nine restarts are enough") };
        assert!(cause.contains("3 jobs failed in a row; last error: e"), "{cause}");
        assert!(State::new(settings).on_failure("the device is gone", true), "lost at once");
    }

    #[test]
    fn a_restarted_target_is_on_probation_until_a_job_succeeds() {
        let pause = Duration::from_secs(1);
        let mut state = State::new(Settings { max_failures_in_a_row: 3, max_restarts: 1, restart_pause: pause });
        assert!(state.on_failure("the first", true));
        state.recover();
        assert!(state.on_failure("the second", false), "the next failure takes it out again");
        let Recovery::GiveUp(cause) = state.recover() else { panic!("one restart is enough") };
        assert!(cause.contains("the first") && !cause.contains("the second"), "{cause}");
        state.on_success();
        assert!(!state.on_failure("a", false) && state.on_failure("the third", true));
        state.recover();
        let Recovery::GiveUp(cause) = state.recover() else { panic!("one restart is enough") };
        assert!(cause.contains("the third"), "what was wrong before is over: {cause}");
    }
}
