//! Tests of import.
