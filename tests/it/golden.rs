//! Tests of golden.
