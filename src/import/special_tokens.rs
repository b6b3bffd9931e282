//! Special tokens of a GGUF file: begin and end of text, end of turn, unknown, padding.

use super::{ImportError, gguf::Gguf};
use serde_json::{Value, json};

/// Special tokens by id and text.
#[derive(Clone, Debug, Default)]
pub(super) struct SpecialTokens {
    pub(super) bos: Option<(u32, String)>,
    pub(super) eos: Option<(u32, String)>,
    /// End of a turn, if it differs from the end of text.
    pub(super) eot: Option<(u32, String)>,
    pub(super) unknown: Option<(u32, String)>,
    pub(super) padding: Option<(u32, String)>,
}

impl SpecialTokens {
    pub(super) fn read(gguf: &Gguf, tokens: &[String]) -> Result<Self, ImportError> {
        let token = |key: &str| {
            let key = format!("tokenizer.ggml.{key}_token_id");
            match gguf.count(&key)? {
                None => Ok(None),
                Some(id) => match tokens.get(id) {
                    Some(text) => Ok(Some((id as u32, text.clone()))),
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

    /// Returns `true` if the token begins or ends a text or a turn.
    pub(super) fn is_boundary(&self, id: usize) -> bool {
        [&self.bos, &self.eos, &self.eot].into_iter().flatten().any(|(special, _)| *special as usize == id)
    }

    /// Ids under the keys of `config.json`.
    pub(super) fn ids(&self) -> Value {
        let id = |token: &Option<(u32, String)>| token.as_ref().map(|(id, _)| *id);
        json!({"bos_token_id": id(&self.bos), "eos_token_id": id(&self.eos), "pad_token_id": id(&self.padding)})
    }

    /// Content of `generation_config.json`: generation ends at the end of text and at the end of a turn.
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
