//! The service: opens everything a run needs, starts the actors, and closes with the figures.

mod folder;
mod progress;
mod schedule;
mod steps;
mod summary;
