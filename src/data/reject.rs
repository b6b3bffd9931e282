//! Reasons for which a row does not become a sample.

use serde::{Serialize, Serializer};
use std::fmt;

/// Rejection of a row: its reason and the value found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    pub reason: Reason,
    pub detail: String,
}

/// Declares the reasons: name, word for programs, kind (bad row or policy) and text for people.
macro_rules! reasons {
    ($($name:ident = $word:literal $kind:ident $text:literal;)*) => {
        /// Reason of a rejection. Reports count each one separately.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Reason { $(#[doc = $text] $name),* }

        impl Reason {
            pub const ALL: &[Reason] = &[$(Reason::$name),*];

            /// Word of the reason in files.
            pub fn word(self) -> &'static str {
                match self { $(Reason::$name => $word),* }
            }

            /// Text of the reason for people.
            pub fn text(self) -> &'static str {
                match self { $(Reason::$name => $text),* }
            }

            /// True if the row is sound and a setting excludes it. Such rows do not indicate bad data.
            pub fn by_policy(self) -> bool {
                match self { $(Reason::$name => reasons!($kind)),* }
            }
        }
    };
    (bad) => { false };
    (policy) => { true };
}

reasons! {
    InvalidUtf8 = "invalid_utf8" bad "not UTF-8";
    InvalidJson = "invalid_json" bad "not JSON";
    TrailingComma = "trailing_comma" bad "a comma after the last element";
    NotANumber = "nan_or_infinity" bad "NaN or Infinity, which JSON lacks";
    Truncated = "truncated" bad "the file ends inside the row";
    TooLarge = "row_too_large" bad "more bytes than data.max_row_bytes";
    NotAnObject = "not_an_object" bad "not a JSON object";
    NoConversation = "no_conversation" bad "neither `messages`, `conversations` nor `input_ids`";
    Empty = "empty" bad "no turns, or no tokens";
    BadTurn = "bad_turn" bad "a turn that is not a role with content";
    UnknownRole = "unknown_role" bad "an unknown role";
    NullContent = "null_content" bad "a turn without content";
    UnsupportedContent = "unsupported_content" bad "content that is not text";
    AssistantFirst = "assistant_first" bad "the assistant speaks first";
    BadTools = "bad_tools" bad "`tools` that are not a list";
    BadToolArguments = "bad_tool_arguments" bad "tool arguments whose text is not JSON";
    Hidden = "hidden_by_template" bad "a field that the chat template does not show (data.hidden_fields)";
    UnopenedThinking = "unopened_thinking" bad "`</think>` without `<think>`, which the template does not open";
    Template = "template_error" bad "refused by the chat template";
    Tokenizer = "tokenizer_error" bad "refused by the tokenizer";
    BadTokens = "bad_tokens" bad "`input_ids` or `loss_mask` with wrong values";
    MaskLength = "mask_length" bad "`loss_mask` not as long as `input_ids`";
    TokenRange = "token_out_of_range" bad "a token id outside the vocabulary";
    NothingSupervised = "nothing_supervised" bad "no supervised token";
    Fault = "fault" bad "an internal fault of draftmill; please report it";
    TooLong = "too_long" policy "longer than data.max_length";
    FewSupervised = "few_supervised" policy "fewer supervised tokens than data.min_supervised";
    NoAnchor = "no_anchor" policy "no two adjacent supervised tokens";
}

impl Reason {
    /// Adds the value found.
    pub fn because(self, detail: impl fmt::Display) -> Reject {
        Reject { reason: self, detail: detail.to_string() }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn words_and_texts_are_distinct() {
        let words: HashSet<_> = Reason::ALL.iter().map(|reason| reason.word()).collect();
        let texts: HashSet<_> = Reason::ALL.iter().map(|reason| reason.text()).collect();
        assert_eq!((words.len(), texts.len()), (Reason::ALL.len(), Reason::ALL.len()));
    }
}
