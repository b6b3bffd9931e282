//! Speculative decoding (`docs/dflash.md#decoding`): the drafter proposes a block and the target verifies it in one
//! forward. The output has the distribution of the target alone.

mod accuracy;
mod batch;
pub mod loaded_target;
mod proposer;
mod sampling;
mod session;

pub use self::accuracy::{SlotAccuracy, slot_accuracy};
pub use self::batch::{Answer, Batch};
pub use self::proposer::{ContextCache, Proposer};
pub use self::sampling::{Sampler, most_likely};
pub use self::session::Session;
pub use crate::model::SlotCount;
pub use crate::model::drafter::head::{Draw, Proposal};

use crate::model::ModelError;
use crate::model::target::Target;

/// Sampling and stop settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Limit on the tokens of a response, including a stop token.
    pub max_new_tokens: usize,
    /// 0 takes the most likely token; any other value samples.
    pub temperature: f64,
    /// Tokens that end a response.
    pub stop: Vec<u32>,
    /// Seed of the sampler.
    pub seed: u64,
    /// Least survival of a drafted token that is verified, as the confidence head predicts it; 0 verifies every token.
    pub min_survival: f64,
}

/// Result of one verification by the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Drafted tokens that were verified: all that a block proposes, or fewer at the end of the response.
    pub drafted: usize,
    /// Drafted tokens that were accepted: the next tokens of the response.
    pub accepted: usize,
    /// Tokens added by the step: the accepted ones, and the target's next token unless a stop token ended the response.
    pub produced: usize,
}

/// Response to one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Response {
    /// Tokens including a stop token. The first one comes from the forward over the prompt and belongs to no step.
    pub tokens: Vec<u32>,
    pub steps: Vec<Step>,
    /// Predicted survival of the verified tokens of each step; without a confidence head, each list is empty.
    pub survivals: Vec<Vec<f64>>,
}

/// Answers all prompts in turn, one step of each at a time. Each answer is the same as for its prompt alone.
///
/// # Errors
/// Returns an error if a prompt is empty, an id is outside the vocabulary, or libtorch fails.
pub fn speculative<D: Proposer>(
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

/// Decodes with the target alone, one token per step, with the same cache. `stream` selects the random stream under the
/// seed.
///
/// # Errors
/// Returns an error if the prompt is empty, an id is outside the vocabulary, or libtorch fails.
pub fn plain(target: &Target, prompt: &[u32], settings: &Settings, stream: u64) -> Result<Response, ModelError> {
    let mut session = Session::<crate::model::drafter::Drafter>::begin(target, None, prompt, settings, stream)?;
    while session.step()? {}
    Ok(session.into_response())
}
