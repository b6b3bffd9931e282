//! The record of every optimizer step: one line of `steps.jsonl`, and the means over the first and the last of them.

use draftmill_actors::trainer::StepRecord;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

/// Means over some steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    pub steps: u64,
    /// Mean loss in nats.
    pub loss: f64,
    /// Mean share of supervised positions that were right.
    pub accuracy: f64,
}

/// `steps.jsonl` of a run, open for appending.
pub struct StepLog {
    path: PathBuf,
    file: BufWriter<File>,
    records: Vec<StepRecord>,
}

impl StepLog {
    /// Where the log of this run is.
    pub fn file(run: &Path) -> PathBuf {
        run.join("steps.jsonl")
    }

    /// Opens the log of a run whose weights hold `start_step` steps. Later lines belong to steps that a crash undid and are
    /// dropped, as is a last line that was cut short.
    pub fn open(run: &Path, start_step: u64) -> io::Result<StepLog> {
        let path = StepLog::file(run);
        let mut records: Vec<StepRecord> = Vec::new();
        if path.exists() {
            for line in BufReader::new(File::open(&path)?).lines() {
                match serde_json::from_str::<StepRecord>(&line?) {
                    Ok(record) if record.step <= start_step => records.push(record),
                    Ok(_) | Err(_) => {}
                }
            }
            let fresh = path.with_extension("jsonl.tmp");
            let mut out = BufWriter::new(File::create(&fresh)?);
            for record in &records {
                write_line(&mut out, record)?;
            }
            out.flush()?;
            fs::rename(&fresh, &path)?;
        }
        let file = BufWriter::new(OpenOptions::new().create(true).append(true).open(&path)?);
        Ok(StepLog { path, file, records })
    }

    pub fn push(&mut self, record: StepRecord) -> io::Result<()> {
        write_line(&mut self.file, &record)?;
        self.file.flush()?;
        self.records.push(record);
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Means over the first and over the last twentieth of the steps, at least one and at most ten of each.
    pub fn windows(&self) -> (Window, Window) {
        let n = (self.records.len() / 20).clamp(1, 10).min(self.records.len());
        (mean(&self.records[..n]), mean(&self.records[self.records.len() - n..]))
    }
}

fn write_line(out: &mut impl Write, record: &StepRecord) -> io::Result<()> {
    serde_json::to_writer(&mut *out, record)?;
    out.write_all(b"\n")
}

fn mean(records: &[StepRecord]) -> Window {
    let n = records.len().max(1) as f64;
    Window {
        steps: records.len() as u64,
        loss: records.iter().map(|r| r.loss).sum::<f64>() / n,
        accuracy: records.iter().map(|r| r.accuracy).sum::<f64>() / n,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> StepRecord {
        StepRecord { step, loss: 10.0 / step as f64, accuracy: 0.5, ..StepRecord::default() }
    }

    #[test]
    fn a_resume_drops_the_steps_that_a_crash_undid() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = StepLog::open(dir.path(), 0).unwrap();
        for step in 1..=40 {
            log.push(record(step)).unwrap();
        }
        fs::write(log.path(), fs::read_to_string(log.path()).unwrap() + "{\"step\":41,\"lo").unwrap();
        let mut log = StepLog::open(dir.path(), 30).unwrap();
        log.push(record(31)).unwrap();
        let text = fs::read_to_string(log.path()).unwrap();
        let steps: Vec<u64> = text.lines().map(|l| serde_json::from_str::<StepRecord>(l).unwrap().step).collect();
        assert_eq!(steps, (1..=31).collect::<Vec<_>>());
        let (first, last) = log.windows();
        assert_eq!((first.steps, first.loss), (1, 10.0));
        assert_eq!(last.loss, 10.0 / 31.0);
    }

    #[test]
    fn no_steps_have_no_means() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(StepLog::open(dir.path(), 0).unwrap().windows(), Default::default());
    }
}
