//! `draftmill check`.
