//! From a row to a sample: render, tokenise, mask, cut, judge. Pure, so that rows can be worked on in parallel.

use super::{
    chat::{ChatTemplate, loss_mask},
    input::Placed,
    options::PrepareOptions,
    reject::{Reason, Reject},
    row::{RolesMet, Row, parse},
    store::{Split, hex},
};
use crate::{
    config::{Overlong, UnknownRole},
    hf::read_json,
};
use sha2::{Digest, Sha256};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};
use tokenizers::Tokenizer;

/// Token ids and loss mask of a sample, equally long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub ids: Vec<i32>,
    pub mask: Vec<u8>,
    /// Its end was cut off.
    pub cut: bool,
    /// It was rendered and tokenised here.
    pub from_chat: bool,
}

/// What became of a row.
#[derive(Clone, Debug)]
pub struct Encoded {
    pub roles: RolesMet,
    pub outcome: Result<Sample, Reject>,
}

/// The model's template and tokenizer, and the settings that decide on samples.
pub struct Encoder {
    /// Why there are none does not matter as long as all rows are tokens already.
    chat: Result<Chat, String>,
    /// Rows of the target's embedding, where its config.json tells them.
    pub vocab_size: Option<u64>,
    max_length: usize,
    overlong: Overlong,
    unknown_role: UnknownRole,
    min_supervised: usize,
}

/// What turns conversations into tokens, with fingerprints.
pub struct Chat {
    template: ChatTemplate,
    tokenizer: Tokenizer,
    pub template_sha256: String,
    pub tokenizer_sha256: String,
}

impl Encoder {
    /// Loads what the model folder holds. A folder that cannot be used at all is an error once a conversation comes.
    pub fn load(options: &PrepareOptions) -> Result<Encoder, String> {
        Ok(Encoder {
            chat: Chat::load(&options.model_dir),
            vocab_size: vocab_size(&options.model_dir)?,
            max_length: options.data.max_length as usize,
            overlong: options.data.overlong,
            unknown_role: options.data.unknown_role,
            min_supervised: options.data.min_supervised as usize,
        })
    }

    /// Template and tokenizer, or a sentence that says why there are none.
    pub fn chat(&self) -> Result<&Chat, &str> {
        self.chat.as_ref().map_err(String::as_str)
    }

    /// Makes a sample of a row, or tells why not. The error is not the row's: there is no template or tokenizer.
    pub fn encode(&self, row: &Placed) -> Result<Encoded, String> {
        let mut roles = RolesMet::default();
        let outcome = guarded(|| self.sample(row, &mut roles))?;
        Ok(Encoded { roles, outcome })
    }

    fn sample(&self, placed: &Placed, roles: &mut RolesMet) -> Result<Sample, Problem> {
        let bytes = match &placed.row.content {
            Ok(bytes) => bytes,
            Err(size) => return Err(Reason::TooLarge.because(format!("{size} bytes")).into()),
        };
        let (ids, mask, from_chat) = match parse(bytes, placed.row.open, self.unknown_role, roles)? {
            Row::Tokens { ids, mask } => (ids, mask, false),
            Row::Chat(conversation) => {
                let chat = self.chat().map_err(|text| Problem::Model(text.into()))?;
                let rendered = chat.template.render(&conversation).map_err(|e| Reason::Template.because(e))?;
                // The template has written the special tokens already.
                let encoding = chat.tokenizer.encode(rendered.text, false).map_err(|e| Reason::Tokenizer.because(e))?;
                let id = |&id: &u32| {
                    i32::try_from(id).map_err(|_| Reason::TokenRange.because(format!("the tokenizer gave id {id}")))
                };
                let ids: Vec<i32> = encoding.get_ids().iter().map(id).collect::<Result<_, _>>()?;
                (ids, loss_mask(encoding.get_offsets(), &rendered.supervised), true)
            }
        };
        Ok(self.judge(ids, mask, from_chat)?)
    }

    /// Applies the limits.
    fn judge(&self, mut ids: Vec<i32>, mut mask: Vec<u8>, from_chat: bool) -> Result<Sample, Reject> {
        if ids.is_empty() {
            return Err(Reason::Empty.because("it is rendered to no token"));
        }
        let most = self.vocab_size.unwrap_or(u64::MAX);
        if let Some((i, id)) = ids.iter().enumerate().find(|(_, id)| u64::try_from(**id).map_or(true, |id| id >= most))
        {
            let rows = self.vocab_size.map(|rows| format!("; the target has {rows}")).unwrap_or_default();
            return Err(Reason::TokenRange.because(format!("id {id} at place {i}{rows}")));
        }
        if !mask.contains(&1) {
            return Err(Reason::NothingSupervised.because(match from_chat {
                true => "there is no assistant's turn, or it is empty",
                false => "`loss_mask` is 0 everywhere",
            }));
        }
        let (length, cut) = (ids.len(), ids.len() > self.max_length);
        if cut && self.overlong == Overlong::Drop {
            return Err(Reason::TooLong.because(format!("{length} tokens")));
        }
        ids.truncate(self.max_length);
        mask.truncate(self.max_length);
        let supervised = mask.iter().filter(|&&bit| bit == 1).count();
        let of = if cut { format!(" in the first {} of {length} tokens", ids.len()) } else { String::new() };
        if supervised < self.min_supervised {
            return Err(Reason::FewSupervised.because(format!("{supervised}{of}")));
        }
        // A block begins where two tokens in a row are supervised.
        if !mask.windows(2).any(|pair| pair == [1, 1]) {
            return Err(Reason::NoAnchor.because(format!("{supervised} supervised tokens{of}, each alone")));
        }
        Ok(Sample { ids, mask, cut, from_chat })
    }
}

/// The split of a sample: a function of its ids and the share alone, so that order and neighbours do not matter, copies of
/// a sample stay together, and a larger share only adds samples.
pub fn split_of(ids: &[i32], validation_fraction: f64) -> Split {
    let mut hash = Sha256::new();
    ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
    let first = hash.finalize().iter().take(8).fold(0u64, |value, &byte| value << 8 | u64::from(byte));
    if (first as f64) < validation_fraction * 2f64.powi(64) { Split::Validation } else { Split::Train }
}

/// Whose fault it is that there is no sample.
enum Problem {
    Row(Reject),
    Model(String),
}

impl From<Reject> for Problem {
    fn from(reject: Reject) -> Self {
        Problem::Row(reject)
    }
}

/// Does the work on one row. Templates and tokenizers of any origin meet text of any origin here: not even a panic may end
/// the run.
fn guarded<T>(work: impl FnOnce() -> Result<T, Problem>) -> Result<Result<T, Reject>, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(made)) => Ok(Ok(made)),
        Ok(Err(Problem::Row(reject))) => Ok(Err(reject)),
        Ok(Err(Problem::Model(text))) => Err(text),
        Err(panic) => Ok(Err(Reason::Fault.because(panic_text(&*panic)))),
    }
}

impl Chat {
    /// Reads template and tokenizer of a model folder, or says what is wrong with them.
    pub fn load(folder: &Path) -> Result<Chat, String> {
        let template = ChatTemplate::load(folder).map_err(|error| error.to_string())?;
        let path = folder.join("tokenizer.json");
        let remedy = "give a Hugging Face folder with a tokenizer.json";
        let bytes = std::fs::read(&path).map_err(|e| format!("{} cannot be read ({e}); {remedy}", path.display()))?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes)
            .map_err(|e| format!("{} is no tokenizer that can be used ({e}); {remedy}", path.display()))?;
        // What a tokenizer.json says of lengths serves other programs; here `max_length` decides.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| format!("{}: {e}", path.display()))?;
        let sha256 = |bytes: &[u8]| hex(&Sha256::digest(bytes));
        let (template_sha256, tokenizer_sha256) = (sha256(template.text().as_bytes()), sha256(&bytes));
        Ok(Chat { template, tokenizer, template_sha256, tokenizer_sha256 })
    }

    /// Token ids of a conversation that the assistant is about to answer.
    #[cfg(feature = "torch")]
    pub fn prompt(&self, conversation: &super::chat::Conversation) -> Result<Vec<u32>, String> {
        self.asked(conversation).map_err(|reject| reject.detail)
    }

    /// The same, where a row of data is to blame for whatever goes wrong with it.
    #[cfg(feature = "torch")]
    pub fn question(&self, conversation: &super::chat::Conversation) -> Result<Vec<u32>, Reject> {
        let made = guarded(|| Ok(self.asked(conversation)?));
        made.unwrap_or_else(|why| Err(Reason::Fault.because(why)))
    }

    #[cfg(feature = "torch")]
    fn asked(&self, conversation: &super::chat::Conversation) -> Result<Vec<u32>, Reject> {
        let text = self.template.prompt(conversation).map_err(|error| Reason::Template.because(error))?;
        // The template has written the special tokens already.
        let encoding = self.tokenizer.encode(text, false).map_err(|error| Reason::Tokenizer.because(error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of an answer, without special tokens.
    #[cfg(feature = "torch")]
    pub fn answer(&self, ids: &[u32]) -> Result<String, String> {
        self.tokenizer.decode(ids, true).map_err(|error| error.to_string())
    }
}

/// What config.json says, if there is one.
fn vocab_size(folder: &Path) -> Result<Option<u64>, String> {
    let path = folder.join("config.json");
    if !path.exists() {
        return Ok(None);
    }
    let config = read_json(&path).map_err(|error| error.to_string())?;
    Ok(config["vocab_size"].as_u64().or(config["text_config"]["vocab_size"].as_u64()))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a text").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_costs_its_row_only() {
        let reject = guarded::<()>(|| panic!("row {}", 7)).unwrap().unwrap_err();
        assert_eq!(reject, Reason::Fault.because("row 7"));
    }

    #[test]
    fn the_split_of_given_ids_is_fixed_for_good() {
        let of =
            |fraction| (0..1000).filter(|&id| split_of(&[id, 7], fraction) == Split::Validation).collect::<Vec<_>>();
        assert_eq!((of(0.0).len(), of(1.0).len()), (0, 1000));
        // Computed with Python's hashlib: stores of this version and of the next must agree.
        assert_eq!(of(0.01), [99, 215, 316, 352, 394, 995]);
    }
}
