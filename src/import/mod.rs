//! Turns a GGUF file into a Hugging Face folder.
