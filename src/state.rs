//! The run's SQLite file: plans, outcomes, checkpoints.
