//! Pipeline: starts every actor, supervises them, and carries changed settings to them.

mod control;
mod settings;
mod supervisor;

pub use control::{ControlHandle, ControlInbox};
pub use settings::Settings;
pub use supervisor::{Parts, Report, run, run_with_control};
