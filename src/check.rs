//! Validates everything and runs nothing.
