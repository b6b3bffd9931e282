//! `draftmill doctor`.

use super::{ConfigArgs, load, output};
use crate::{
    common::exit::{Exit, Failure},
    doctor::{State, examine},
};
use clap::Args;

/// Tells what this machine is and whether it works: libtorch, devices, copies between GPUs, memory, disk, limits
#[derive(Args, Debug)]
#[command(after_help = "\
Each device multiplies matrices, which are held to plain arithmetic; each GPU sends random bits to each other one. No model and no \
data are needed. With a configuration its run folder is looked at, and the devices that it names have to be there. Ends with 7 \
where something does not work; each line says what helps.

Examples:
  draftmill doctor
  draftmill doctor --config my.toml --json | jq '.findings[] | select(.state != \"ok\")'")]
pub struct DoctorArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Write the findings to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// One line for each part of the machine on stdout.
pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let chosen = args.config.config.is_some() || !args.config.set.is_empty();
    let report = examine(&load(&args.config)?, chosen);
    if args.json { output::print_json(&report) } else { output::print(&report.table()) }?;
    let [warnings, failed] = [State::Warning, State::Failed].map(|state| report.count(state));
    match report.exit() {
        Exit::Done if warnings == 0 => output::tell("everything works"),
        Exit::Done if warnings == 1 => output::tell("everything works; there is a warning"),
        Exit::Done => output::tell(&format!("everything works; there are {warnings} warnings")),
        exit => {
            let all = report.findings.len();
            return Err(Failure::new(exit, format!("{failed} of {all} parts of this machine do not work, see above")));
        }
    }
    Ok(())
}
