//! The engines behind the actors' seam.
