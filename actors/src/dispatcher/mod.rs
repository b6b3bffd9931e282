//! Dispatcher: the central queue from which targets pull.

mod actor;
mod forward_times;
mod messages;
pub mod state;

pub use actor::run;
pub use messages::{Failure, Feed, Handle, Inbox, Lease, LeaseId, Policy, PullId, Return, Settings, channel};
