//! Speculative decoding (`reference/dflash.md` section 5.1): a drafter proposes a block, the target verifies it in one
//! forward, and what comes out is what the target alone would have said.

mod accuracy;
mod batch;
pub mod loaded_target;
mod proposer;
mod sampling;
mod session;

pub use self::accuracy::slot_accuracy;
pub use self::batch::{Answer, Batch};
pub use self::proposer::{ContextCache, Drafting};
pub use self::sampling::Chance;
pub use self::session::Session;
pub use crate::model::SlotCount;

use crate::model::ModelError;
use crate::model::target::Target;

/// How tokens are chosen, and when a response ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Tokens of a response at most, a stop token included.
    pub max_new_tokens: usize,
    /// 0 takes the most likely token; any other value samples.
    pub temperature: f64,
    /// Tokens that end a response.
    pub stop: Vec<u32>,
    /// Seed of all chance.
    pub seed: u64,
}

/// One verification by the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Drafted tokens that were verified: one fewer than the block has slots, fewer where the response ended.
    pub drafted: usize,
    /// Those of them that became part of the response, which are its next tokens.
    pub accepted: usize,
    /// Tokens that the step brought: the accepted ones and the target's own next one, unless a stop token came before it.
    pub produced: usize,
}

/// What was said to a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Response {
    /// The first of them comes from the prompt's forward and belongs to no step. A stop token is part of it.
    pub tokens: Vec<u32>,
    pub steps: Vec<Step>,
}

/// Answers all prompts side by side, one step of each in turn. Each answer is the one that its prompt alone would get.
pub fn speculative<D: Drafting>(
    target: &Target,
    drafter: &D,
    prompts: &[Vec<u32>],
    settings: &Settings,
) -> Result<Vec<Response>, ModelError> {
    let begin = |(stream, prompt): (u64, &Vec<u32>)| Session::begin(target, Some(drafter), prompt, settings, stream);
    let mut sessions = (0..).zip(prompts).map(begin).collect::<Result<Vec<_>, _>>()?;
    loop {
        let mut busy = false;
        for session in &mut sessions {
            busy |= session.step()?;
        }
        if !busy {
            return Ok(sessions.into_iter().map(Session::into_response).collect());
        }
    }
}

/// The target alone, one token a step, with the same cache. `stream` tells the prompts of one seed apart.
pub fn plain(target: &Target, prompt: &[u32], settings: &Settings, stream: u64) -> Result<Response, ModelError> {
    let mut session = Session::<crate::model::drafter::Drafter>::begin(target, None, prompt, settings, stream)?;
    while session.step()? {}
    Ok(session.into_response())
}
