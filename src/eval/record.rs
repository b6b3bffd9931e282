//! Record of one response of an evaluation.

/// One verification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Drafted tokens that were verified.
    pub drafted: usize,
    pub accepted: usize,
    /// Tokens that the step adds to the response.
    pub produced: usize,
}

/// One response, decoded with and without the drafter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    pub category: Option<String>,
    pub steps: Vec<Step>,
    /// Predicted survival of the verified tokens of each step; without a confidence head, each list is empty.
    pub survivals: Vec<Vec<f64>>,
    /// Tokens after the first one, and their decoding time.
    pub tokens: u64,
    pub seconds: f64,
    /// The same values without a drafter.
    pub plain_tokens: u64,
    pub plain_seconds: f64,
    /// True if both outputs have the same tokens; `None` if they are sampled.
    pub identical: Option<bool>,
    /// Correct and total predictions of each slot after the anchor, given the true context.
    pub slots: Vec<(u64, u64)>,
    /// Tokens of the leading correct runs of blocks at all positions of the plain response, and number of blocks.
    pub runs: (u64, u64),
    /// Text of the response, if it was asked for.
    pub shown: Option<Shown>,
}

/// Part of a response whose tokens have one origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub text: String,
    /// True for tokens that the drafter proposed and the target accepted.
    pub drafted: bool,
}

/// Response to show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Last turn of the prompt.
    pub prompt: String,
    pub pieces: Vec<Piece>,
}
