//! Batched decoding of the target alone: prompts enter as rows become free, and answers leave as they end.

use super::sampling::most_likely;
use super::{Sampler, Settings};
use crate::model::ModelError;
use crate::model::ops::{HEAD_ROWS, spans};
use crate::model::target::Target;
use crate::model::target::batched_kv_cache::BatchedKvCache;
use std::collections::VecDeque;
use tch::Tensor;

/// Limit on prompt tokens per forward, which bounds its activations. A single longer prompt is still read whole.
const PROMPT_TOKENS: usize = 2048;

/// Batch of prompts that are answered concurrently. Each answer equals that of [`super::plain`] for its prompt, up to
/// rounding.
pub struct Batch<'a> {
    target: &'a Target,
    settings: &'a Settings,
    max_rows: usize,
    /// Keys and values of all tokens except the last one of each row, which the target has not read yet.
    cache: BatchedKvCache,
    rows: Vec<Row>,
    waiting: VecDeque<(Vec<i32>, Row)>,
}

/// Answer to one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Random stream of the prompt, by which the caller identifies it.
    pub stream: u64,
    /// Generated tokens, including a stop token.
    pub tokens: Vec<u32>,
    /// True if the token limit ended the answer, not a stop token.
    pub cut: bool,
}

struct Row {
    stream: u64,
    limit: usize,
    sampler: Sampler,
    tokens: Vec<u32>,
}

impl<'a> Batch<'a> {
    /// Creates an empty batch that answers at most `rows` prompts at a time.
    pub fn new(target: &'a Target, settings: &'a Settings, rows: usize) -> Batch<'a> {
        let (cache, max_rows) = (target.batched_cache(), rows.max(1));
        Batch { target, settings, max_rows, cache, rows: Vec::new(), waiting: VecDeque::new() }
    }

    /// Number of free rows; waiting prompts count as taken.
    pub fn free(&self) -> usize {
        self.max_rows.saturating_sub(self.rows.len() + self.waiting.len())
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.waiting.is_empty()
    }

    /// Queues a prompt; its answer has at most `limit` tokens and at most `max_new_tokens`. `stream` selects the random
    /// stream under the seed.
    ///
    /// # Errors
    /// `ModelError::Input` if the prompt is empty or no token is allowed.
    pub fn push(&mut self, prompt: &[u32], limit: usize, stream: u64) -> Result<(), ModelError> {
        let limit = limit.min(self.settings.max_new_tokens);
        if prompt.is_empty() || limit == 0 {
            return Err(ModelError::Input(
                "decoding needs a prompt of at least one token and a limit of at least one new token".into(),
            ));
        }
        let ids = prompt.iter().map(|&id| id as i32).collect();
        let row = Row { stream, limit, sampler: Sampler::new(self.settings, stream), tokens: Vec::new() };
        self.waiting.push_back((ids, row));
        Ok(())
    }

    /// Runs one forward, which adds one token to every row, including rows that enter. Returns the answers that ended
    /// and the number of rows in the forward.
    ///
    /// # Errors
    /// Returns an error if an id is outside the vocabulary or libtorch fails.
    pub fn step(&mut self) -> Result<(Vec<Answer>, usize), ModelError> {
        let next: Vec<i32> = self.rows.iter().filter_map(|row| row.tokens.last()).map(|&id| id as i32).collect();
        let mut prompts = Vec::new();
        let mut read = 0;
        while let Some((ids, _)) = self.waiting.front() {
            read += ids.len();
            if self.rows.len() == self.max_rows || (read > PROMPT_TOKENS && !prompts.is_empty()) {
                break;
            }
            if let Some((ids, row)) = self.waiting.pop_front() {
                prompts.push(ids);
                self.rows.push(row);
            }
        }
        if self.rows.is_empty() {
            return Ok((Vec::new(), 0));
        }
        let prompts: Vec<&[i32]> = prompts.iter().map(Vec::as_slice).collect();
        let normed = self.target.advance(&mut self.cache, &next, &prompts)?;
        let count = self.rows.len();
        let rows = spans(count as i64, HEAD_ROWS);
        for part in rows {
            let logits = self.target.logits(&part.of(&normed, 0)?)?;
            self.choose(part.start as usize, &logits)?;
        }
        let mut answers = Vec::new();
        // In descending order, because removing a row gives its number to the last row.
        for number in (0..count).rev() {
            let row = &self.rows[number];
            let stopped = row.tokens.last().is_some_and(|last| self.settings.stop.contains(last));
            if stopped || row.tokens.len() >= row.limit {
                self.cache.remove(number)?;
                let Row { stream, tokens, .. } = self.rows.swap_remove(number);
                answers.push(Answer { stream, tokens, cut: !stopped });
            }
        }
        Ok((answers, count))
    }

    /// Chooses the next token of the rows from `start` on from `logits [rows, vocab]`.
    fn choose(&mut self, start: usize, logits: &Tensor) -> Result<(), ModelError> {
        let rows = &mut self.rows[start..start + logits.size()[0] as usize];
        if self.settings.temperature == 0.0 {
            for (row, id) in rows.iter_mut().zip(most_likely(logits)?) {
                row.tokens.push(id);
            }
            return Ok(());
        }
        for (index, row) in (0..).zip(rows) {
            row.tokens.extend(row.sampler.choose(&logits.f_narrow(0, index, 1)?)?);
        }
        Ok(())
    }
}
