//! Output to stdout and stderr that does not panic on a closed pipe (`draftmill check | head`).

use super::log_writer;
use crate::common::{
    exit::{Exit, Failure},
    text::printable,
};
use serde::Serialize;
use std::io::{ErrorKind, Write, stdout};

/// Writes data to stdout. A closed pipe is not an error.
///
/// # Errors
/// Any other write error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(Exit::Internal, format!("stdout cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes a value to stdout as indented JSON.
///
/// # Errors
/// As [`print`].
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::of(Exit::Internal))?;
    print(&(text + "\n"))
}

/// Writes the failure that ends the program to stderr. Write errors are ignored.
pub fn report_failure(failure: &Failure) {
    let message = printable(&failure.message);
    let line = match message.contains('\n') {
        true => format!("error:\n{message}\n"),
        false => format!("error: {message}\n"),
    };
    log_writer::write(line.into_bytes());
}

/// Writes a line to stderr. Write errors are ignored.
pub fn note(line: &str) {
    log_writer::write(format!("{}\n", printable(line)).into_bytes());
}

/// Formats a time stamp (milliseconds since 1970) as date and time in UTC.
pub fn utc(ms: i64) -> String {
    let seconds = ms.div_euclid(1000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": years start in March, an era has 400 years.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let (hours, minutes, seconds) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hours:02}:{minutes:02}:{seconds:02} UTC")
}

/// Formats rows as a table. Each column has the width of its widest cell, and columns of numbers are right-aligned.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let number = |column: usize| {
        let mut cells = rows.iter().skip(1).filter_map(|row| row.get(column));
        cells.all(|cell| cell.chars().all(|c| c.is_ascii_digit() || c == ',' || c == '-'))
    };
    let numbers: Vec<bool> = (0..columns).map(number).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(at, cell)| match (numbers[at], widths[at]) {
            (true, width) => format!("{cell:>width$}"),
            (false, width) => format!("{cell:<width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps_are_formatted_as_dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds * 1000 + 999), text);
        }
    }

    #[test]
    fn columns_align_with_their_heads() {
        let rows = [["run", "jobs", "state"], ["a", "5", "killed"], ["longer", "1,234", "running"]];
        let rows = rows.map(|row| row.map(String::from).to_vec());
        assert_eq!(table(&rows), "run      jobs  state\na           5  killed\nlonger  1,234  running\n");
    }
}
