//! Exit codes of the program, and the error type that carries one.

use std::{
    fmt,
    io::{self, Write},
};

/// Result of the program. The number is the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exit {
    Done = 0,
    Internal = 1,
    Usage = 2,
    Config = 3,
    Data = 4,
    Model = 5,
    Run = 6,
    Machine = 7,
    Interrupted = 130,
}

/// Meaning of every exit code; the source of `--help` and of the documentation.
pub const EXITS: [(Exit, &str); 9] = [
    (Exit::Done, "done; also a run that SIGTERM stopped in order, with a checkpoint if training had begun"),
    (Exit::Internal, "internal error of draftmill or of the machine: please report it with the message"),
    (Exit::Usage, "wrong command line"),
    (Exit::Config, "bad configuration: stderr lists every problem with file, key, value and remedy"),
    (Exit::Data, "bad data: an input or the prepared store is unusable"),
    (Exit::Model, "bad model: a model folder, GGUF file, checkpoint or export is unusable"),
    (Exit::Run, "failed run: stderr has the first fault, finished checkpoints stay"),
    (Exit::Machine, "machine fault: draftmill doctor reports the failed part and its remedy"),
    (
        Exit::Interrupted,
        "interrupted by SIGINT, with a checkpoint if training had begun; or at once, by a second signal or at the end of shutdown.grace",
    ),
];

impl Exit {
    /// Exit code of the process.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Ends the process at once, without exit handlers of libraries.
    ///
    /// A blocking thread may still compute and cannot be cancelled. oneDNN's exit handler frees memory that the thread uses,
    /// and the crash would hide the exit code.
    pub fn leave(self) -> ! {
        // A failed flush has no remedy here.
        let _ = io::stdout().flush();
        // SAFETY: `_exit` takes an integer and does not return.
        unsafe { libc::_exit(self.code().into()) }
    }
}

/// Table of the exit codes for `--help`.
pub fn help() -> String {
    let lines = EXITS.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}", exit.code()));
    format!("Exit codes:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

/// Table of the exit codes as Markdown, for the documentation.
pub fn markdown() -> String {
    let lines = EXITS.iter().map(|(exit, meaning)| format!("| {} | {meaning} |\n", exit.code()));
    format!("| exit code | meaning |\n| --- | --- |\n{}", lines.collect::<String>())
}

/// Error that ends the program: a sentence for the user, and the exit code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub exit: Exit,
    pub message: String,
}

impl Failure {
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Failure { exit, message: message.to_string() }
    }

    /// For `map_err`: `read(path).map_err(Failure::of(Exit::Data))?`.
    pub fn of<E: fmt::Display>(exit: Exit) -> impl FnOnce(E) -> Failure {
        move |error| Failure::new(exit, error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_are_distinct_and_all_documented() {
        let codes: HashSet<_> = EXITS.iter().map(|(exit, _)| exit.code()).collect();
        assert_eq!(codes.len(), EXITS.len());
        for (exit, meaning) in EXITS {
            assert!(help().contains(&format!("{:>3}  {meaning}", exit.code())));
            assert!(markdown().contains(&format!("| {} | {meaning} |", exit.code())));
        }
    }
}
