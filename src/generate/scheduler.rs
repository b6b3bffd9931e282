//! Scheduler of `generate`: starts conversations as slots become free and continues each after its answer.

use super::{
    GenerateOptions,
    partial_output::{AnswerLine, PartialOutput},
    prompts::{PromptConversation, PromptReader, SkipReason},
    report::{GenerateReport, Progress},
    workers::WorkerPool,
};
use crate::{
    common::{
        exit::{Exit, Failure},
        guard::Protected,
        hash::sha256_file,
    },
    config::Dtype,
    data::{
        Reason,
        chat::{Conversation, Role, Turn},
        encode::ChatTokenizer,
    },
    hf::fingerprint::fingerprint,
    inference::{Answer, loaded_target::LoadedTarget},
    model::{libtorch::open_device, load::kind_of},
};
use serde_json::{Value, json};
use std::{
    collections::{HashMap, VecDeque},
    fs,
    ops::ControlFlow,
};
use tch::Device;
use tokio::time::Instant;

/// Bits of a random stream's id for the turn; the others are the row.
const TURN_BITS: u32 = 16;

/// Answers all prompts. Calls `progress` after each forward; `progress` may stop the work. Finished conversations stay, and
/// the next start resumes after them. Writes no file if there is no prompt.
///
/// # Errors
/// A [`Failure`] with its exit code: unreadable input, unusable model, existing output, or interruption.
pub fn generate(
    options: &GenerateOptions,
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<GenerateReport, Failure> {
    let device = open_device(options.device).map_err(Failure::of(Exit::Usage))?;
    let dtype = options.dtype.or(|| if device == Device::Cpu { Dtype::F32 } else { Dtype::Bf16 });
    let mut start = Progress { limit: options.limit.map(|limit| limit as u64), ..Progress::default() };
    for path in &options.prompts {
        start.bytes_total += size(path)?;
    }
    let bench = LoadedTarget::load(&options.target, kind_of(dtype.into()), device).map_err(Failure::of(Exit::Model))?;
    let chat = bench.chat.as_ref().map_err(|why| Failure::new(Exit::Model, why))?;
    let settings = bench.settings(1, options.max_new_tokens, options.temperature, options.seed).ok_or_else(|| {
        Failure::new(Exit::Model, format!("{} has no positions left for an answer", options.target.display()))
    })?;

    let mut report = GenerateReport::default();
    let mut before = HashMap::new();
    let identity = identity(options, chat, dtype)?;
    let protected = Protected::default().inputs(&options.prompts).folders([&options.target]);
    let output = PartialOutput::open(&options.out, &identity, options.force, &protected, &mut |line| {
        *before.entry(line.row).or_insert(0) += 1;
        count(&mut report, line);
    });
    report.conversations_before = before.len() as u64;
    let output = output.map_err(Failure::of(Exit::Data))?;
    let cores = crate::common::host::cores();
    let workers = options.workers.unwrap_or(if device == Device::Cpu { cores } else { 1 });
    let ended = std::thread::scope(|scope| {
        let threads = (cores / workers).max(1);
        let mut scheduler = Scheduler {
            options,
            bench: &bench,
            chat,
            workers: WorkerPool::start(scope, &bench.target, &settings, options.rows, workers, threads),
            prompts: PromptReader::new(options.prompts.clone()),
            before,
            in_flight: HashMap::new(),
            ready: VecDeque::new(),
            output,
            report,
        };
        scheduler.run(start, progress)?;
        // Dropping the pool ends its threads, for which the scope waits.
        let Scheduler { output, report, .. } = scheduler;
        Ok::<_, Failure>((output, report))
    });
    let (output, mut report) = ended?;
    if output.finish().map_err(Failure::of(Exit::Data))? {
        report.out = Some(options.out.clone());
    }
    Ok(report)
}

/// A conversation that is being answered.
struct InFlight {
    prompts: PromptConversation,
    conversation: Conversation,
    /// Token ids of the prompt that is being answered.
    ids: Vec<u32>,
    lines: Vec<AnswerLine>,
}

struct Scheduler<'a> {
    options: &'a GenerateOptions,
    bench: &'a LoadedTarget,
    chat: &'a ChatTokenizer,
    workers: WorkerPool,
    prompts: PromptReader,
    /// Number of answers of each conversation that an earlier start finished, by row.
    before: HashMap<u64, u64>,
    /// Conversations with an answer being decoded, by random stream.
    in_flight: HashMap<u64, InFlight>,
    /// Conversations with a further prompt.
    ready: VecDeque<InFlight>,
    output: PartialOutput,
    report: GenerateReport,
}

impl Scheduler<'_> {
    fn run(&mut self, start: Progress, progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>) -> Result<(), Failure> {
        let started = Instant::now();
        let (mut rows, mut tokens) = (0, 0);
        loop {
            while self.workers.has_free_slot() {
                let next = match self.ready.pop_front() {
                    Some(conversation) => Some(conversation),
                    None => self.next_conversation()?,
                };
                let Some(conversation) = next else { break };
                self.submit_next_prompt(conversation)?;
            }
            if self.workers.in_flight() == 0 {
                return Ok(());
            }
            let (answers, count) = self.workers.step().map_err(Failure::of(Exit::Internal))?;
            rows += count as u64;
            tokens += count as u64;
            for answer in answers {
                self.take_answer(answer)?;
            }
            let seconds = started.elapsed().as_secs_f64();
            let report = &mut self.report;
            report.forwards += 1;
            report.rows_per_forward = rows as f64 / report.forwards as f64;
            report.seconds = seconds;
            report.tokens_per_second = tokens as f64 / seconds.max(1e-9);
            let now = Progress {
                bytes_read: self.prompts.bytes_read(),
                conversations: report.conversations,
                answers: report.answers,
                tokens,
                tokens_per_second: report.tokens_per_second,
                left_out: report.rows_left_out(),
                rows: self.workers.in_flight() as u64,
                ..start.clone()
            };
            if progress(&now).is_break() {
                let (done, out) = (self.report.conversations, self.options.out.display());
                let text = format!(
                    "interrupted; {out}.part holds {done} answered conversations, and the same command resumes"
                );
                return Err(Failure::new(Exit::Interrupted, text));
            }
        }
    }

    /// Reads rows until one has a prompt and is not answered yet.
    fn next_conversation(&mut self) -> Result<Option<InFlight>, Failure> {
        loop {
            let taken = self.report.conversations as usize + self.in_flight.len() + self.ready.len();
            if self.options.limit.is_some_and(|limit| taken >= limit) {
                return Ok(None);
            }
            let next = self.prompts.next_row().map_err(|error| {
                Failure::new(Exit::Data, format!("{} cannot be read ({})", error.path.display(), error.source))
            })?;
            let Some(row) = next else { return Ok(None) };
            self.report.rows += 1;
            let mut prompts = match row {
                Ok(prompts) => prompts,
                Err(why) => {
                    *self.report.left_out.entry(why).or_default() += 1;
                    continue;
                }
            };
            let turns = self.options.turns.unwrap_or(usize::MAX).min(1 << TURN_BITS);
            if prompts.prompts.len() >= turns {
                prompts.prompts.truncate(turns);
                prompts.skipped = None;
            }
            if let Some(&answers) = self.before.get(&prompts.row) {
                // Its further prompts can only have been skipped for their length.
                let count = prompts.prompts.len() as u64;
                self.skip_prompts(SkipReason::TooLong, count - answers.min(count));
                self.skip_later_prompts(&prompts);
                continue;
            }
            let conversation = Conversation { turns: Vec::new(), tools: prompts.tools.take() };
            return Ok(Some(InFlight { prompts, conversation, ids: Vec::new(), lines: Vec::new() }));
        }
    }

    /// Submits the next prompt of a conversation, or writes it if there is none.
    fn submit_next_prompt(&mut self, mut flight: InFlight) -> Result<(), Failure> {
        let Some(turns) = flight.prompts.prompts.pop_front() else { return self.write(flight) };
        flight.conversation.turns.extend(turns);
        let ids = match self.prompt_ids(&flight.conversation) {
            Ok(ids) => ids,
            Err(why) if flight.lines.is_empty() => {
                *self.report.left_out.entry(why).or_default() += 1;
                return Ok(());
            }
            Err(why) => {
                self.skip_prompts(why, 1 + flight.prompts.prompts.len() as u64);
                return self.write(flight);
            }
        };
        let limit = self.positions() - ids.len();
        let stream = flight.prompts.row << TURN_BITS | flight.lines.len() as u64;
        self.workers.submit(&ids, limit, stream).map_err(Failure::of(Exit::Internal))?;
        flight.ids = ids;
        self.in_flight.insert(stream, flight);
        Ok(())
    }

    /// Token ids of the prompt, if the target can answer it.
    fn prompt_ids(&self, conversation: &Conversation) -> Result<Vec<u32>, SkipReason> {
        let ids = self.chat.row_prompt(conversation).map_err(|reject| SkipReason::Row(reject.reason))?;
        let vocab = self.bench.target.config().vocab_size;
        if ids.is_empty() {
            return Err(SkipReason::Row(Reason::Empty));
        }
        if ids.iter().any(|&id| id as usize >= vocab) {
            return Err(SkipReason::Row(Reason::TokenRange));
        }
        let positions = self.positions() - 1;
        let default = positions.saturating_sub(self.options.max_new_tokens - 1).max(1);
        let limit = self.options.max_prompt_tokens.unwrap_or(default).min(positions);
        if ids.len() > limit { Err(SkipReason::TooLong) } else { Ok(ids) }
    }

    fn positions(&self) -> usize {
        self.bench.target.config().max_position_embeddings
    }

    /// Adds an answer to its conversation and continues the conversation.
    fn take_answer(&mut self, answer: Answer) -> Result<(), Failure> {
        let Answer { stream, tokens, cut } = answer;
        let Some(mut flight) = self.in_flight.remove(&stream) else {
            return Err(Failure::new(Exit::Internal, format!("an answer belongs to no prompt: stream {stream}")));
        };
        let InFlight { prompts, conversation, ids, lines } = &mut flight;
        let mut loss_mask = vec![0; ids.len()];
        loss_mask.resize(ids.len() + tokens.len(), 1);
        let file = self.options.prompts.get(prompts.file).and_then(|path| path.file_name());
        lines.push(AnswerLine {
            file: file.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            line: prompts.line,
            row: prompts.row,
            turn: lines.len() as u64 + 1,
            last: false,
            cut,
            category: prompts.category.clone(),
            input_ids: [std::mem::take(ids), tokens.clone()].concat(),
            loss_mask,
        });
        if prompts.prompts.is_empty() {
            return self.write(flight);
        }
        match self.chat.decode(&tokens) {
            Ok(content) => {
                conversation.turns.push(Turn { role: Role::Assistant, content, extra: Default::default() });
                self.ready.push_back(flight);
                Ok(())
            }
            Err(_) => {
                self.skip_prompts(SkipReason::Row(Reason::Tokenizer), flight.prompts.prompts.len() as u64);
                self.write(flight)
            }
        }
    }

    /// Writes a conversation that has all its answers.
    fn write(&mut self, mut flight: InFlight) -> Result<(), Failure> {
        if let Some(last) = flight.lines.last_mut() {
            last.last = true;
        }
        self.output.write(&flight.lines).map_err(Failure::of(Exit::Data))?;
        flight.lines.iter().for_each(|line| count(&mut self.report, line));
        self.skip_later_prompts(&flight.prompts);
        Ok(())
    }

    fn skip_later_prompts(&mut self, prompts: &PromptConversation) {
        if let Some((why, count)) = prompts.skipped {
            self.skip_prompts(why, count);
        }
    }

    fn skip_prompts(&mut self, why: SkipReason, count: u64) {
        if count > 0 {
            *self.report.questions_left_out.entry(why).or_default() += count;
        }
    }
}

fn count(report: &mut GenerateReport, line: &AnswerLine) {
    report.conversations += u64::from(line.last);
    report.answers += 1;
    report.cut += u64::from(line.cut);
    report.tokens += line.answer_tokens();
    report.prompt_tokens += line.input_ids.len() as u64 - line.answer_tokens();
}

/// Everything that determines the answers. Device and batch size are excluded: they only change the last bits of logits.
fn identity(options: &GenerateOptions, chat: &ChatTokenizer, dtype: Dtype) -> Result<Value, Failure> {
    let target = fingerprint(&options.target).map_err(Failure::of(Exit::Model))?;
    let inputs = options.prompts.iter().map(|path| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        let content = sha256_file(path).map_err(|error| unreadable(path, &error.to_string()))?;
        Ok(json!({ "name": name, "bytes": size(path)?, "sha256": content }))
    });
    Ok(json!({
        "prompts": inputs.collect::<Result<Vec<_>, Failure>>()?,
        "target": target,
        "chat template": chat.template_sha256,
        "tokenizer": chat.tokenizer_sha256,
        "dtype": dtype.to_string(),
        "limit": options.limit,
        "max-new-tokens": options.max_new_tokens,
        "max-prompt-tokens": options.max_prompt_tokens,
        "turns": options.turns,
        "temperature": options.temperature,
        "seed": options.seed,
    }))
}

/// Size of an input in bytes. Called before the target is loaded, so that a wrong path fails at once.
fn size(path: &std::path::Path) -> Result<u64, Failure> {
    let why = match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => return Ok(metadata.len()),
        Ok(_) => "it is not a regular file".to_string(),
        Err(error) => error.to_string(),
    };
    Err(unreadable(path, &why))
}

fn unreadable(path: &std::path::Path, why: &str) -> Failure {
    Failure::new(
        Exit::Data,
        format!("{} cannot be read ({why}); give JSONL files of prompts, or JSON arrays", path.display()),
    )
}
