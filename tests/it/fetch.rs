//! `scripts/fetch.py`, with a pip of our own that serves small wheels.
