//! The answers on disk: a part that grows conversation by conversation and outlives a kill, and the file that it becomes.
//!
//! Conversations end in an order of their own. Each is written at once when its last answer is there, so the part holds whole
//! ones and at most one torn end; the finished file has them in the order of the inputs, however often the work was interrupted.

use crate::common::fs::{AtomicFile, lock_file, remove_file, sync_parent, with_suffix, write_atomic};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use thiserror::Error;

/// One answer: the tokens of its prompt and its own, exactly as the target read and said them. `prepare` reads `input_ids` and
/// `loss_mask` as they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Name of the input file, and the line there, from 1.
    pub file: String,
    pub line: u64,
    /// Place among the rows of all inputs, from 0.
    pub place: u64,
    /// Which answer of its conversation it is, from 1.
    pub turn: u64,
    /// Its conversation ends with it.
    pub last: bool,
    /// It ended with its room: no stop token is its last one.
    pub cut: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub category: Option<String>,
    pub input_ids: Vec<u32>,
    /// 1 for each token of the answer, its stop token included.
    pub loss_mask: Vec<u8>,
}

impl Line {
    /// Tokens of the answer.
    pub fn answered(&self) -> u64 {
        self.loss_mask.iter().map(|&bit| u64::from(bit)).sum()
    }
}

/// Why answers cannot be written.
#[derive(Debug, Error)]
pub enum PartError {
    #[error("{} is there already; give another --out, or replace it with --force", .0.display())]
    Exists(PathBuf),
    #[error(
        "{} was begun with another {what} ({before} then, {now} now); give the same options to go on with it, or throw it away \
         with --force",
        path.display()
    )]
    Other { path: PathBuf, what: String, before: String, now: String },
    #[error("{} cannot be written ({source}); free some disk, or choose another --out", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Where a conversation lies in the part.
struct Span {
    place: u64,
    start: u64,
    len: u64,
}

/// The part of a file that is being written.
pub struct Part {
    out: PathBuf,
    path: PathBuf,
    file: File,
    spans: Vec<Span>,
    end: u64,
}

impl Part {
    /// Opens the part of `out`, to go on with it where there is one. `identity` is an object that says what its lines follow
    /// from: a part of another one is refused, or thrown away where `force` is set. `found` is called with each line that an
    /// earlier start wrote. A torn end is dropped.
    pub fn open(out: &Path, identity: &Value, force: bool, found: &mut dyn FnMut(&Line)) -> Result<Part, PartError> {
        if out.exists() && (!force || out.is_dir()) {
            return Err(PartError::Exists(out.into()));
        }
        let path = with_suffix(out, ".part");
        let failed = |source| PartError::Write { path: path.clone(), source };
        let file = lock_file(&path).map_err(failed)?;
        let mut part = Part { out: out.into(), path: path.clone(), file, spans: Vec::new(), end: 0 };
        let options = part.options();
        let before = read_options(&options);
        if let Some((what, before, now)) =
            before.as_ref().and_then(|before| difference(before, identity)).filter(|_| !force)
        {
            return Err(PartError::Other { path, what, before, now });
        }
        if before.as_ref() != Some(identity) {
            // Also what lies there without a word about its origin is nothing to go on with.
            part.file.set_len(0).map_err(failed)?;
            let written = write_atomic(&options, format!("{identity:#}\n").as_bytes());
            written.map_err(|source| PartError::Write { path: options, source })?;
        }
        part.scan(found).map_err(failed)?;
        Ok(part)
    }

    /// Writes a whole conversation. What is written outlives the process.
    pub fn write(&mut self, lines: &[Line]) -> Result<(), PartError> {
        let Some(first) = lines.first() else { return Ok(()) };
        let mut text = Vec::new();
        let written = lines.iter().try_for_each(|line| {
            serde_json::to_writer(&mut text, line)?;
            text.push(b'\n');
            Ok(())
        });
        let written = written.and_then(|()| self.file.write_all(&text));
        written.map_err(|source| PartError::Write { path: self.path.clone(), source })?;
        self.spans.push(Span { place: first.place, start: self.end, len: text.len() as u64 });
        self.end += text.len() as u64;
        Ok(())
    }

    /// Puts the conversations in order and gives the file its name; without any, nothing is left. Tells whether there is one.
    pub fn finish(mut self) -> Result<bool, PartError> {
        let done = self.order();
        done.map_err(|source| PartError::Write { path: self.out, source })
    }

    fn order(&mut self) -> io::Result<bool> {
        let some = !self.spans.is_empty();
        if some {
            self.spans.sort_by_key(|span| span.place);
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
        remove_file(&self.options())?;
        sync_parent(&self.out)?;
        Ok(some)
    }

    /// What the part follows from lies beside it.
    fn options(&self) -> PathBuf {
        with_suffix(&self.path, ".options")
    }

    /// Reads the whole conversations and cuts off what stands behind the last of them.
    fn scan(&mut self, found: &mut dyn FnMut(&Line)) -> io::Result<()> {
        self.file.rewind()?;
        let mut reader = BufReader::with_capacity(1 << 20, &self.file);
        let (mut bytes, mut lines, mut at) = (Vec::new(), Vec::new(), 0);
        loop {
            bytes.clear();
            at += reader.read_until(b'\n', &mut bytes)? as u64;
            if !bytes.ends_with(b"\n") {
                break;
            }
            let Ok(line) = serde_json::from_slice::<Line>(&bytes) else { break };
            let (place, last) = (line.place, line.last);
            lines.push(line);
            if last {
                lines.iter().for_each(&mut *found);
                lines.clear();
                self.spans.push(Span { place, start: self.end, len: at - self.end });
                self.end = at;
            }
        }
        self.file.set_len(self.end)?;
        self.file.seek(SeekFrom::Start(self.end))?;
        Ok(())
    }
}

fn read_options(path: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// The first field in which two objects differ, with both values.
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

    fn line(place: u64, turn: u64, last: bool) -> Line {
        Line {
            file: "a.json".into(),
            line: place + 1,
            place,
            turn,
            last,
            cut: false,
            category: (place == 1).then(|| "x".into()),
            input_ids: vec![1, 2, place as u32],
            loss_mask: vec![0, 0, 1],
        }
    }

    fn open(out: &Path, identity: &Value, force: bool) -> Result<(Part, Vec<(u64, u64)>), PartError> {
        let mut found = Vec::new();
        let part = Part::open(out, identity, force, &mut |line| found.push((line.place, line.turn)))?;
        Ok((part, found))
    }

    fn places(path: &Path) -> Vec<(u64, u64)> {
        let text = fs::read_to_string(path).unwrap();
        let line = |text| serde_json::from_str::<Line>(text).unwrap();
        text.lines().map(line).map(|line| (line.place, line.turn)).collect()
    }

    #[test]
    fn a_killed_part_goes_on_behind_its_last_whole_conversation_and_ends_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("new/answers.jsonl");
        let id = json!({"seed": 1});
        let (mut part, found) = open(&out, &id, false).unwrap();
        assert_eq!(found, []);
        part.write(&[line(4, 1, true)]).unwrap();
        part.write(&[line(2, 1, false), line(2, 2, true)]).unwrap();
        part.write(&[line(1, 1, false), line(1, 2, true)]).unwrap();
        drop(part);
        let path = out.with_file_name("answers.jsonl.part");
        let whole = fs::read(&path).unwrap();
        // A kill may end it anywhere: inside the last line, behind the first line of a conversation, behind a whole one.
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
        assert_eq!(places(&out), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1)]);
        assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn what_is_there_is_replaced_only_by_force() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("answers.jsonl");
        let (mut part, _) = open(&out, &json!({"seed": 1, "limit": null}), false).unwrap();
        part.write(&[line(0, 1, true)]).unwrap();
        let busy = open(&out, &json!({"seed": 1, "limit": null}), false).err().unwrap().to_string();
        assert!(busy.contains("another process"), "{busy}");
        drop(part);
        let other = open(&out, &json!({"seed": 2, "limit": null}), false).err().unwrap().to_string();
        assert!(other.contains("another seed (1 then, 2 now)") && other.contains("--force"), "{other}");
        let (part, found) = open(&out, &json!({"seed": 2, "limit": null}), true).unwrap();
        assert_eq!(found, []);
        assert!(!part.finish().unwrap());
        assert!(!out.exists());
        fs::write(&out, "precious").unwrap();
        assert!(matches!(open(&out, &json!({}), false), Err(PartError::Exists(_))));
        let (mut part, _) = open(&out, &json!({}), true).unwrap();
        assert_eq!(fs::read_to_string(&out).unwrap(), "precious", "as long as it is not complete");
        part.write(&[line(0, 1, true)]).unwrap();
        assert!(part.finish().unwrap());
        assert_eq!(places(&out), [(0, 1)]);
    }
}
