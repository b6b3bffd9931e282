//! The command line: what can be asked for, and who answers. Data goes to stdout, everything else to stderr.

mod args;
mod logging;
mod output;

pub use self::args::{
    CheckArgs, Cli, Command, ConfigArgs, ExportArgs, ImportArgs, LogArgs, PrepareArgs, TrainArgs, WhichCheckpoint,
};

use crate::exit::{Exit, Failure};
use clap::Parser;
use std::process::ExitCode;

/// The whole program: reads the command line, does it, and ends with one of the codes of [`crate::exit`].
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // To stdout for --help and --version, to stderr for mistakes.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Done.into() };
        }
    };
    match run(cli) {
        Ok(()) => Exit::Done.into(),
        Err(failure) => {
            output::complain(&failure);
            failure.exit.into()
        }
    }
}

/// Does what was asked for.
pub fn run(_cli: Cli) -> Result<(), Failure> {
    Ok(())
}
