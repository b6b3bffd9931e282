//! Hugging Face model folders: configurations and weights on disk.
