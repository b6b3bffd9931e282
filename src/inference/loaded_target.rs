//! Whole target on one device, with tokenizer and stop tokens, for decoding and evaluation.

use super::Settings;
use crate::{
    data::{
        chat::{Conversation, Role, Turn},
        encode::ChatTokenizer,
    },
    hf::{config::TargetConfig, draft::DraftConfig, stop_tokens::stop_tokens, tensors::TensorFiles},
    model::{
        ModelError,
        drafter::{DraftOptions, Drafter, Shared},
        params::Weights,
        target::{Depth, Target},
    },
};
use serde_json::Map;
use std::path::Path;
use tch::{Device, Kind};

/// Target with what decoding needs in addition.
pub struct LoadedTarget {
    pub target: Target,
    /// Chat template and tokenizer, or the reason why the folder has none.
    pub chat: Result<ChatTokenizer, String>,
    stop: Vec<u32>,
}

impl LoadedTarget {
    /// Loads all weights, which are gigabytes: call it on a blocking thread.
    ///
    /// # Errors
    /// Returns an error if the folder is not a supported target or libtorch fails.
    pub fn load(folder: &Path, kind: Kind, device: Device) -> Result<LoadedTarget, ModelError> {
        let config = TargetConfig::load(folder)?;
        let stop = stop_tokens(folder, &config)?;
        let target = Target::load(config, &TensorFiles::open(folder)?, Depth::Whole, kind, device)?;
        Ok(LoadedTarget { target, chat: ChatTokenizer::load(folder), stop })
    }

    /// Builds a drafter with the target's embedding and head, or with `own`.
    ///
    /// # Errors
    /// Returns an error if the weights do not match `config` or libtorch fails.
    pub fn drafter(&self, config: DraftConfig, weights: Weights, own: Option<Shared>) -> Result<Drafter, ModelError> {
        let shared = own.map_or_else(|| self.target.shared(), Ok)?;
        let options = DraftOptions { kind: self.target.kind(), ..DraftOptions::new(self.target.device()) };
        let mut drafter = Drafter::new(config, shared, options)?;
        drafter.load_weights(weights)?;
        Ok(drafter)
    }

    /// Decoding settings for a response after `prompt` tokens; `None` if no token fits into the context.
    pub fn settings(&self, prompt: usize, limit: usize, temperature: f64, seed: u64) -> Option<Settings> {
        let available = self.target.config().max_position_embeddings.saturating_sub(prompt);
        let max_new_tokens = limit.min(available);
        (max_new_tokens > 0 && prompt > 0).then(|| Settings {
            max_new_tokens,
            temperature,
            stop: self.stop.clone(),
            seed,
            min_survival: 0.0,
        })
    }

    /// Token ids of a user message up to the start of the answer; `None` without a chat template.
    pub fn question(&self, text: &str) -> Option<Vec<u32>> {
        let turn = Turn { role: Role::User, content: text.into(), extra: Map::new() };
        let conversation = Conversation { turns: vec![turn], tools: None };
        self.chat.as_ref().ok()?.prompt(&conversation).ok()
    }
}
