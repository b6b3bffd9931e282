//! Writing to stdout and stderr without a panic where the reader has gone (`draftmill check | head`).

use crate::exit::{Exit, Failure};
use serde::Serialize;
use std::io::{ErrorKind, Write, stderr, stdout};

/// Writes data to stdout. A reader that has seen enough is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(Exit::Internal, format!("stdout cannot be written to: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes a value to stdout as indented JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::of(Exit::Internal))?;
    print(&(text + "\n"))
}

/// Tells a person on stderr why the program ends. Best effort: there is nowhere else to complain.
pub fn complain(failure: &Failure) {
    let mut err = stderr().lock();
    let _ = match failure.message.contains('\n') {
        true => writeln!(err, "error:\n{}", failure.message),
        false => writeln!(err, "error: {}", failure.message),
    };
}

/// A line for a person, on stderr. Best effort.
pub fn tell(line: &str) {
    let _ = writeln!(stderr().lock(), "{line}");
}
