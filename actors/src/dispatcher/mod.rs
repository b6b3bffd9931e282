//! Dispatcher: the central queue from which targets pull.

mod actor;
mod forward_times;
mod messages;
mod queue;
pub mod state;

pub use actor::run;
pub use messages::{Failure, Feed, Handle, Inbox, Lease, LeaseId, PullId, Return, Settings, channel};
