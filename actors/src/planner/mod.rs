//! Planner: owns the plan and the ledger.

mod actor;
pub mod buckets;
pub mod ledger;
mod messages;
mod outlet;
pub mod plan;
pub mod state;

pub use actor::run;
pub use messages::{Handle, IN_FLIGHT, Inbox, Msg, Settings, channel};
pub use state::Counts;
