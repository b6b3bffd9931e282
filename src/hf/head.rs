//! Draft heads: settings, their keys in `config.json`, and their tensors (docs/heads.md).

use super::HfError;
use super::fields::{Fields, MAX_WIDTH};
use serde_json::{Map, Value, json};

/// Head of a drafter, with the settings that its tensors and its configuration need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadConfig {
    /// Slots `1..` predict their own positions through the target's head.
    #[default]
    Dflash,
    Dspark(DsparkConfig),
    Dflash2(Dflash2Config),
}

/// Settings of DSpark (arXiv 2607.05147): all slots predict the position after them, with a bias from the token before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsparkConfig {
    pub markov: MarkovKind,
    /// Rank of the Markov head; 0 for none.
    pub rank: usize,
    /// Input of the confidence head; `None` for no such head.
    pub confidence: Option<ConfidenceInput>,
}

/// Form of the Markov head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkovKind {
    Vanilla,
    Gated,
    Rnn,
}

/// Input of the confidence head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfidenceInput {
    /// Hidden state of the slot.
    Hidden,
    /// Hidden state and the Markov embedding of the token before.
    HiddenAndMarkov,
}

/// Settings of DFlash 2: convolutions around each sublayer, and a selector among the most likely tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dflash2Config {
    /// Positions that a convolution mixes, its own included.
    pub conv_taps: usize,
    /// Channels with a common dynamic kernel.
    pub conv_group: usize,
    pub selector_rank: usize,
    /// Number of candidates.
    pub selector_top_k: usize,
}

pub const MARKOV_W1: &str = "markov_head.markov_w1.weight";
pub const MARKOV_W2: &str = "markov_head.markov_w2.weight";
pub const MARKOV_GATE: &str = "markov_head.gate_proj.weight";
pub const MARKOV_GATE_BIAS: &str = "markov_head.gate_proj.bias";
pub const MARKOV_JOINT: &str = "markov_head.joint_proj.weight";
pub const MARKOV_JOINT_BIAS: &str = "markov_head.joint_proj.bias";
pub const CONFIDENCE: &str = "confidence_head.proj.weight";
pub const CONFIDENCE_BIAS: &str = "confidence_head.proj.bias";
pub const PREDECESSORS: &str = "candidate_selector.predecessor_codebook";
pub const SUCCESSORS: &str = "candidate_selector.successor_codebook";
pub const SELECTOR_PROJECTION: &str = "candidate_selector.hidden_projection.weight";
/// Names of a layer's convolutions, around attention and MLP.
pub const CONVOLUTIONS: [&str; 2] = ["attention_conv", "mlp_conv"];
pub const BASE_KERNEL: &str = "base_kernel";
pub const KERNEL_PROJECTION: &str = "kernel_projection.weight";

/// Architectures in `config.json`, with the head that they stand for.
const ARCHITECTURES: [(&str, &str); 5] = [
    ("DFlashDraftModel", "dflash"),
    ("DSparkDraftModel", "dspark"),
    ("Qwen3DSparkModel", "dspark"),
    ("DFlash2DraftModel", "dflash2"),
    ("Qwen3DFlash2DraftModel", "dflash2"),
];

impl MarkovKind {
    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            MarkovKind::Vanilla => "vanilla",
            MarkovKind::Gated => "gated",
            MarkovKind::Rnn => "rnn",
        }
    }

    fn of_name(name: &str) -> Option<MarkovKind> {
        [MarkovKind::Vanilla, MarkovKind::Gated, MarkovKind::Rnn].into_iter().find(|kind| kind.name() == name)
    }
}

impl HeadConfig {
    /// Name of the head, as in `drafter.head` and in speculators' `speculators_model_type`.
    pub fn name(&self) -> &'static str {
        match self {
            HeadConfig::Dflash => "dflash",
            HeadConfig::Dspark(_) => "dspark",
            HeadConfig::Dflash2(_) => "dflash2",
        }
    }

    /// First slot of a block that predicts a token: the anchor's slot predicts with DSpark only.
    pub fn first_slot(&self) -> usize {
        usize::from(!self.predicts_from_anchor())
    }

    /// True if slot `k` predicts the token at `anchor + k + 1`, otherwise that at `anchor + k`.
    pub fn predicts_from_anchor(&self) -> bool {
        matches!(self, HeadConfig::Dspark(_))
    }

    /// Number of tokens that a block of `block_size` slots proposes.
    pub fn proposed_tokens(&self, block_size: usize) -> usize {
        block_size.saturating_sub(self.first_slot())
    }

    /// Settings of the convolutions, if the head has them.
    pub fn convolution(&self) -> Option<Dflash2Config> {
        match self {
            HeadConfig::Dflash2(config) => Some(*config),
            _ => None,
        }
    }

    /// Architecture that vLLM and SGLang load.
    pub(super) fn architecture(&self) -> &'static str {
        match self {
            HeadConfig::Dflash => "DFlashDraftModel",
            HeadConfig::Dspark(_) => "Qwen3DSparkModel",
            HeadConfig::Dflash2(_) => "DFlash2DraftModel",
        }
    }

    /// Architecture in the speculators layout.
    pub(super) fn speculators_architecture(&self) -> &'static str {
        match self {
            HeadConfig::Dspark(_) => "DSparkDraftModel",
            other => other.architecture(),
        }
    }

    /// Reads the head of a drafter. DSpark's keys may be at the top level, where engines read them, or in
    /// `dflash_config`, where SpecForge writes them.
    ///
    /// # Errors
    /// An unknown architecture, or a missing or invalid key.
    pub(super) fn read(top: &Fields<'_>, nested: &Fields<'_>) -> Result<HeadConfig, HfError> {
        let name = match top.get("architectures") {
            None => "dflash",
            Some(names) => {
                let names = names.as_array().into_iter().flatten().filter_map(Value::as_str);
                let known = names.filter_map(|name| ARCHITECTURES.iter().find(|(known, _)| *known == name)).next();
                let supported = "only DFlashDraftModel, DSparkDraftModel, Qwen3DSparkModel, DFlash2DraftModel and \
                                 Qwen3DFlash2DraftModel are";
                known.ok_or_else(|| top.unsupported("architectures", supported))?.1
            }
        };
        match name {
            "dspark" => read_dspark(top, nested).map(HeadConfig::Dspark),
            "dflash2" => read_dflash2(nested).map(HeadConfig::Dflash2),
            _ => Ok(HeadConfig::Dflash),
        }
    }

    /// Checks the settings against a drafter of `hidden` channels and `vocab` tokens.
    ///
    /// # Errors
    /// The key that does not fit, its value, and the expected value.
    pub(super) fn check(&self, hidden: usize, vocab: usize) -> Result<(), (&'static str, String, String)> {
        let bad = |key, value: usize, expected: String| Err((key, value.to_string(), expected));
        match *self {
            HeadConfig::Dflash => Ok(()),
            HeadConfig::Dspark(DsparkConfig { rank, confidence, .. }) => {
                if rank == 0 && confidence == Some(ConfidenceInput::HiddenAndMarkov) {
                    return bad(
                        "markov_rank",
                        0,
                        "above 0, since the confidence head reads the Markov embedding".into(),
                    );
                }
                Ok(())
            }
            HeadConfig::Dflash2(Dflash2Config { conv_taps, conv_group, selector_rank, selector_top_k }) => {
                if conv_taps == 0 {
                    return bad("conv_kernel_size", 0, "at least 1".into());
                }
                if conv_group == 0 || !hidden.is_multiple_of(conv_group) {
                    return bad("conv_group_size", conv_group, format!("a divisor of hidden_size ({hidden})"));
                }
                if selector_rank == 0 {
                    return bad("selector_rank", 0, "at least 1".into());
                }
                if selector_top_k == 0 || selector_top_k > vocab {
                    return bad("selector_top_k", selector_top_k, format!("from 1 to vocab_size ({vocab})"));
                }
                Ok(())
            }
        }
    }

    /// Keys of the head in z-lab's layout: for the top level, and for `dflash_config`.
    pub(super) fn keys(&self) -> (Map<String, Value>, Map<String, Value>) {
        let object = |value: Value| value.as_object().cloned().unwrap_or_default();
        match *self {
            HeadConfig::Dflash => Default::default(),
            HeadConfig::Dspark(DsparkConfig { markov, rank, confidence }) => {
                let keys = object(json!({
                    "markov_rank": rank,
                    "markov_head_type": markov.name(),
                    "enable_confidence_head": confidence.is_some(),
                    "confidence_head_with_markov": confidence == Some(ConfidenceInput::HiddenAndMarkov),
                }));
                let mut top = keys.clone();
                top.insert("sample_from_anchor".into(), json!(true));
                (top, keys)
            }
            HeadConfig::Dflash2(Dflash2Config { conv_taps, conv_group, selector_rank, selector_top_k }) => {
                let keys = json!({
                    "conv_kernel_size": conv_taps,
                    "conv_group_size": conv_group,
                    "selector_rank": selector_rank,
                    "selector_top_k": selector_top_k,
                });
                (Map::new(), object(keys))
            }
        }
    }

    /// Names and shapes of the head's tensors.
    pub(super) fn tensor_shapes(&self, hidden: usize, vocab: usize, layers: usize) -> Vec<(String, Vec<usize>)> {
        let mut shapes = Vec::new();
        let mut add = |name: &str, shape: &[usize]| shapes.push((name.to_owned(), shape.to_vec()));
        match *self {
            HeadConfig::Dflash => {}
            HeadConfig::Dspark(DsparkConfig { markov, rank, confidence }) => {
                if rank > 0 {
                    add(MARKOV_W1, &[vocab, rank]);
                    add(MARKOV_W2, &[vocab, rank]);
                    match markov {
                        MarkovKind::Vanilla => {}
                        MarkovKind::Gated => {
                            add(MARKOV_GATE, &[rank, hidden + rank]);
                            add(MARKOV_GATE_BIAS, &[rank]);
                        }
                        MarkovKind::Rnn => {
                            add(MARKOV_JOINT, &[3 * rank, hidden + 2 * rank]);
                            add(MARKOV_JOINT_BIAS, &[3 * rank]);
                        }
                    }
                }
                if let Some(input) = confidence {
                    let width = if input == ConfidenceInput::HiddenAndMarkov { hidden + rank } else { hidden };
                    add(CONFIDENCE, &[1, width]);
                    add(CONFIDENCE_BIAS, &[1]);
                }
            }
            HeadConfig::Dflash2(Dflash2Config { conv_taps, conv_group, selector_rank, .. }) => {
                add(PREDECESSORS, &[vocab, selector_rank]);
                add(SUCCESSORS, &[vocab, selector_rank]);
                add(SELECTOR_PROJECTION, &[selector_rank, hidden]);
                for layer in 0..layers {
                    for name in CONVOLUTIONS {
                        add(&convolution_tensor(layer, name, BASE_KERNEL), &[2, conv_taps, hidden]);
                        let rows = 2 * conv_taps * (hidden / conv_group.max(1));
                        add(&convolution_tensor(layer, name, KERNEL_PROJECTION), &[rows, hidden]);
                    }
                }
            }
        }
        shapes
    }
}

/// Name of a convolution's tensor: `convolution` is one of [`CONVOLUTIONS`].
pub fn convolution_tensor(layer: usize, convolution: &str, tensor: &str) -> String {
    format!("layers.{layer}.{convolution}.{tensor}")
}

/// Initial values of a head's tensor that is not random: a head starts without effect on the predictions. Biases, the
/// rows of the Markov bias, the successors of a selector and the dynamic kernels are zero; base kernels are the identity.
pub fn initial_values(name: &str, shape: &[usize]) -> Option<Vec<f32>> {
    let count = shape.iter().product();
    if [MARKOV_W2, MARKOV_GATE_BIAS, MARKOV_JOINT_BIAS, CONFIDENCE, CONFIDENCE_BIAS, SUCCESSORS].contains(&name)
        || name.ends_with(KERNEL_PROJECTION)
    {
        return Some(vec![0.0; count]);
    }
    let &[kernels, taps, channels] = shape else { return None };
    // The own position of each channel has the weight 1.
    let identity = |tap: usize| if tap == 0 { 1.0 } else { 0.0 };
    let kernel = (0..taps).flat_map(|tap| std::iter::repeat_n(identity(tap), channels));
    name.ends_with(BASE_KERNEL).then(|| std::iter::repeat_n(kernel, kernels).flatten().collect())
}

fn read_dspark(top: &Fields<'_>, nested: &Fields<'_>) -> Result<DsparkConfig, HfError> {
    if top.flag("sample_from_anchor")? == Some(false) {
        return Err(top.unsupported("sample_from_anchor", "with DSpark all slots predict, so only true is"));
    }
    let count = |key| Ok::<_, HfError>(top.count_to(key, MAX_WIDTH)?.or(nested.count_to(key, MAX_WIDTH)?));
    let flag = |key| Ok::<_, HfError>(top.flag(key)?.or(nested.flag(key)?));
    let rank = count("markov_rank")?.ok_or_else(|| top.missing("markov_rank", "the rank of the Markov head, or 0"))?;
    let key = "markov_head_type";
    let (fields, name) = match top.text(key)? {
        Some(name) => (top, Some(name)),
        None => (nested, nested.text(key)?),
    };
    let markov = match name {
        None => MarkovKind::Vanilla,
        Some(name) => MarkovKind::of_name(name).ok_or_else(|| fields.bad(key, "vanilla, gated or rnn"))?,
    };
    // Absent flags are those of vLLM; SGLang takes a confidence head for granted (docs/heads.md).
    let confidence = match (flag("enable_confidence_head")?, flag("confidence_head_with_markov")?) {
        (Some(true), Some(true)) => Some(ConfidenceInput::HiddenAndMarkov),
        (Some(true), _) => Some(ConfidenceInput::Hidden),
        _ => None,
    };
    Ok(DsparkConfig { markov, rank, confidence })
}

fn read_dflash2(nested: &Fields<'_>) -> Result<Dflash2Config, HfError> {
    Ok(Dflash2Config {
        conv_taps: nested.size_to("conv_kernel_size", MAX_WIDTH)?,
        conv_group: nested.size_to("conv_group_size", MAX_WIDTH)?,
        selector_rank: nested.size_to("selector_rank", MAX_WIDTH)?,
        selector_top_k: nested.size_to("selector_top_k", MAX_WIDTH)?,
    })
}
