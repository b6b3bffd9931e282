//! Partial output: answers on disk that survive a kill, and the finished file.
//!
//! A conversation is appended when its last answer is complete, so the partial output holds complete conversations and at
//! most one torn end. The finished file has them in input order, independent of interruptions.

use crate::common::{
    fs::{AtomicFile, lock_file, read_input, remove_file, sync_parent, with_suffix, write_atomic},
    guard::{Protected, Refusal, lines_are},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use thiserror::Error;

/// Ending of the file with the recorded identity, after the name of the partial output.
const OPTIONS: &str = ".options";

/// One answer: the exact token ids of its prompt and of the answer. The fields are keys of the output file; `prepare` uses
/// `input_ids` and `loss_mask` unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerLine {
    /// Name of the input file, and the line in it, from 1.
    pub file: String,
    pub line: u64,
    /// Index among the rows of all inputs, from 0. Its key in the file is `place`.
    #[serde(rename = "place")]
    pub row: u64,
    /// Number of the answer in its conversation, from 1.
    pub turn: u64,
    /// True for the last answer of its conversation.
    pub last: bool,
    /// True if the answer reached its token limit without a stop token.
    pub cut: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub category: Option<String>,
    pub input_ids: Vec<u32>,
    /// 1 for each token of the answer, including its stop token.
    pub loss_mask: Vec<u8>,
}

impl AnswerLine {
    /// Number of tokens of the answer.
    pub fn answer_tokens(&self) -> u64 {
        self.loss_mask.iter().map(|&bit| u64::from(bit)).sum()
    }
}

/// Failure to open or write the output.
#[derive(Debug, Error)]
pub enum PartialOutputError {
    #[error("{} exists; give another --out, or replace it with --force", .0.display())]
    Exists(PathBuf),
    #[error(
        "{} was started with another {what} ({before} before, {now} now); give the same options to resume, or discard it with \
         --force",
        path.display()
    )]
    Other { path: PathBuf, what: String, before: String, now: String },
    #[error("--out: {0}")]
    Refused(#[from] Refusal),
    #[error("{} cannot be written ({source}); free disk space, or choose another --out", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Byte range of a conversation in the partial output.
struct Span {
    row: u64,
    start: u64,
    len: u64,
}

/// Output file being written.
pub struct PartialOutput {
    out: PathBuf,
    path: PathBuf,
    file: File,
    spans: Vec<Span>,
    end: u64,
}

impl PartialOutput {
    /// Opens the partial output of `out`, or resumes an existing one. `identity` is an object with everything that determines
    /// the lines; a partial output of another identity is refused, or discarded if `force` is set. `found` receives each
    /// line of an earlier start. A torn end is dropped. Only files of answers are replaced, and nothing that is `protected`.
    ///
    /// # Errors
    /// An existing output without `force`, another identity, another process that writes it, or an I/O error.
    pub fn open(
        out: &Path,
        identity: &Value,
        force: bool,
        protected: &Protected,
        found: &mut dyn FnMut(&AnswerLine),
    ) -> Result<PartialOutput, PartialOutputError> {
        if out.exists() && (!force || out.is_dir()) {
            return Err(PartialOutputError::Exists(out.into()));
        }
        let path = with_suffix(out, ".part");
        protected.file(out, "a file of answers", is_answers)?;
        protected.file(&path, "a partial file of answers", is_answers)?;
        protected.file(&with_suffix(&path, OPTIONS), "the options of a partial file of answers", is_identity)?;
        let failed = |source| PartialOutputError::Write { path: path.clone(), source };
        let file = lock_file(&path).map_err(failed)?;
        let mut part = PartialOutput { out: out.into(), path: path.clone(), file, spans: Vec::new(), end: 0 };
        let identity_path = part.identity_path();
        let before = read_identity(&identity_path);
        if let Some((what, before, now)) =
            before.as_ref().and_then(|before| difference(before, identity)).filter(|_| !force)
        {
            return Err(PartialOutputError::Other { path, what, before, now });
        }
        if before.as_ref() != Some(identity) {
            // A partial output without recorded identity is discarded too.
            part.file.set_len(0).map_err(failed)?;
            let written = write_atomic(&identity_path, format!("{identity:#}\n").as_bytes());
            written.map_err(|source| PartialOutputError::Write { path: identity_path, source })?;
        }
        part.scan(found).map_err(failed)?;
        Ok(part)
    }

    /// Appends a complete conversation. It survives the end of the process.
    ///
    /// # Errors
    /// An I/O error.
    pub fn write(&mut self, lines: &[AnswerLine]) -> Result<(), PartialOutputError> {
        let Some(first) = lines.first() else { return Ok(()) };
        let mut text = Vec::new();
        let written = lines.iter().try_for_each(|line| {
            serde_json::to_writer(&mut text, line)?;
            text.push(b'\n');
            Ok(())
        });
        let written = written.and_then(|()| self.file.write_all(&text));
        written.map_err(|source| PartialOutputError::Write { path: self.path.clone(), source })?;
        self.spans.push(Span { row: first.row, start: self.end, len: text.len() as u64 });
        self.end += text.len() as u64;
        Ok(())
    }

    /// Sorts the conversations and publishes the file, or removes the partial output if it is empty. Returns true if a file
    /// was written.
    ///
    /// # Errors
    /// An I/O error.
    pub fn finish(mut self) -> Result<bool, PartialOutputError> {
        let published = self.publish_sorted();
        published.map_err(|source| PartialOutputError::Write { path: self.out, source })
    }

    fn publish_sorted(&mut self) -> io::Result<bool> {
        let some = !self.spans.is_empty();
        if some {
            self.spans.sort_by_key(|span| span.row);
            let ordered = AtomicFile::create(&self.out)?;
            let mut to = BufWriter::with_capacity(1 << 20, ordered.file());
            for span in &self.spans {
                self.file.seek(SeekFrom::Start(span.start))?;
                io::copy(&mut (&self.file).take(span.len), &mut to)?;
            }
            to.flush()?;
            drop(to);
            ordered.publish()?;
        }
        remove_file(&self.path)?;
        remove_file(&self.identity_path())?;
        sync_parent(&self.out)?;
        Ok(some)
    }

    /// Path of the recorded identity, next to the partial output.
    fn identity_path(&self) -> PathBuf {
        with_suffix(&self.path, OPTIONS)
    }

    /// Reads the complete conversations and truncates the file after the last one.
    fn scan(&mut self, found: &mut dyn FnMut(&AnswerLine)) -> io::Result<()> {
        self.file.rewind()?;
        let mut reader = BufReader::with_capacity(1 << 20, &self.file);
        let (mut bytes, mut lines, mut at) = (Vec::new(), Vec::new(), 0);
        loop {
            bytes.clear();
            at += reader.read_until(b'\n', &mut bytes)? as u64;
            if !bytes.ends_with(b"\n") {
                break;
            }
            let Ok(line) = serde_json::from_slice::<AnswerLine>(&bytes) else { break };
            let (row, last) = (line.row, line.last);
            lines.push(line);
            if last {
                lines.iter().for_each(&mut *found);
                lines.clear();
                self.spans.push(Span { row, start: self.end, len: at - self.end });
                self.end = at;
            }
        }
        self.file.set_len(self.end)?;
        self.file.seek(SeekFrom::Start(self.end))?;
        Ok(())
    }
}

fn is_answers(head: &[u8]) -> bool {
    lines_are(head, b"{\"file\":", |line| serde_json::from_slice::<AnswerLine>(line).is_ok())
}

fn is_identity(head: &[u8]) -> bool {
    let keys = ["prompts", "target", "tokenizer"];
    serde_json::from_slice::<Value>(head).is_ok_and(|value| keys.iter().all(|key| value.get(key).is_some()))
}

fn read_identity(path: &Path) -> Option<Value> {
    serde_json::from_slice(&read_input(path, 1 << 20).ok()?).ok()
}

/// First field in which two objects differ, with both values.
fn difference(before: &Value, now: &Value) -> Option<(String, String, String)> {
    let (before, now) = (before.as_object()?, now.as_object()?);
    let none = Value::Null;
    let mut keys = now.keys().chain(before.keys());
    keys.find_map(|key| {
        let (before, now) = (before.get(key).unwrap_or(&none), now.get(key).unwrap_or(&none));
        (before != now).then(|| (key.clone(), before.to_string(), now.to_string()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn line(row: u64, turn: u64, last: bool) -> AnswerLine {
        AnswerLine {
            file: "a.json".into(),
            line: row + 1,
            row,
            turn,
            last,
            cut: false,
            category: (row == 1).then(|| "x".into()),
            input_ids: vec![1, 2, row as u32],
            loss_mask: vec![0, 0, 1],
        }
    }

    fn open(out: &Path, identity: &Value, force: bool) -> Result<(PartialOutput, Vec<(u64, u64)>), PartialOutputError> {
        let mut found = Vec::new();
        let protected = Protected::default();
        let part =
            PartialOutput::open(out, identity, force, &protected, &mut |line| found.push((line.row, line.turn)))?;
        Ok((part, found))
    }

    /// Identity with the keys of a real one.
    fn identity(seed: u64) -> Value {
        json!({"prompts": [], "target": "t", "tokenizer": "k", "seed": seed})
    }

    fn rows(path: &Path) -> Vec<(u64, u64)> {
        let text = fs::read_to_string(path).unwrap();
        let line = |text| serde_json::from_str::<AnswerLine>(text).unwrap();
        text.lines().map(line).map(|line| (line.row, line.turn)).collect()
    }

    #[test]
    fn a_killed_output_resumes_and_ends_in_input_order() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("new/answers.jsonl");
        let id = identity(1);
        let (mut part, found) = open(&out, &id, false).unwrap();
        assert_eq!(found, []);
        part.write(&[line(4, 1, true)]).unwrap();
        part.write(&[line(2, 1, false), line(2, 2, true)]).unwrap();
        part.write(&[line(1, 1, false), line(1, 2, true)]).unwrap();
        drop(part);
        let path = out.with_file_name("answers.jsonl.part");
        let whole = fs::read(&path).unwrap();
        // A kill may cut it inside a line, after the first line of a conversation, or after a complete one.
        let ends: Vec<_> = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1).collect();
        for (cut, kept) in [(ends[4] - 1, 3), (ends[3], 3), (ends[3] - 20, 3), (ends[2], 3), (ends[1], 1), (ends[4], 5)]
        {
            fs::write(&path, &whole[..cut]).unwrap();
            let (part, found) = open(&out, &id, false).unwrap();
            assert_eq!(found, [(4, 1), (2, 1), (2, 2), (1, 1), (1, 2)][..kept], "cut at {cut}");
            drop(part);
            assert_eq!(fs::read(&path).unwrap(), &whole[..ends[kept - 1]], "the torn end is gone");
        }
        fs::write(&path, &whole[..ends[2]]).unwrap();
        let (mut part, _) = open(&out, &id, false).unwrap();
        part.write(&[line(3, 1, true)]).unwrap();
        part.write(&[line(1, 1, false), line(1, 2, true)]).unwrap();
        assert!(part.finish().unwrap());
        assert_eq!(rows(&out), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)]);
        assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn existing_output_is_replaced_only_by_force() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("answers.jsonl");
        let (mut part, _) = open(&out, &identity(1), false).unwrap();
        part.write(&[line(0, 1, true)]).unwrap();
        let busy = open(&out, &identity(1), false).err().unwrap().to_string();
        assert!(busy.contains("another process"), "{busy}");
        drop(part);
        let other = open(&out, &identity(2), false).err().unwrap().to_string();
        assert!(other.contains("another seed (1 before, 2 now)") && other.contains("--force"), "{other}");
        let (part, found) = open(&out, &identity(2), true).unwrap();
        assert_eq!(found, []);
        assert!(!part.finish().unwrap());
        assert!(!out.exists());
        let mut first = open(&out, &identity(3), false).unwrap().0;
        first.write(&[line(7, 1, true)]).unwrap();
        assert!(first.finish().unwrap());
        let before = fs::read(&out).unwrap();
        assert!(matches!(open(&out, &identity(3), false), Err(PartialOutputError::Exists(_))));
        let (mut part, _) = open(&out, &identity(3), true).unwrap();
        assert_eq!(fs::read(&out).unwrap(), before, "until the new one is complete");
        part.write(&[line(0, 1, true)]).unwrap();
        assert!(part.finish().unwrap());
        assert_eq!(rows(&out), [(0, 1)]);
    }

    #[test]
    fn speculators_690_only_files_of_answers_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("answers.jsonl");
        for name in ["answers.jsonl", "answers.jsonl.part", "answers.jsonl.part.options"] {
            let path = folder.path().join(name);
            fs::write(&path, "{\"prompt\": \"precious\"}\n").unwrap();
            let error = open(&out, &identity(3), true).err().unwrap();
            assert!(matches!(error, PartialOutputError::Refused(_)), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), "{\"prompt\": \"precious\"}\n");
            fs::remove_file(&path).unwrap();
        }
        let protected = Protected::default().folders([folder.path()]);
        assert!(PartialOutput::open(&out, &identity(3), true, &protected, &mut |_| ()).is_err(), "inside the target");
    }
}
