//! Pool: holds features between targets and drafters, bounded in bytes and batches.

mod actor;
mod messages;
pub mod replay;
mod settings;
pub mod state;
mod stats;

pub use actor::run;
pub use messages::{
    Batch, BytePermit, CheckedOutBatch, Handle, Inbox, PlanNoticeInbox, PlanNotices, Reservation, TooLarge, channel,
    plan_notices,
};
pub use settings::{Deadlock, DrawPolicy, Settings};
pub use state::RequestId;
pub use stats::Stats;
