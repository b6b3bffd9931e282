//! Tokens with a role, as a GGUF file names them.

use super::{ImportError, gguf::Gguf};
use serde_json::{Value, json};

/// The tokens with a role, by id and text.
#[derive(Clone, Debug, Default)]
pub(super) struct SpecialTokens {
    pub(super) bos: Option<(u32, String)>,
    pub(super) eos: Option<(u32, String)>,
    /// Ends a turn, where that differs from the end of text.
    pub(super) eot: Option<(u32, String)>,
    pub(super) unknown: Option<(u32, String)>,
    pub(super) padding: Option<(u32, String)>,
}

impl SpecialTokens {
    pub(super) fn read(gguf: &Gguf, tokens: &[&str]) -> Result<Self, ImportError> {
        let token = |key: &str| {
            let key = format!("tokenizer.ggml.{key}_token_id");
            match gguf.count(&key)? {
                None => Ok(None),
                Some(id) => match tokens.get(id) {
                    Some(&text) => Ok(Some((id as u32, text.to_string()))),
                    None => Err(gguf.inconsistent(format!("{key} is {id}, beyond the {} tokens", tokens.len()))),
                },
            }
        };
        Ok(Self {
            bos: token("bos")?,
            eos: token("eos")?,
            eot: token("eot")?,
            unknown: token("unknown")?,
            padding: token("padding")?,
        })
    }

    pub(super) fn ends_or_begins(&self, id: usize) -> bool {
        [&self.bos, &self.eos, &self.eot].into_iter().flatten().any(|(special, _)| *special as usize == id)
    }

    /// The ids as `config.json` names them.
    pub(super) fn ids(&self) -> Value {
        let id = |token: &Option<(u32, String)>| token.as_ref().map(|(id, _)| *id);
        json!({"bos_token_id": id(&self.bos), "eos_token_id": id(&self.eos), "pad_token_id": id(&self.padding)})
    }

    pub(super) fn generation_config(&self) -> Value {
        let mut config = self.ids();
        if let (Some((eos, _)), Some((eot, _))) = (&self.eos, &self.eot)
            && eos != eot
        {
            config["eos_token_id"] = json!([eos, eot]);
        }
        config
    }
}
