//! Every way a command can end, with its exit code.
