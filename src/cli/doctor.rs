//! `draftmill doctor`.

use super::{ConfigArgs, load, output};
use crate::{
    common::{
        exit::{Exit, Failure},
        text::counted,
    },
    doctor::{State, examine},
};
use clap::Args;

/// Checks this machine: libtorch, devices, copies between GPUs, memory, disk, limits
#[derive(Args, Debug)]
#[command(after_help = "\
Each device multiplies matrices, and doctor compares the products with plain arithmetic. Each GPU sends random bits to each other \
GPU. No model or data is needed. With a configuration, doctor also checks its run folder and its devices. The exit code is 7 if a \
check fails; each finding contains a remedy.

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

/// Prints one line per finding to stdout.
pub fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let chosen = args.config.config.is_some() || !args.config.set.is_empty();
    let report = examine(&load(&args.config)?, chosen);
    if args.json { output::print_json(&report) } else { output::print(&report.table()) }?;
    let [warnings, failed] = [State::Warning, State::Failed].map(|state| report.count(state));
    match report.exit() {
        Exit::Done if warnings == 0 => output::note("all checks passed"),
        Exit::Done => output::note(&format!("all checks passed, with {}", counted(warnings as u64, "warning"))),
        exit => {
            let all = counted(report.findings.len() as u64, "check");
            return Err(Failure::new(exit, format!("{failed} of {all} failed, see above")));
        }
    }
    Ok(())
}
