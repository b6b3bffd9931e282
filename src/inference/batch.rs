//! Many answers of the target alone in one forward each step: prompts enter as places become free, and answers leave as they end.

use super::sampling::most_likely;
use super::{Chance, Settings};
use crate::model::ModelError;
use crate::model::ops::{HEAD_ROWS, spans};
use crate::model::target::Target;
use crate::model::target::batched_kv_cache::Shelves;
use std::collections::VecDeque;
use tch::Tensor;

/// Tokens of prompts that one forward reads, unless a single prompt has more: what bounds its activations.
const PROMPT_TOKENS: usize = 2048;

/// Prompts that are answered side by side. Each answer is the one that [`super::plain`] gives to its prompt alone, as far as
/// rounding decides nothing.
pub struct Batch<'a> {
    target: &'a Target,
    settings: &'a Settings,
    places: usize,
    /// Keys of all tokens but each row's last one, which the target has not seen yet.
    cache: Shelves,
    rows: Vec<Row>,
    waiting: VecDeque<(Vec<i32>, Row)>,
}

/// What was said to a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The prompt's stream of chance, by which the caller knows it.
    pub stream: u64,
    /// A stop token is part of it.
    pub tokens: Vec<u32>,
    /// It ended with its room, not with a stop token.
    pub cut: bool,
}

struct Row {
    stream: u64,
    most: usize,
    chance: Chance,
    tokens: Vec<u32>,
}

impl<'a> Batch<'a> {
    /// No prompt yet; at most `places` will be answered at a time.
    pub fn new(target: &'a Target, settings: &'a Settings, places: usize) -> Batch<'a> {
        let (cache, places) = (target.shelves(), places.max(1));
        Batch { target, settings, places, cache, rows: Vec::new(), waiting: VecDeque::new() }
    }

    /// Places that neither a prompt nor an answer on its way has taken.
    pub fn free(&self) -> usize {
        self.places.saturating_sub(self.rows.len() + self.waiting.len())
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.waiting.is_empty()
    }

    /// Takes in a prompt, whose answer may have `most` tokens or `max_new_tokens`, whichever are fewer. It waits where no place
    /// is free. `stream` tells the prompts of one seed apart.
    pub fn push(&mut self, prompt: &[u32], most: usize, stream: u64) -> Result<(), ModelError> {
        let most = most.min(self.settings.max_new_tokens);
        if prompt.is_empty() || most == 0 {
            return Err(ModelError::Input(
                "decoding needs a prompt of at least one token, and room for one more".into(),
            ));
        }
        let ids = prompt.iter().map(|&id| id as i32).collect();
        let row = Row { stream, most, chance: Chance::new(self.settings, stream), tokens: Vec::new() };
        self.waiting.push_back((ids, row));
        Ok(())
    }

    /// One forward: a token for every row, the first one for those that enter. Gives the answers that ended with it, and the
    /// number of rows that had a part in it.
    pub fn step(&mut self) -> Result<(Vec<Answer>, usize), ModelError> {
        let next: Vec<i32> = self.rows.iter().filter_map(|row| row.tokens.last()).map(|&id| id as i32).collect();
        let mut prompts = Vec::new();
        let mut read = 0;
        while let Some((ids, _)) = self.waiting.front() {
            read += ids.len();
            if self.rows.len() == self.places || (read > PROMPT_TOKENS && !prompts.is_empty()) {
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
        // From the last one on, because the last one takes the number of one that leaves.
        for number in (0..count).rev() {
            let row = &self.rows[number];
            let stopped = row.tokens.last().is_some_and(|last| self.settings.stop.contains(last));
            if stopped || row.tokens.len() >= row.most {
                self.cache.remove(number)?;
                let Row { stream, tokens, .. } = self.rows.swap_remove(number);
                answers.push(Answer { stream, tokens, cut: !stopped });
            }
        }
        Ok((answers, count))
    }

    /// Gives each row from `start` on its next token, chosen from `logits [rows, vocab]`.
    fn choose(&mut self, start: usize, logits: &Tensor) -> Result<(), ModelError> {
        let rows = &mut self.rows[start..start + logits.size()[0] as usize];
        if self.settings.temperature == 0.0 {
            for (row, id) in rows.iter_mut().zip(most_likely(logits)?) {
                row.tokens.push(id);
            }
            return Ok(());
        }
        for (place, row) in (0..).zip(rows) {
            row.tokens.extend(row.chance.choose(&logits.f_narrow(0, place, 1)?)?);
        }
        Ok(())
    }
}
