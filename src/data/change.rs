//! Changes that are made to a row that becomes a sample. Each one is counted.

use serde::{Serialize, Serializer};

/// Declares the changes: name, word for programs and text for people.
macro_rules! changes {
    ($($name:ident = $word:literal $text:literal;)*) => {
        /// Change of a row. Reports count the rows with each one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Change { $(#[doc = $text] $name),* }

        impl Change {
            pub const ALL: &[Change] = &[$(Change::$name),*];

            /// Word of the change in files.
            pub fn word(self) -> &'static str {
                match self { $(Change::$name => $word),* }
            }

            /// Text of the change for people.
            pub fn text(self) -> &'static str {
                match self { $(Change::$name => $text),* }
            }
        }
    };
}

changes! {
    LeadingAssistant = "leading_assistant_dropped" "assistant turns before the first user turn were dropped";
    NotSupervised = "turn_not_supervised" "an assistant turn with weight 0, loss false or train false is context only";
    WeightIsOne = "weight_taken_as_1" "a weight other than 0 and 1 was taken as 1";
    SystemBeside = "system_prompt_moved" "a system prompt beside the turns became the first turn";
    SystemUnused = "system_prompt_unused" "a second system prompt beside the turns was left out";
    FunctionsBeside = "functions_as_tools" "`functions` were taken as `tools`";
    ArgumentsParsed = "tool_arguments_parsed" "tool arguments given as text went to the template as an object";
    ArgumentsText = "tool_arguments_as_text" "tool arguments went to the template as text, which it needs";
    RawThinking = "thinking_split" "text before `</think>` was taken as reasoning";
    EarlierReasoning = "earlier_reasoning_hidden" "the template shows reasoning of the last answer only";
    Hidden = "hidden_by_template" "the template does not show a field; data.hidden_fields is \"keep\"";
}

impl Serialize for Change {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}
