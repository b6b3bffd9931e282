//! `draftmill prepare`: reads rows, encodes them in parallel, and writes samples to the store in input order.

use super::options::PrepareOptions;
use super::{
    encode::{EncodedRow, Encoder, Sample, split_of},
    format,
    input::{InputRow, Inputs, ReadError, Unusable},
    provenance::{self, INPUTS, SPECIAL_TOKENS, TEMPLATE, TOKENIZER, TOKENIZER_OF_IDS, UNUSED},
    reject::Reject,
    report::{PrepareReport, Progress},
    row::ROLES,
    store::{Split, is_store},
    writer::StoreWriter,
};
use crate::{
    common::{
        fs::{AtomicFile, remove_file, with_suffix},
        guard::{Protected, Refusal, lines_are},
        text::percent,
    },
    hf::read_json,
};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufWriter, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
};
use thiserror::Error;
use tokio::time::Instant;

/// Ending of the file of rejects, next to the store.
const REJECTS: &str = ".rejects.jsonl";

/// Failure of `prepare`. A store that exists already is unchanged.
#[derive(Debug, Error)]
pub enum PrepareError {
    #[error("data.inputs is empty; give files, for example --set data.inputs=chats.jsonl")]
    NoInputs,
    #[error("{} of data.inputs cannot be read ({source}); correct the path or fetch the file again", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A file that holds no rows, is cut, or is named in a way that needs a shell or a client.
    #[error("{} of data.inputs {why}", path.display())]
    Unusable { path: PathBuf, why: String },
    #[error("{} cannot be written ({source}); free some disk, or choose another data.store", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("data.store: {0}")]
    Refused(#[from] Refusal),
    /// The model has no position for the end of the sample (torchtitan#3395).
    #[error(
        "a sample has {tokens} tokens, but the target has {positions} positions (max_position_embeddings); lower \
         data.max_length to at most {positions}"
    )]
    BeyondPositions { tokens: u64, positions: u64 },
    /// The rows need a template and a tokenizer, and the model folder has none.
    #[error("target.dir: {0}")]
    Model(String),
    #[error(
        "{} of {} rows ({}) were rejected, above data.max_reject_fraction = {most} ({}{}); see {} and correct \
         the rows, or raise the setting",
        .report.rejected_rows(), .report.rows, percent(.report.reject_fraction()), .report.reasons(), first(.report),
        rejects(.report)
    )]
    TooManyRejected { most: f64, report: Box<PrepareReport> },
    #[error("{} of data.inputs has no rows; give files with one conversation a line, or one JSON array", .inputs.join(", "))]
    Empty { inputs: Vec<String> },
    #[error("none of {} rows gave a sample{}; see {}", .report.rows, because(.report), rejects(.report))]
    NothingLeft { report: Box<PrepareReport> },
    #[error("all {} samples fell into the validation split; lower data.validation_fraction or add data", .report.samples())]
    NothingToTrain { report: Box<PrepareReport> },
    #[error("interrupted before the store was complete; nothing was written")]
    Interrupted,
}

impl PrepareError {
    /// The report, if all rows were read.
    pub fn report(&self) -> Option<&PrepareReport> {
        match self {
            PrepareError::TooManyRejected { report, .. }
            | PrepareError::NothingLeft { report }
            | PrepareError::NothingToTrain { report } => Some(report),
            _ => None,
        }
    }
}

fn rejects(report: &PrepareReport) -> String {
    report.rejects_file.as_ref().map_or_else(|| "the inputs".into(), |path| path.display().to_string())
}

fn because(report: &PrepareReport) -> String {
    if report.reasons().is_empty() { String::new() } else { format!(" ({}{})", report.reasons(), first(report)) }
}

fn first(report: &PrepareReport) -> String {
    report.first_reject.as_ref().map_or_else(String::new, |first| format!("; the first one: {first}"))
}

impl From<ReadError> for PrepareError {
    fn from(ReadError { path, source }: ReadError) -> Self {
        match source.downcast::<Unusable>() {
            Ok(Unusable { mut why, cut }) => {
                if cut {
                    why.push_str(", or read its whole rows with data.allow_truncated = true");
                }
                PrepareError::Unusable { path, why }
            }
            Err(source) => PrepareError::Read { path, source },
        }
    }
}

/// Prepares a store. Calls `progress` before the first file is opened and after every chunk of rows; `progress` may stop it.
///
/// The bytes of the store are a function of the inputs' contents and the options. Rows without a sample are written to
/// `<store>.rejects.jsonl`, also if there are too many of them. Files of an earlier run are replaced, other files never.
///
/// # Errors
/// A [`PrepareError`]; no store is written then.
pub fn prepare(
    options: &PrepareOptions,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<PrepareReport, PrepareError> {
    let begun = Instant::now();
    let mut shown = Progress::default();
    let mut show = |shown: &Progress| match progress(shown.clone()) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(PrepareError::Interrupted),
    };
    show(&shown)?;
    if options.data.inputs.is_empty() {
        return Err(PrepareError::NoInputs);
    }
    for path in &options.data.inputs {
        shown.bytes_total += size(path)?;
    }
    may_write(options)?;
    let encoder = Encoder::load(options).map_err(PrepareError::Model)?;
    let mut output = Output::create(options)?;
    let mut inputs = Inputs::new(options.data.inputs.clone(), options.data.max_row_bytes)
        .allow_truncated(options.data.allow_truncated);
    let mut chunk = inputs.read_chunk()?;
    while !chunk.is_empty() {
        // The next chunk is read while this one is encoded.
        let work = || chunk.par_iter().map(|row| encoder.encode(row)).collect::<Result<Vec<_>, _>>();
        let (encoded, next) = rayon::join(work, || inputs.read_chunk());
        for (row, encoded) in chunk.iter().zip(encoded.map_err(PrepareError::Model)?) {
            output.take(row, inputs.path(row.file), encoded)?;
        }
        chunk = next?;
        shown = Progress { bytes_total: shown.bytes_total, bytes_read: inputs.bytes_read(), ..output.progress() };
        show(&shown)?;
    }
    output.report.seconds = begun.elapsed().as_secs_f64();
    output.finish(options, &encoder, &inputs)
}

/// Checks that the store and its rejects may be written: they replace only a store and its rejects, and touch neither an
/// input nor the model.
fn may_write(options: &PrepareOptions) -> Result<(), Refusal> {
    let protected = Protected::default().inputs(&options.data.inputs).folders([&options.model_dir]);
    protected.file(&options.data.store, "a store of prepared data", is_store)?;
    let rejects = with_suffix(&options.data.store, REJECTS);
    protected.file(&rejects, "a list of rejected rows", |head| lines_are(head, b"{\"detail\":", is_reject))
}

/// True for a line that [`Output::reject`] writes.
fn is_reject(line: &[u8]) -> bool {
    let keys = ["file", "line", "row", "reason", "detail"];
    let value = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line);
    value.is_ok_and(|value| value.len() == keys.len() && keys.iter().all(|key| value.contains_key(*key)))
}

/// `max_position_embeddings` of the model folder, if its config.json has it.
fn positions(model: &Path) -> Option<u64> {
    let config = read_json(&model.join("config.json")).ok()?;
    config["max_position_embeddings"].as_u64().filter(|&positions| positions > 0)
}

/// Size of an input in bytes. Called before anything is written, so that a wrong path fails at once.
fn size(path: &Path) -> Result<u64, PrepareError> {
    let failed = |source| PrepareError::Read { path: path.into(), source };
    let metadata = fs::metadata(path).map_err(|error| match format::no_such_file(path) {
        Some(why) if error.kind() == io::ErrorKind::NotFound => PrepareError::Unusable { path: path.into(), why },
        _ => failed(error),
    })?;
    // Opening a pipe may block, and a device has no end.
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "it is a folder: list the files in it" } else { "it is not a regular file" };
        return Err(failed(io::Error::other(what)));
    }
    Ok(metadata.len())
}

/// Files being written, and the counts.
struct Output {
    store: StoreWriter,
    store_path: PathBuf,
    rejects: BufWriter<fs::File>,
    rejects_part: AtomicFile,
    rejects_path: PathBuf,
    validation_fraction: f64,
    /// Longest sequence of the target, if it is known.
    positions: Option<u64>,
    report: PrepareReport,
    from_chat: bool,
}

/// Limit on the names of roles and fields that are counted separately; the data choose the names.
const MOST_NAMES: usize = 64;

impl Output {
    fn create(options: &PrepareOptions) -> Result<Output, PrepareError> {
        let rejects_path = with_suffix(&options.data.store, REJECTS);
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |source| PrepareError::Write { path, source }
        };
        let store = StoreWriter::create(&options.data.store).map_err(failed(&options.data.store))?;
        let rejects_part = AtomicFile::create(&rejects_path).map_err(failed(&rejects_path))?;
        let rejects = BufWriter::new(rejects_part.file().try_clone().map_err(failed(&rejects_path))?);
        Ok(Output {
            store,
            store_path: options.data.store.clone(),
            rejects,
            rejects_part,
            rejects_path,
            validation_fraction: options.data.validation_fraction,
            positions: positions(&options.model_dir),
            report: PrepareReport { store: options.data.store.clone(), ..PrepareReport::default() },
            from_chat: false,
        })
    }

    /// Writes and counts one encoded row.
    fn take(&mut self, row: &InputRow, file: &Path, encoded: EncodedRow) -> Result<(), PrepareError> {
        self.report.rows += 1;
        for ((name, _), count) in ROLES.iter().zip(encoded.notes.roles.known).filter(|(_, count)| *count > 0) {
            *self.report.roles.entry(name.to_string()).or_default() += count;
        }
        for name in encoded.notes.roles.unknown {
            count_name(&mut self.report.unknown_roles, name);
        }
        match encoded.outcome {
            Ok(sample) => {
                let tokens = sample.ids.len() as u64;
                if let Some(positions) = self.positions.filter(|&positions| tokens > positions) {
                    return Err(PrepareError::BeyondPositions { tokens, positions });
                }
                for change in encoded.notes.changes {
                    *self.report.changed.entry(change).or_default() += 1;
                }
                for name in encoded.notes.unseen {
                    count_name(&mut self.report.unseen_fields, name.chars().take(40).collect());
                }
                self.add(sample).map_err(|source| PrepareError::Write { path: self.store_path.clone(), source })
            }
            Err(reject) => {
                let written = self.reject(row, file, &reject);
                written.map_err(|source| PrepareError::Write { path: self.rejects_path.clone(), source })
            }
        }
    }

    fn add(&mut self, sample: Sample) -> io::Result<()> {
        let split = split_of(&sample.ids, self.validation_fraction);
        self.store.push(split, &sample.ids, &sample.mask)?;
        match split {
            Split::Train => self.report.train_samples += 1,
            Split::Validation => self.report.validation_samples += 1,
        }
        self.report.tokens += sample.ids.len() as u64;
        self.report.longest = self.report.longest.max(sample.ids.len() as u64);
        self.report.supervised_tokens += sample.mask.iter().map(|&bit| u64::from(bit)).sum::<u64>();
        self.report.cut += u64::from(sample.cut);
        self.from_chat |= sample.from_chat;
        Ok(())
    }

    fn reject(&mut self, row: &InputRow, file: &Path, reject: &Reject) -> io::Result<()> {
        let Reject { reason, detail } = reject;
        let counts = if reason.by_policy() { &mut self.report.left_out } else { &mut self.report.rejected };
        *counts.entry(*reason).or_default() += 1;
        if !reason.by_policy() && self.report.first_reject.is_none() {
            let detail: String = detail.chars().take(200).collect();
            self.report.first_reject = Some(format!("{}, line {}: {detail}", file.display(), row.row.line));
        }
        let line = json!({
            "file": file.display().to_string(), "line": row.row.line, "row": row.number, "reason": reason.word(),
            "detail": detail,
        });
        writeln!(self.rejects, "{line}")
    }

    fn progress(&self) -> Progress {
        Progress {
            rows: self.report.rows,
            samples: self.report.samples(),
            lost: self.report.rejected_rows() + self.report.left_out_rows(),
            tokens: self.report.tokens,
            ..Progress::default()
        }
    }

    /// Publishes the rejects, and the store if it may be used.
    fn finish(
        self,
        options: &PrepareOptions,
        encoder: &Encoder,
        inputs: &Inputs,
    ) -> Result<PrepareReport, PrepareError> {
        let Output { store, store_path, rejects, rejects_part, rejects_path, mut report, from_chat, .. } = self;
        report.files = inputs.done.len() as u64;
        report.truncated_files = inputs.truncated;
        report.bytes = inputs.bytes_read();
        report.tokens_per_second = report.tokens as f64 / report.seconds.max(1e-9);
        let write = |path: &Path, source| PrepareError::Write { path: path.into(), source };
        if report.rejected.is_empty() && report.left_out.is_empty() {
            remove_file(&rejects_path).map_err(|error| write(&rejects_path, error))?;
        } else {
            let flushed = rejects.into_inner().map(drop).map_err(io::IntoInnerError::into_error);
            flushed.and_then(|()| rejects_part.publish()).map_err(|error| write(&rejects_path, error))?;
            report.rejects_file = Some(rejects_path);
        }
        let most = options.data.max_reject_fraction;
        match &report {
            report if report.rows == 0 => {
                let inputs = options.data.inputs.iter().map(|path| path.display().to_string()).collect();
                Err(PrepareError::Empty { inputs })
            }
            report if report.samples() == 0 => Err(PrepareError::NothingLeft { report: Box::new(report.clone()) }),
            report if report.reject_fraction() > most => {
                Err(PrepareError::TooManyRejected { most, report: Box::new(report.clone()) })
            }
            report if report.train_samples == 0 => {
                Err(PrepareError::NothingToTrain { report: Box::new(report.clone()) })
            }
            _ => Ok(()),
        }?;
        let metadata = metadata(options, encoder, inputs, &report, from_chat);
        report.fingerprint = Some(store.finish(metadata).map_err(|error| write(&store_path, error))?);
        Ok(report)
    }
}

/// Counts a name that the data choose.
fn count_name(names: &mut BTreeMap<String, u64>, name: String) {
    let name = if names.contains_key(&name) || names.len() < MOST_NAMES { name } else { "(others)".into() };
    *names.entry(name).or_default() += 1;
}

/// Metadata of the store on its origin, without paths and times: the same inputs give the same bytes on every machine.
fn metadata(
    options: &PrepareOptions,
    encoder: &Encoder,
    inputs: &Inputs,
    report: &PrepareReport,
    from_chat: bool,
) -> BTreeMap<String, String> {
    let chat = encoder.chat().ok().filter(|_| from_chat);
    let files = options.data.inputs.iter().zip(&inputs.done).map(|(path, read)| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        json!({ "name": name, "bytes": read.bytes, "sha256": read.sha256 })
    });
    let unused = || UNUSED.to_string();
    let of_ids = match chat {
        Some(_) => None,
        None => provenance::tokenizer_sha256(&options.model_dir),
    };
    let of_ids = of_ids.unwrap_or_else(unused);
    let counts = |counts: &BTreeMap<_, u64>| serde_json::to_string(counts).unwrap_or_default();
    let pairs = [
        (INPUTS, serde_json::Value::from_iter(files).to_string()),
        (TEMPLATE, chat.map_or_else(unused, |chat| chat.template_sha256.clone())),
        (TOKENIZER, chat.map_or_else(unused, |chat| chat.tokenizer_sha256.clone())),
        (TOKENIZER_OF_IDS, of_ids),
        (SPECIAL_TOKENS, chat.map_or_else(unused, |_| provenance::special_tokens(&options.model_dir))),
        ("vocab_size", encoder.vocab_size.map_or_else(|| "unknown".into(), |size| size.to_string())),
        ("rows", report.rows.to_string()),
        ("rejected", counts(&report.rejected)),
        ("left_out", counts(&report.left_out)),
        ("changed", serde_json::to_string(&report.changed).unwrap_or_default()),
        ("cut", report.cut.to_string()),
        ("tokens", report.tokens.to_string()),
        ("supervised_tokens", report.supervised_tokens.to_string()),
        ("unknown_roles", report.unknown_roles.values().sum::<u64>().to_string()),
    ];
    let settings = provenance::settings(&options.data).into_iter().map(|setting| (setting.key, setting.value));
    pairs.into_iter().chain(settings).map(|(key, value)| (key.to_string(), value)).collect()
}
