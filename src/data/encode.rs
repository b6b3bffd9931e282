//! Encoder from a row to a sample: renders, tokenises, masks, cuts and applies the limits. Pure, so that rows run in parallel.

use super::{
    change::Change,
    chat::{ChatError, ChatTemplate, Conversation, Rendered, Role, Turn, loss_mask},
    input::InputRow,
    options::PrepareOptions,
    reject::{Reason, Reject},
    row::{ParsedRow, RowNotes, RowPolicy, parse},
    split::RowContent,
    store::Split,
};
use crate::{
    common::hash::sha256,
    config::{HiddenFields, Overlong},
    hf::read_json,
};
use draftmill_actors::runtime::fault::panic_text;
use sha2::{Digest, Sha256};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};
use tokenizers::Tokenizer;

/// Token ids and loss mask of a sample, of equal length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub ids: Vec<i32>,
    pub mask: Vec<u8>,
    /// The sample exceeded `max_length` and lost its end.
    pub cut: bool,
    /// The sample was rendered and tokenised here; false for a row of token ids.
    pub from_chat: bool,
}

/// Result of encoding one row.
#[derive(Clone, Debug)]
pub struct EncodedRow {
    pub notes: RowNotes,
    pub outcome: Result<Sample, Reject>,
}

/// Chat template, tokenizer and limits that turn rows into samples.
pub struct Encoder {
    /// Error text if the folder has no usable template or tokenizer; rows of token ids do not need them.
    chat: Result<ChatTokenizer, String>,
    /// Rows of the target's embedding, if its config.json has them.
    pub vocab_size: Option<u64>,
    max_length: usize,
    overlong: Overlong,
    rows: RowPolicy,
    hidden_fields: HiddenFields,
    min_supervised: usize,
}

/// Chat template and tokenizer of a model folder, with their SHA-256.
pub struct ChatTokenizer {
    template: ChatTemplate,
    tokenizer: Tokenizer,
    pub template_sha256: String,
    pub tokenizer_sha256: String,
}

impl Encoder {
    /// Loads template and tokenizer of the model folder. If the folder has none, the first conversation row fails.
    ///
    /// # Errors
    /// A sentence, if config.json is present but unreadable.
    pub fn load(options: &PrepareOptions) -> Result<Encoder, String> {
        Ok(Encoder {
            chat: ChatTokenizer::load(&options.model_dir),
            vocab_size: vocab_size(&options.model_dir)?,
            max_length: options.data.max_length as usize,
            overlong: options.data.overlong,
            rows: RowPolicy {
                unknown_role: options.data.unknown_role,
                leading_assistant: options.data.leading_assistant,
            },
            hidden_fields: options.data.hidden_fields,
            min_supervised: options.data.min_supervised as usize,
        })
    }

    /// Returns template and tokenizer.
    ///
    /// # Errors
    /// A sentence with the reason, if the model folder has none.
    pub fn chat(&self) -> Result<&ChatTokenizer, &str> {
        self.chat.as_ref().map_err(String::as_str)
    }

    /// Encodes a row as a sample, or as a reject with its reason.
    ///
    /// # Errors
    /// A sentence, if the row needs a template or tokenizer and the model folder has none.
    pub fn encode(&self, row: &InputRow) -> Result<EncodedRow, String> {
        let mut notes = RowNotes::default();
        let outcome = guarded(|| self.sample(row, &mut notes))?;
        Ok(EncodedRow { notes, outcome })
    }

    fn sample(&self, input_row: &InputRow, notes: &mut RowNotes) -> Result<Sample, Problem> {
        let bytes = match &input_row.row.content {
            RowContent::Bytes(bytes) => bytes,
            RowContent::TooLarge { bytes } => return Err(Reason::TooLarge.because(format!("{bytes} bytes")).into()),
        };
        let (ids, mask, from_chat) = match parse(bytes, input_row.row.truncated, self.rows, notes)? {
            ParsedRow::Tokens { ids, mask } => (ids, mask, false),
            ParsedRow::Chat(conversation) => {
                let chat = self.chat().map_err(|text| Problem::Model(text.into()))?;
                let rendered = self.rendered(&chat.template, &conversation, notes)?;
                // The template has written the special tokens already.
                let encoding = chat.tokenizer.encode(rendered.text, false).map_err(|e| Reason::Tokenizer.because(e))?;
                let id = |&id: &u32| {
                    i32::try_from(id).map_err(|_| Reason::TokenRange.because(format!("the tokenizer returned id {id}")))
                };
                let ids: Vec<i32> = encoding.get_ids().iter().map(id).collect::<Result<_, _>>()?;
                (ids, loss_mask(encoding.get_offsets(), &rendered.supervised), true)
            }
        };
        Ok(self.judge(ids, mask, from_chat)?)
    }

    /// Renders a conversation and rejects it if the template hides what it holds.
    fn rendered(
        &self,
        template: &ChatTemplate,
        conversation: &Conversation,
        notes: &mut RowNotes,
    ) -> Result<Rendered, Reject> {
        let rendered = template.render(conversation).map_err(|error| match error {
            ChatError::UnopenedThinking { .. } => Reason::UnopenedThinking.because(error),
            _ => Reason::Template.because(error),
        })?;
        if !rendered.notes.hidden.is_empty() {
            if self.hidden_fields == HiddenFields::Reject {
                let shown = rendered.notes.hidden.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
                return Err(
                    Reason::Hidden.because(format!("{shown}; data.hidden_fields = \"keep\" keeps the row without it"))
                );
            }
            notes.changes.insert(Change::Hidden);
        }
        notes.changes.extend(&rendered.notes.changes);
        notes.unseen.extend(rendered.notes.unseen.iter().cloned());
        if rendered.supervised.is_empty() && conversation.turns.iter().any(|turn| turn.role == Role::Assistant) {
            let none = !conversation.turns.iter().any(Turn::is_supervised);
            let detail = if none { "all assistant turns have weight 0" } else { "the assistant's turns are empty" };
            return Err(Reason::NothingSupervised.because(detail));
        }
        Ok(rendered)
    }

    /// Applies the limits on length, vocabulary and supervision.
    fn judge(&self, mut ids: Vec<i32>, mut mask: Vec<u8>, from_chat: bool) -> Result<Sample, Reject> {
        if ids.is_empty() {
            return Err(Reason::Empty.because("the rendered text has no token"));
        }
        let most = self.vocab_size.unwrap_or(u64::MAX);
        if let Some((i, id)) = ids.iter().enumerate().find(|(_, id)| u64::try_from(**id).map_or(true, |id| id >= most))
        {
            let rows = self.vocab_size.map(|rows| format!("; the target has {rows}")).unwrap_or_default();
            return Err(Reason::TokenRange.because(format!("id {id} at index {i}{rows}")));
        }
        if !mask.contains(&1) {
            return Err(Reason::NothingSupervised.because(match from_chat {
                true => "there is no assistant turn, or it is empty",
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
        // A block starts at an anchor: a supervised token before another one.
        if !mask.windows(2).any(|pair| pair == [1, 1]) {
            return Err(Reason::NoAnchor.because(format!("{supervised} supervised tokens{of}, each alone")));
        }
        Ok(Sample { ids, mask, cut, from_chat })
    }
}

/// Split of a sample, a function of its ids and of `validation_fraction` alone. Order and neighbours have no effect, copies of
/// a sample share one split, and a larger fraction only adds samples.
pub fn split_of(ids: &[i32], validation_fraction: f64) -> Split {
    let mut hash = Sha256::new();
    ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
    let first = hash.finalize().iter().take(8).fold(0u64, |value, &byte| value << 8 | u64::from(byte));
    if (first as f64) < validation_fraction * 2f64.powi(64) { Split::Validation } else { Split::Train }
}

/// Reason for a missing sample: the row, or the model folder.
enum Problem {
    Row(Reject),
    Model(String),
}

impl From<Reject> for Problem {
    fn from(reject: Reject) -> Self {
        Problem::Row(reject)
    }
}

/// Runs the work on one row and turns a panic into a reject: templates, tokenizers and text come from any source.
fn guarded<T>(work: impl FnOnce() -> Result<T, Problem>) -> Result<Result<T, Reject>, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(made)) => Ok(Ok(made)),
        Ok(Err(Problem::Row(reject))) => Ok(Err(reject)),
        Ok(Err(Problem::Model(text))) => Err(text),
        Err(panic) => Ok(Err(Reason::Fault.because(panic_text(&*panic)))),
    }
}

impl ChatTokenizer {
    /// Reads template and tokenizer of a model folder.
    ///
    /// # Errors
    /// A sentence with file, reason and remedy.
    pub fn load(folder: &Path) -> Result<ChatTokenizer, String> {
        let template = ChatTemplate::load(folder).map_err(|error| error.to_string())?;
        let path = folder.join("tokenizer.json");
        let remedy = "give a Hugging Face folder with a tokenizer.json";
        let bytes = crate::common::fs::read_input(&path, 1 << 30)
            .map_err(|e| format!("{} cannot be read ({e}); {remedy}", path.display()))?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes)
            .map_err(|e| format!("{} is not a usable tokenizer ({e}); {remedy}", path.display()))?;
        // Padding and truncation of tokenizer.json serve other programs; `max_length` decides here.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| format!("{}: {e}", path.display()))?;
        let (template_sha256, tokenizer_sha256) = (sha256(template.text()), sha256(&bytes));
        Ok(ChatTokenizer { template, tokenizer, template_sha256, tokenizer_sha256 })
    }

    /// Encodes a conversation up to the assistant's next answer.
    ///
    /// # Errors
    /// The text of the template's or tokenizer's refusal.
    #[cfg(feature = "torch")]
    pub fn prompt(&self, conversation: &Conversation) -> Result<Vec<u32>, String> {
        self.prompt_ids(conversation).map_err(|reject| reject.detail)
    }

    /// Encodes like [`ChatTokenizer::prompt`] and attributes every failure, panics included, to the row of data.
    ///
    /// # Errors
    /// The row's reject.
    #[cfg(feature = "torch")]
    pub fn row_prompt(&self, conversation: &Conversation) -> Result<Vec<u32>, Reject> {
        let made = guarded(|| Ok(self.prompt_ids(conversation)?));
        made.unwrap_or_else(|why| Err(Reason::Fault.because(why)))
    }

    #[cfg(feature = "torch")]
    fn prompt_ids(&self, conversation: &Conversation) -> Result<Vec<u32>, Reject> {
        let text = self.template.prompt(conversation).map_err(|error| Reason::Template.because(error))?;
        // The template has written the special tokens already.
        let encoding = self.tokenizer.encode(text, false).map_err(|error| Reason::Tokenizer.because(error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Decodes an answer without special tokens.
    ///
    /// # Errors
    /// The text of the tokenizer's refusal.
    #[cfg(feature = "torch")]
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.tokenizer.decode(ids, true).map_err(|error| error.to_string())
    }
}

/// `vocab_size` of config.json, if the file is present.
fn vocab_size(folder: &Path) -> Result<Option<u64>, String> {
    let path = folder.join("config.json");
    if !path.exists() {
        return Ok(None);
    }
    let config = read_json(&path).map_err(|error| error.to_string())?;
    Ok(config["vocab_size"].as_u64().or(config["text_config"]["vocab_size"].as_u64()))
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
    fn the_split_of_given_ids_is_fixed() {
        let of =
            |fraction| (0..1000).filter(|&id| split_of(&[id, 7], fraction) == Split::Validation).collect::<Vec<_>>();
        assert_eq!((of(0.0).len(), of(1.0).len()), (0, 1000));
        // Computed with Python's hashlib: stores of this version and of the next must agree.
        assert_eq!(of(0.01), [99, 215, 316, 352, 394, 995]);
    }
}
