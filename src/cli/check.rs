//! `draftmill check`.

use super::{CheckArgs, output, prepare::stored};
use crate::{
    check::{Machine, Report, examine, examine_store},
    common::exit::Failure,
    config::{Loaded, Problems},
};

/// Prints problems to stderr and the forecast to stdout, or both as JSON to stdout.
pub fn run(args: &CheckArgs, loaded: Option<&Loaded>, problems: Problems) -> Result<(), Failure> {
    let mut report = Report::from(problems);
    if let Some(loaded) = loaded {
        let (stored, store) = stored(&loaded.config);
        let mut further = examine(loaded, &Machine::detect(&loaded.config), &stored);
        if let Some(store) = store {
            examine_store(loaded, &store, &mut further);
        }
        report.add(further);
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
