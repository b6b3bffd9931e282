//! `draftmill check`.

use super::{CheckArgs, output, prepare::stored};
use crate::{
    check::{Machine, Report, examine},
    common::exit::Failure,
    config::{Loaded, Problems},
};

/// Prints problems to stderr and the forecast to stdout, or both as JSON to stdout.
pub fn run(args: &CheckArgs, loaded: Option<&Loaded>, problems: Problems) -> Result<(), Failure> {
    let mut report = Report::from(problems);
    if let Some(loaded) = loaded {
        report.add(examine(loaded, &Machine::detect(&loaded.config), &stored(&loaded.config)));
    }
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.table())?;
        report.notes.iter().for_each(|note| output::note(&format!("note: {note}")));
    }
    report.sound()?;
    output::note("no problem found");
    Ok(())
}
