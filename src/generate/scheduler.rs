//! The work itself: conversations enter the batch as places become free, and go on with each answer.

use super::{
    GenerateOptions,
    partial_output::{Line, Part},
    prompts::{Asked, LeftOut, Questions},
    report::{GenerateReport, Progress},
    workers::Crew,
};
use crate::{
    common::exit::{Exit, Failure},
    config::Dtype,
    data::{
        Reason,
        chat::{Conversation, Role, Turn},
        encode::Chat,
    },
    hf::fingerprint::fingerprint,
    inference::{Answer, loaded_target::Bench},
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

/// Turns of one conversation that have a stream of chance of their own.
const TURN_BITS: u32 = 16;

/// Answers all prompts. `tell` hears how far it is after each forward, and may break off: what is answered so far stays, and the
/// next start goes on from there. Where nothing is a prompt, nothing is written.
pub fn generate(
    options: &GenerateOptions,
    tell: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<GenerateReport, Failure> {
    let device = open_device(options.device).map_err(Failure::of(Exit::Usage))?;
    let dtype = options.dtype.or(|| if device == Device::Cpu { Dtype::F32 } else { Dtype::Bf16 });
    let mut progress = Progress { limit: options.limit.map(|limit| limit as u64), ..Progress::default() };
    for path in &options.prompts {
        progress.bytes_total += size(path)?;
    }
    let bench = Bench::load(&options.target, kind_of(dtype.into()), device).map_err(Failure::of(Exit::Model))?;
    let chat = bench.chat.as_ref().map_err(|why| Failure::new(Exit::Model, why))?;
    let settings = bench.settings(1, options.max_new_tokens, options.temperature, options.seed).ok_or_else(|| {
        Failure::new(Exit::Model, format!("{} has no position for an answer", options.target.display()))
    })?;

    let mut report = GenerateReport::default();
    let mut before = HashMap::new();
    let identity = identity(options, chat, dtype)?;
    let part = Part::open(&options.out, &identity, options.force, &mut |line| {
        *before.entry(line.place).or_insert(0) += 1;
        count(&mut report, line);
    });
    report.conversations_before = before.len() as u64;
    let part = part.map_err(Failure::of(Exit::Data))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = options.workers.unwrap_or(if device == Device::Cpu { cores } else { 1 });
    let work = std::thread::scope(|scope| {
        let threads = (cores / workers).max(1);
        let mut work = Work {
            options,
            bench: &bench,
            chat,
            crew: Crew::start(scope, &bench.target, &settings, options.rows, workers, threads),
            questions: Questions::new(options.prompts.clone()),
            before,
            flights: HashMap::new(),
            ready: VecDeque::new(),
            part,
            report,
        };
        work.run(progress, tell)?;
        // The crew ends here, or this scope would not.
        let Work { part, report, .. } = work;
        Ok::<_, Failure>((part, report))
    });
    let (part, mut report) = work?;
    if part.finish().map_err(Failure::of(Exit::Data))? {
        report.out = Some(options.out.clone());
    }
    Ok(report)
}

/// A conversation on its way.
struct Flight {
    asked: Asked,
    conversation: Conversation,
    /// The prompt that is being answered.
    ids: Vec<u32>,
    lines: Vec<Line>,
}

struct Work<'a> {
    options: &'a GenerateOptions,
    bench: &'a Bench,
    chat: &'a Chat,
    crew: Crew,
    questions: Questions,
    /// Answers of each conversation that an earlier start finished, by its place.
    before: HashMap<u64, u64>,
    /// Those with an answer on its way, by its stream.
    flights: HashMap<u64, Flight>,
    /// Those that have a further question.
    ready: VecDeque<Flight>,
    part: Part,
    report: GenerateReport,
}

impl Work<'_> {
    fn run(
        &mut self,
        mut progress: Progress,
        tell: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<(), Failure> {
        let begun = Instant::now();
        let (mut rows, mut tokens) = (0, 0);
        loop {
            while self.crew.free() {
                let next = match self.ready.pop_front() {
                    Some(flight) => Some(flight),
                    None => self.next()?,
                };
                let Some(flight) = next else { break };
                self.enter(flight)?;
            }
            if self.crew.busy() == 0 {
                return Ok(());
            }
            let (answers, count) = self.crew.step().map_err(Failure::of(Exit::Internal))?;
            rows += count as u64;
            tokens += count as u64;
            for answer in answers {
                self.answered(answer)?;
            }
            let seconds = begun.elapsed().as_secs_f64();
            let report = &mut self.report;
            report.forwards += 1;
            report.rows_per_forward = rows as f64 / report.forwards as f64;
            report.seconds = seconds;
            report.tokens_per_second = tokens as f64 / seconds.max(1e-9);
            progress = Progress {
                bytes_read: self.questions.bytes_read(),
                conversations: report.conversations,
                answers: report.answers,
                tokens,
                tokens_per_second: report.tokens_per_second,
                left_out: report.rows_left_out(),
                rows: self.crew.busy() as u64,
                ..progress
            };
            if tell(&progress).is_break() {
                let (done, part) = (self.report.conversations, self.options.out.display());
                let text = format!(
                    "interrupted; {done} answered conversations lie in {part}.part, and the same command goes on"
                );
                return Err(Failure::new(Exit::Interrupted, text));
            }
        }
    }

    /// The next row that asks something and is not answered yet.
    fn next(&mut self) -> Result<Option<Flight>, Failure> {
        loop {
            let taken = self.report.conversations as usize + self.flights.len() + self.ready.len();
            if self.options.limit.is_some_and(|limit| taken >= limit) {
                return Ok(None);
            }
            let next = self.questions.row().map_err(|error| {
                Failure::new(Exit::Data, format!("{} cannot be read ({})", error.path.display(), error.source))
            })?;
            let Some(row) = next else { return Ok(None) };
            self.report.rows += 1;
            let mut asked = match row {
                Ok(asked) => asked,
                Err(why) => {
                    *self.report.left_out.entry(why).or_default() += 1;
                    continue;
                }
            };
            let turns = self.options.turns.unwrap_or(usize::MAX).min(1 << TURN_BITS);
            if asked.questions.len() >= turns {
                asked.questions.truncate(turns);
                asked.left_out = None;
            }
            if let Some(&answers) = self.before.get(&asked.place) {
                // Only their length can have kept its further questions from being answered.
                self.leave_out(
                    LeftOut::TooLong,
                    asked.questions.len() as u64 - answers.min(asked.questions.len() as u64),
                );
                self.leave_out_later(&asked);
                continue;
            }
            let conversation = Conversation { turns: Vec::new(), tools: asked.tools.take() };
            return Ok(Some(Flight { asked, conversation, ids: Vec::new(), lines: Vec::new() }));
        }
    }

    /// Asks the next question of a conversation, or closes it.
    fn enter(&mut self, mut flight: Flight) -> Result<(), Failure> {
        let Some(turns) = flight.asked.questions.pop_front() else { return self.close(flight) };
        flight.conversation.turns.extend(turns);
        let ids = match self.prompt(&flight.conversation) {
            Ok(ids) => ids,
            Err(why) if flight.lines.is_empty() => {
                *self.report.left_out.entry(why).or_default() += 1;
                return Ok(());
            }
            Err(why) => {
                self.leave_out(why, 1 + flight.asked.questions.len() as u64);
                return self.close(flight);
            }
        };
        let room = self.positions() - ids.len();
        let stream = flight.asked.place << TURN_BITS | flight.lines.len() as u64;
        self.crew.ask(&ids, room, stream).map_err(Failure::of(Exit::Internal))?;
        flight.ids = ids;
        self.flights.insert(stream, flight);
        Ok(())
    }

    /// Tokens up to where the answer begins, if the target can answer them.
    fn prompt(&self, conversation: &Conversation) -> Result<Vec<u32>, LeftOut> {
        let ids = self.chat.question(conversation).map_err(|reject| LeftOut::Row(reject.reason))?;
        let vocab = self.bench.target.config().vocab_size;
        if ids.is_empty() {
            return Err(LeftOut::Row(Reason::Empty));
        }
        if ids.iter().any(|&id| id as usize >= vocab) {
            return Err(LeftOut::Row(Reason::TokenRange));
        }
        let room = self.positions() - 1;
        let beside_an_answer = room.saturating_sub(self.options.max_new_tokens - 1).max(1);
        let most = self.options.max_prompt_tokens.unwrap_or(beside_an_answer).min(room);
        if ids.len() > most { Err(LeftOut::TooLong) } else { Ok(ids) }
    }

    fn positions(&self) -> usize {
        self.bench.target.config().max_position_embeddings
    }

    /// Takes an answer in, and goes on with its conversation.
    fn answered(&mut self, answer: Answer) -> Result<(), Failure> {
        let Answer { stream, tokens, cut } = answer;
        let Some(mut flight) = self.flights.remove(&stream) else {
            return Err(Failure::new(Exit::Internal, format!("an answer came to nobody's question, {stream}")));
        };
        let Flight { asked, conversation, ids, lines } = &mut flight;
        let mut loss_mask = vec![0; ids.len()];
        loss_mask.resize(ids.len() + tokens.len(), 1);
        let file = self.options.prompts.get(asked.file).and_then(|path| path.file_name());
        lines.push(Line {
            file: file.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            line: asked.line,
            place: asked.place,
            turn: lines.len() as u64 + 1,
            last: false,
            cut,
            category: asked.category.clone(),
            input_ids: [std::mem::take(ids), tokens.clone()].concat(),
            loss_mask,
        });
        if asked.questions.is_empty() {
            return self.close(flight);
        }
        match self.chat.answer(&tokens) {
            Ok(content) => {
                conversation.turns.push(Turn { role: Role::Assistant, content, extra: Default::default() });
                self.ready.push_back(flight);
                Ok(())
            }
            Err(_) => {
                self.leave_out(LeftOut::Row(Reason::Tokenizer), flight.asked.questions.len() as u64);
                self.close(flight)
            }
        }
    }

    /// Writes a conversation that has all its answers.
    fn close(&mut self, mut flight: Flight) -> Result<(), Failure> {
        if let Some(last) = flight.lines.last_mut() {
            last.last = true;
        }
        self.part.write(&flight.lines).map_err(Failure::of(Exit::Data))?;
        flight.lines.iter().for_each(|line| count(&mut self.report, line));
        self.leave_out_later(&flight.asked);
        Ok(())
    }

    fn leave_out_later(&mut self, asked: &Asked) {
        if let Some((why, questions)) = asked.left_out {
            self.leave_out(why, questions);
        }
    }

    fn leave_out(&mut self, why: LeftOut, questions: u64) {
        if questions > 0 {
            *self.report.questions_left_out.entry(why).or_default() += questions;
        }
    }
}

fn count(report: &mut GenerateReport, line: &Line) {
    report.conversations += u64::from(line.last);
    report.answers += 1;
    report.cut += u64::from(line.cut);
    report.tokens += line.answered();
    report.prompt_tokens += line.input_ids.len() as u64 - line.answered();
}

/// What the answers follow from. Where they are made, and how many at once, only decides on the last bits of a number.
fn identity(options: &GenerateOptions, chat: &Chat, dtype: Dtype) -> Result<Value, Failure> {
    let target = fingerprint(&options.target).map_err(Failure::of(Exit::Model))?;
    let inputs = options.prompts.iter().map(|path| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(json!({ "name": name, "bytes": size(path)? }))
    });
    Ok(json!({
        "prompts": inputs.collect::<Result<Vec<_>, Failure>>()?,
        "target": target,
        "chat template": chat.template_sha256,
        "tokenizer": chat.tokenizer_sha256,
        "number type": dtype.to_string(),
        "limit": options.limit,
        "max-new-tokens": options.max_new_tokens,
        "max-prompt-tokens": options.max_prompt_tokens,
        "turns": options.turns,
        "temperature": options.temperature,
        "seed": options.seed,
    }))
}

/// Bytes of an input: a path that is wrong shows before the target is loaded.
fn size(path: &std::path::Path) -> Result<u64, Failure> {
    let why = match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => return Ok(metadata.len()),
        Ok(_) => "it is not a regular file".to_string(),
        Err(error) => error.to_string(),
    };
    Err(Failure::new(
        Exit::Data,
        format!("{} cannot be read ({why}); give JSONL files of prompts, or JSON arrays", path.display()),
    ))
}
