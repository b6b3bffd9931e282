//! The ways in which the program can end: one exit code each, and an error that carries it.

use std::{
    fmt,
    io::{self, Write},
};

/// Why the program ends. The number is the exit code.
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

/// Every exit code with its meaning. `--help` and the documentation are made from it.
pub const EXITS: [(Exit, &str); 9] = [
    (Exit::Done, "done; also a run that SIGTERM stopped in good order, with a checkpoint where it had begun"),
    (Exit::Internal, "a fault of draftmill itself or of the machine: please report it with the message"),
    (Exit::Usage, "the command line is wrong"),
    (Exit::Config, "bad configuration: every problem is on stderr with file, key, value and remedy"),
    (Exit::Data, "bad data: an input or the prepared store cannot be used"),
    (Exit::Model, "bad model: a model folder, GGUF file, checkpoint or export cannot be used"),
    (Exit::Run, "the run failed: the first fault is on stderr, finished checkpoints stay"),
    (Exit::Machine, "the machine does not work: draftmill doctor tells what, and what helps"),
    (
        Exit::Interrupted,
        "interrupted: by SIGINT, with a checkpoint where the run had begun; or at once, by a second signal or when shutdown.grace was over",
    ),
];

impl Exit {
    pub fn code(self) -> u8 {
        self as u8
    }

    /// Ends the process at once. No library cleans up behind itself: oneDNN would free what a thread still computes with, which
    /// cannot be called back, and the process would crash instead of giving its code.
    pub fn leave(self) -> ! {
        // Nothing can be done about an error.
        let _ = io::stdout().flush();
        // SAFETY: takes a number, and does not come back.
        unsafe { libc::_exit(self.code().into()) }
    }
}

/// The table as it stands under `--help`.
pub fn help() -> String {
    let lines = EXITS.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}", exit.code()));
    format!("Exit codes:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

/// The table as Markdown, for the documentation.
pub fn markdown() -> String {
    let lines = EXITS.iter().map(|(exit, meaning)| format!("| {} | {meaning} |\n", exit.code()));
    format!("| exit code | meaning |\n| --- | --- |\n{}", lines.collect::<String>())
}

/// An error that ends the program: a sentence for a person, and the exit code.
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
