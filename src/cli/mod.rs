//! Command line: dispatches each command to its module. Data goes to stdout, everything else to stderr.

mod args;
mod check;
mod doctor;
mod eval;
mod export;
mod generate;
mod import;
mod interruptible;
mod json_lines;
mod ledger;
mod log_throttle;
mod log_writer;
mod logging;
mod numbers;
mod output;
mod prepare;
mod runs;
mod simulate;
mod train;

pub use self::args::{
    CheckArgs, Cli, Command, ConfigArgs, ExportArgs, GenerateArgs, ImportArgs, LedgerArgs, LogArgs, PrepareArgs,
    RunsArgs, SimulateArgs, TrainArgs, WhichCheckpoint,
};
pub use self::doctor::DoctorArgs;
pub use self::eval::EvalArgs;

use crate::{
    common::{
        exit::{Exit, Failure},
        process,
    },
    config::{self, Loaded, Log, Problems},
    service::Logs,
};
use clap::Parser;

/// Parses the command line, runs the command, and returns its exit code ([`crate::common::exit`]).
pub fn main() -> Exit {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap prints --help and --version to stdout, and mistakes to stderr.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage } else { Exit::Done };
        }
    };
    let ended = run(cli);
    log_throttle::flush();
    let exit = match ended {
        Ok(()) => Exit::Done,
        Err(failure) => {
            output::report_failure(&failure);
            failure.exit
        }
    };
    log_writer::flush();
    exit
}

/// Runs a command.
///
/// # Errors
/// The failure of the command, with its exit code.
pub fn run(cli: Cli) -> Result<(), Failure> {
    match &cli.command {
        Command::Import(args) => {
            logging::start(&cli.log, &Log::default())?;
            import::run(args)
        }
        Command::Generate(args) => {
            open_libtorch()?;
            logging::start(&cli.log, &Log::default())?;
            generate::run(args)
        }
        Command::Prepare(args) => prepare::run(args, &started(&cli.log, &args.config)?.0),
        Command::Check(args) => {
            open_libtorch()?;
            // A bad configuration is a finding, and its valid part is still checked.
            let (loaded, problems) = config::load_leniently(args.config.config.as_deref(), &args.config.set);
            let log = loaded.as_ref().map_or_else(Log::default, |loaded| loaded.config.log.clone());
            logging::start(&cli.log, &log)?;
            check::run(args, loaded.as_ref(), problems)
        }
        Command::Doctor(args) => {
            logging::start(&cli.log, &Log::default())?;
            doctor::run(args)
        }
        Command::Simulate(args) => {
            let loaded = load(&simulate::config(args))?;
            // A simulation covers weeks in seconds, so its log is off by default.
            logging::start(&cli.log, &Log { level: "off".into(), ..loaded.config.log.clone() })?;
            simulate::run(args, loaded)
        }
        Command::Train(args) => {
            // Until training listens to them: a start takes a while, and its default end is without a sentence.
            process::hold_stop_signals(true);
            open_libtorch()?;
            let (loaded, logs) = started(&cli.log, &args.config)?;
            train::run(args, loaded, logs)
        }
        Command::Runs(args) => {
            logging::start(&cli.log, &Log::default())?;
            runs::run(args)
        }
        Command::Ledger(args) => {
            logging::start(&cli.log, &Log::default())?;
            ledger::run(args)
        }
        Command::Eval(args) => {
            open_libtorch()?;
            logging::start(&cli.log, &Log::default())?;
            eval::run(args)
        }
        Command::Export(args) => {
            open_libtorch()?;
            logging::start(&cli.log, &Log::default())?;
            export::run(args)
        }
    }
}

/// Initialises libtorch before its first operation.
fn open_libtorch() -> Result<(), Failure> {
    #[cfg(feature = "torch")]
    crate::model::libtorch::init_libtorch().map_err(Failure::of(Exit::Internal))?;
    Ok(())
}

fn load(args: &ConfigArgs) -> Result<Loaded, Problems> {
    config::load(args.config.as_deref(), &args.set)
}

/// Reads the configuration and starts logging with its settings.
fn started(log: &LogArgs, args: &ConfigArgs) -> Result<(Loaded, Logs), Failure> {
    let loaded = load(args)?;
    let logs = logging::start(log, &loaded.config.log)?;
    Ok((loaded, logs))
}
