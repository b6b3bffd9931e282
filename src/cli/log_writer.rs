//! Writer of stderr that never waits: lines go through a bounded queue to a thread, and are dropped and counted if the reader
//! of stderr stalls. Training, probes and signals do not wait for a log.

use std::{
    fs::File,
    io::{self, Write, stderr},
    os::fd::AsFd,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    time::Duration,
};
use tokio::time::Instant;

/// Maximum lines and bytes in the queue.
const MAX_LINES: usize = 8192;
const MAX_BYTES: usize = 8 << 20;
/// Time that the end of the process waits for the reader of stderr.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before a retry, at a full queue or at a stderr that was set to non-blocking.
const RETRY: Duration = Duration::from_millis(5);

static WRITER: OnceLock<LogWriter> = OnceLock::new();

/// Starts the thread. Until then, and where it cannot start, lines are written directly.
pub fn start(json: bool) {
    // A full table of descriptors or threads has no remedy here.
    let Ok(file) = stderr().as_fd().try_clone_to_owned() else { return };
    let writer = LogWriter::start(File::from(file), json);
    let _ = writer.map(|writer| WRITER.set(writer));
}

/// Queues whole lines.
pub fn write(lines: Vec<u8>) {
    match WRITER.get() {
        Some(writer) => writer.push(lines),
        // A write error has no remedy here.
        None => stderr().lock().write_all(&lines).unwrap_or_default(),
    }
}

/// Waits until the queued lines are written, at most 1 s in all calls together.
pub fn flush() {
    static ONCE_STALLED: AtomicBool = AtomicBool::new(false);
    if let Some(writer) = WRITER.get()
        && !ONCE_STALLED.load(Ordering::Relaxed)
        && !writer.flush(FLUSH_TIMEOUT)
    {
        ONCE_STALLED.store(true, Ordering::Relaxed);
    }
}

enum Entry {
    Lines(Vec<u8>),
    Flush(SyncSender<()>),
}

struct LogWriter {
    queue: SyncSender<Entry>,
    shared: &'static Shared,
}

#[derive(Default)]
struct Shared {
    bytes: AtomicUsize,
    dropped: AtomicU64,
}

impl LogWriter {
    fn start(out: impl Write + Send + 'static, json: bool) -> io::Result<LogWriter> {
        let (queue, entries) = sync_channel(MAX_LINES);
        // One per process, which the thread outlives.
        let shared: &'static Shared = Box::leak(Box::default());
        std::thread::Builder::new().name("log".into()).spawn(move || run(&entries, shared, out, json))?;
        Ok(LogWriter { queue, shared })
    }

    fn push(&self, lines: Vec<u8>) {
        let Shared { bytes, dropped } = self.shared;
        let length = lines.len();
        let room = bytes.fetch_add(length, Ordering::Relaxed) + length <= MAX_BYTES;
        if !room || self.queue.try_send(Entry::Lines(lines)).is_err() {
            bytes.fetch_sub(length, Ordering::Relaxed);
            dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns false if the queue is not written in time.
    fn flush(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let (done, written) = sync_channel(1);
        let mut entry = Entry::Flush(done);
        while let Err(error) = self.queue.try_send(entry) {
            let TrySendError::Full(again) = error else { return true };
            if Instant::now() >= end {
                return false;
            }
            entry = again;
            std::thread::sleep(RETRY);
        }
        written.recv_timeout(end.saturating_duration_since(Instant::now())).is_ok()
    }
}

fn run(entries: &Receiver<Entry>, shared: &Shared, mut out: impl Write, json: bool) {
    for entry in entries {
        match entry {
            Entry::Lines(lines) => {
                write_all(&mut out, &lines);
                shared.bytes.fetch_sub(lines.len(), Ordering::Relaxed);
            }
            Entry::Flush(done) => done.send(()).unwrap_or_default(),
        }
        let dropped = shared.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let message = "log lines dropped, because the reader of stderr is slow";
            let line = match json {
                true => format!("{{\"level\":\"WARN\",\"message\":\"{message}\",\"dropped\":{dropped}}}\n"),
                false => format!(" WARN {message} dropped={dropped}\n"),
            };
            write_all(&mut out, line.as_bytes());
        }
    }
}

/// Writes all bytes. Other errors than a full pipe, for example a closed one, lose them.
fn write_all(out: &mut impl Write, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return,
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(RETRY),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};

    /// Issue 17, E6.
    #[test]
    fn e6_a_stalled_reader_costs_lines_and_not_time() {
        let (reader, out) = io::pipe().unwrap();
        let writer = LogWriter::start(out, false).unwrap();
        let line = |n: usize| format!("{n:099}\n").into_bytes();
        let total = 3 * MAX_LINES;
        let begun = Instant::now();
        (0..total).for_each(|n| writer.push(line(n)));
        assert!(!writer.flush(Duration::from_millis(50)), "nobody reads");
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        let mut lines = BufReader::new(reader).lines().map(Result::unwrap);
        let (mut written, mut dropped) = (0, 0);
        while written + dropped < total {
            let line = lines.next().unwrap();
            match line.split_once("dropped=") {
                Some((_, n)) => dropped += n.parse::<usize>().unwrap(),
                None => written += 1,
            }
        }
        assert!(dropped > 0 && written >= MAX_LINES, "{written} written, {dropped} dropped");
        // A reader that is back gets all later lines.
        writer.push(b"end\n".to_vec());
        assert_eq!(lines.next().unwrap(), "end");
        assert!(writer.flush(Duration::from_secs(20)));
        assert_eq!(writer.shared.bytes.load(Ordering::Relaxed), 0);
    }
}
