//! Pool: holds features between targets and drafters, bounded in bytes and batches.

mod actor;
mod messages;
pub mod replay;
mod settings;
pub mod state;
mod stats;

pub use actor::run;
pub use messages::{
    Batch, Course, CourseInbox, Handle, Inbox, Loan, Peaks, RequestId, Reservation, Room, TooLarge, channel, course,
};
pub use settings::{Deadlock, Draw, Settings};
