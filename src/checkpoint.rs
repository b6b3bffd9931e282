//! Checkpoint folders: written whole or not at all.
