//! A whole target on one device, which drafters are measured with.

use super::Settings;
use crate::{
    data::{
        chat::{Conversation, Role, Turn},
        encode::Chat,
    },
    hf::{HfError, config::TargetConfig, draft::DraftConfig, read_json, tensors::TensorFiles},
    model::{
        ModelError,
        drafter::{DraftOptions, Drafter, Shared},
        params::Weights,
        target::{Depth, Target},
    },
};
use serde_json::{Map, Value};
use std::path::Path;
use tch::{Device, Kind};

/// A target with what decoding needs beside it.
pub struct Bench {
    pub target: Target,
    /// Why there is none, where the folder has no template or tokenizer.
    pub chat: Result<Chat, String>,
    stop: Vec<u32>,
}

impl Bench {
    /// Reads gigabytes: call it on a blocking thread.
    pub fn load(folder: &Path, kind: Kind, device: Device) -> Result<Bench, ModelError> {
        let config = TargetConfig::load(folder)?;
        let stop = stop_tokens(folder, &config)?;
        let target = Target::load(config, &TensorFiles::open(folder)?, Depth::Whole, kind, device)?;
        Ok(Bench { target, chat: Chat::load(folder), stop })
    }

    /// A drafter beside the target, with the target's embedding and head or with its own.
    pub fn drafter(&self, config: DraftConfig, weights: Weights, own: Option<Shared>) -> Result<Drafter, ModelError> {
        let shared = own.map_or_else(|| self.target.shared(), Ok)?;
        let options = DraftOptions { kind: self.target.kind(), ..DraftOptions::new(self.target.device()) };
        let mut drafter = Drafter::new(config, shared, options)?;
        drafter.load_weights(weights)?;
        Ok(drafter)
    }

    /// Settings of a response behind `prompt` tokens; `None` when not a single one fits.
    pub fn settings(&self, prompt: usize, most: usize, temperature: f64, seed: u64) -> Option<Settings> {
        let room = self.target.config().max_position_embeddings.saturating_sub(prompt);
        let max_new_tokens = most.min(room);
        (max_new_tokens > 0 && prompt > 0).then(|| Settings {
            max_new_tokens,
            temperature,
            stop: self.stop.clone(),
            seed,
        })
    }

    /// The ids of a question, up to where the answer begins; `None` where the folder has no chat template.
    pub fn question(&self, text: &str) -> Option<Vec<u32>> {
        let turn = Turn { role: Role::User, content: text.into(), extra: Map::new() };
        let conversation = Conversation { turns: vec![turn], tools: None };
        self.chat.as_ref().ok()?.prompt(&conversation).ok()
    }
}

/// The tokens that end a response: those of config.json, and those of generation_config.json where there is one.
fn stop_tokens(folder: &Path, target: &TargetConfig) -> Result<Vec<u32>, HfError> {
    let mut stop = target.eos_token_ids.clone();
    let path = folder.join("generation_config.json");
    if path.exists() {
        let value = read_json(&path)?;
        let more = match &value["eos_token_id"] {
            Value::Array(ids) => ids.clone(),
            one => vec![one.clone()],
        };
        stop.extend(more.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
    }
    stop.sort_unstable();
    stop.dedup();
    Ok(stop)
}
