//! Decoding session of one response: target cache, drafter cache and the tokens so far.

use super::{Proposal, Proposer, Response, Sampler, Settings, Step};
use crate::model::ModelError;
use crate::model::target::Target;
use crate::model::target::kv_cache::KvCache;
use tch::Tensor;

/// Response that grows step by step. Without a drafter, each step adds one token.
pub struct Session<'a, D: Proposer> {
    target: &'a Target,
    settings: &'a Settings,
    /// Keys and values of all tokens except the last one, which the target has not read yet.
    cache: KvCache,
    draft: Option<Draft<'a, D>>,
    sampler: Sampler,
    response: Response,
    done: bool,
}

struct Draft<'a, D: Proposer> {
    drafter: &'a D,
    cache: D::Cache,
    /// Taps of the tokens committed since the drafter's last proposal.
    context: Tensor,
}

impl<'a, D: Proposer> Session<'a, D> {
    /// Reads the prompt and chooses the first token. `stream` selects the random stream under the seed.
    ///
    /// # Errors
    /// `ModelError::Input` if the prompt is empty or no token is allowed; otherwise if libtorch fails.
    pub fn begin(
        target: &'a Target,
        drafter: Option<&'a D>,
        prompt: &[u32],
        settings: &'a Settings,
        stream: u64,
    ) -> Result<Session<'a, D>, ModelError> {
        if prompt.is_empty() || settings.max_new_tokens == 0 {
            return Err(ModelError::Input(
                "decoding needs a prompt of at least one token and a limit of at least one new token".into(),
            ));
        }
        let mut cache = target.cache();
        let ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
        let seen = target.extend(&mut cache, &ids, drafter.map_or(&[], D::taps))?;
        cache.commit(ids.len() as i64);
        let mut sampler = Sampler::new(settings, stream);
        let first = sampler.choose(&target.logits(&seen.normed.f_narrow(0, ids.len() as i64 - 1, 1)?)?)?;
        let draft = match drafter {
            Some(drafter) => Some(Draft { drafter, cache: drafter.begin()?, context: seen.taps }),
            None => None,
        };
        let response = Response { tokens: first, ..Response::default() };
        let mut session = Session { target, settings, cache, draft, sampler, response, done: false };
        session.done = session.ended();
        Ok(session)
    }

    /// Runs one verification; returns false if the response was complete already.
    ///
    /// # Errors
    /// Returns an error if an id is outside the vocabulary or libtorch fails.
    pub fn step(&mut self) -> Result<bool, ModelError> {
        let Some(&last) = self.response.tokens.last().filter(|_| !self.done) else { return Ok(false) };
        let remaining = self.settings.max_new_tokens - self.response.tokens.len();
        let (logits, drafted) = match &mut self.draft {
            Some(draft) => {
                // The target adds its own token after the drafted ones, so verify only as many as fit before it.
                let limit = remaining.saturating_sub(1);
                let sampler = &mut self.sampler;
                let mut draw = |logits: &Tensor| sampler.choose(logits);
                let proposal = draft.drafter.propose(&mut draft.cache, &draft.context, last, limit, &mut draw)?;
                let proposal = proposal.cut(self.settings.min_survival)?;
                self.response.survivals.push(proposal.survival());
                let Proposal { tokens, logits, .. } = proposal;
                (Some(logits), tokens)
            }
            None => (None, Vec::new()),
        };
        let ids: Vec<i32> = std::iter::once(&last).chain(&drafted).map(|&id| id as i32).collect();
        let taps = self.draft.as_ref().map_or(&[][..], |draft| draft.drafter.taps());
        let seen = self.target.extend(&mut self.cache, &ids, taps)?;
        let own = self.target.logits(&seen.normed)?;
        let (accepted, next) = match &logits {
            Some(logits) => self.sampler.verify(&drafted, logits, &own)?,
            None => (0, self.sampler.choose(&own)?[0]),
        };
        // Commit the last token and the accepted ones; the target's next token is read by the next step.
        self.cache.commit(1 + accepted as i64);
        if let Some(draft) = &mut self.draft {
            draft.context = seen.taps.f_narrow(0, 0, 1 + accepted as i64)?;
        }
        self.commit(&drafted, accepted, next);
        Ok(true)
    }

    /// True if the response is complete.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Tokens in the target's cache: prompt and response without the last token, unless a stop token cut a step.
    pub fn cached(&self) -> i64 {
        self.cache.len()
    }

    /// Tokens of the response so far.
    pub fn tokens(&self) -> &[u32] {
        &self.response.tokens
    }

    pub fn into_response(self) -> Response {
        self.response
    }

    fn commit(&mut self, drafted: &[u32], accepted: usize, next: u32) {
        let stop = drafted[..accepted].iter().position(|id| self.settings.stop.contains(id));
        let step = match stop {
            // Tokens after the stop token are not part of the response.
            Some(index) => Step { drafted: index + 1, accepted: index + 1, produced: index + 1 },
            None => Step { drafted: drafted.len(), accepted, produced: accepted + 1 },
        };
        self.response.tokens.extend(&drafted[..step.accepted]);
        if stop.is_none() {
            self.response.tokens.push(next);
        }
        self.response.steps.push(step);
        self.done = self.ended();
    }

    fn ended(&self) -> bool {
        let tokens = &self.response.tokens;
        tokens.len() >= self.settings.max_new_tokens
            || tokens.last().is_some_and(|last| self.settings.stop.contains(last))
    }
}
