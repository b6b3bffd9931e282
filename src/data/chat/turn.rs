//! Turns of a conversation: speaker, text, further fields, weight.

use serde_json::{Map, Value};

/// Speaker of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// Name of the role in chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    pub role: Role,
    pub content: String,
    /// Other fields of the row's turn (`tool_calls`, `reasoning_content`, ...), passed on to the template. The fields above
    /// override `role` and `content` in it.
    pub extra: Map<String, Value>,
}

/// Weight of an assistant's turn in the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// The turn is context and not supervised.
    Zero,
    One,
    /// A weight other than 0 and 1, which counts as 1.
    Other,
}

/// Fields that hold the weight of a turn, in the formats of OpenAI, Mistral, ms-swift and axolotl.
pub const WEIGHTS: [&str; 5] = ["weight", "loss", "train", "training", "trainable"];

impl Turn {
    /// Weight of the turn: 0 if any of its fields is 0 or false. Null is the default.
    ///
    /// # Errors
    /// The field and its value, if the value is no weight.
    pub fn weight(&self) -> Result<Weight, (&'static str, &Value)> {
        let mut weight = Weight::One;
        for key in WEIGHTS {
            let Some(value) = self.extra.get(key) else { continue };
            match (number(value), weight) {
                (None, _) => return Err((key, value)),
                (Some(0.0), _) => weight = Weight::Zero,
                (Some(1.0), _) | (_, Weight::Zero) => {}
                (Some(_), _) => weight = Weight::Other,
            }
        }
        Ok(weight)
    }

    /// True if the turn is an assistant's and its weight is not 0.
    pub fn is_supervised(&self) -> bool {
        self.role == Role::Assistant && self.weight() != Ok(Weight::Zero)
    }
}

/// Number of a weight that is given as number, boolean, text or null; `None` if it is none, or negative.
fn number(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Null => 1.0,
        Value::Bool(train) => f64::from(u8::from(*train)),
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => match text.trim().to_ascii_lowercase().as_str() {
            "" | "true" | "null" | "none" => 1.0,
            "false" => 0.0,
            text => text.parse().ok()?,
        },
        Value::Array(_) | Value::Object(_) => return None,
    };
    (number >= 0.0).then_some(number)
}
