//! One response on its way: the target's cache, the drafter's memory, and what they agreed on so far.

use super::{Chance, Drafting, Response, Settings, Step};
use crate::model::ModelError;
use crate::model::target::Target;
use crate::model::target::kv_cache::KvCache;
use tch::Tensor;

/// A response that grows by one step at a time. Without a drafter every step brings one token.
pub struct Session<'a, D: Drafting> {
    target: &'a Target,
    settings: &'a Settings,
    /// Keys of all tokens but the last one, which the target has not seen yet.
    cache: KvCache,
    draft: Option<Draft<'a, D>>,
    chance: Chance,
    response: Response,
    done: bool,
}

struct Draft<'a, D: Drafting> {
    drafter: &'a D,
    memory: D::Memory,
    /// Taps of the tokens that were committed since the drafter's last turn.
    context: Tensor,
}

impl<'a, D: Drafting> Session<'a, D> {
    /// Reads the prompt and chooses the first token. `stream` tells the prompts of one seed apart.
    pub fn begin(
        target: &'a Target,
        drafter: Option<&'a D>,
        prompt: &[u32],
        settings: &'a Settings,
        stream: u64,
    ) -> Result<Session<'a, D>, ModelError> {
        if prompt.is_empty() || settings.max_new_tokens == 0 {
            return Err(ModelError::Input(
                "decoding needs a prompt of at least one token, and room for one more".into(),
            ));
        }
        let mut cache = target.cache();
        let ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
        let seen = target.extend(&mut cache, &ids, drafter.map_or(&[], D::taps))?;
        cache.keep(ids.len() as i64);
        let mut chance = Chance::new(settings, stream);
        let first = chance.choose(&target.logits(&seen.normed.f_narrow(0, ids.len() as i64 - 1, 1)?)?)?;
        let draft = match drafter {
            Some(drafter) => Some(Draft { drafter, memory: drafter.begin()?, context: seen.taps }),
            None => None,
        };
        let response = Response { tokens: first, steps: Vec::new() };
        let mut session = Session { target, settings, cache, draft, chance, response, done: false };
        session.done = session.ended();
        Ok(session)
    }

    /// One verification; false when the response was complete before it.
    pub fn step(&mut self) -> Result<bool, ModelError> {
        let Some(&last) = self.response.tokens.last().filter(|_| !self.done) else { return Ok(false) };
        let room = self.settings.max_new_tokens - self.response.tokens.len();
        let (logits, drafted) = match &mut self.draft {
            Some(draft) => {
                let logits = draft.drafter.propose(&mut draft.memory, &draft.context, last)?;
                // Behind the drafts comes the target's own token: what cannot fit is not verified.
                let logits = logits.f_narrow(0, 0, logits.size()[0].min(room as i64 - 1))?;
                let drafted = self.chance.choose(&logits)?;
                (Some(logits), drafted)
            }
            None => (None, Vec::new()),
        };
        let ids: Vec<i32> = std::iter::once(&last).chain(&drafted).map(|&id| id as i32).collect();
        let taps = self.draft.as_ref().map_or(&[][..], |draft| draft.drafter.taps());
        let seen = self.target.extend(&mut self.cache, &ids, taps)?;
        let own = self.target.logits(&seen.normed)?;
        let (accepted, next) = match &logits {
            Some(logits) => self.chance.verify(&drafted, logits, &own)?,
            None => (0, self.chance.choose(&own)?[0]),
        };
        // The last token and the accepted ones are committed; the target's next one is for the step to come.
        self.cache.keep(1 + accepted as i64);
        if let Some(draft) = &mut self.draft {
            draft.context = seen.taps.f_narrow(0, 0, 1 + accepted as i64)?;
        }
        self.commit(&drafted, accepted, next);
        Ok(true)
    }

    /// Whether nothing more will come.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Tokens of the target's cache: prompt and response without its last token, as long as no stop token cut a step.
    pub fn cached(&self) -> i64 {
        self.cache.len()
    }

    /// What was said so far.
    pub fn tokens(&self) -> &[u32] {
        &self.response.tokens
    }

    pub fn into_response(self) -> Response {
        self.response
    }

    fn commit(&mut self, drafted: &[u32], accepted: usize, next: u32) {
        let stop = drafted[..accepted].iter().position(|id| self.settings.stop.contains(id));
        let step = match stop {
            // What lies behind the stop token was never part of the response.
            Some(place) => Step { drafted: place + 1, accepted: place + 1, produced: place + 1 },
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
