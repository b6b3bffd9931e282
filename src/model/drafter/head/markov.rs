//! Markov head of DSpark: a low-rank bias on the logits of a slot from the token before its label (docs/heads.md#dspark).

use super::wide_tensor;
use crate::hf::head::{
    DsparkConfig, MARKOV_GATE, MARKOV_GATE_BIAS, MARKOV_JOINT, MARKOV_JOINT_BIAS, MARKOV_W1, MARKOV_W2, MarkovKind,
};
use crate::model::ModelError;
use crate::model::params::ParamSet;
use tch::{Kind, Tensor};

/// Weights, in at least fp32. `r` is the rank, `D` the width of hidden states.
pub struct Markov {
    /// Embedding of the token before, `[vocab, r]`.
    w1: Tensor,
    /// Rows of the bias, `[vocab, r]`.
    w2: Tensor,
    mixer: Mixer,
}

/// Map from embedding `e` and hidden state `h` to the codes of the bias.
enum Mixer {
    /// `e`.
    Vanilla,
    /// `sigmoid(G [h ; e] + g) e`, with `G [r, D + r]`.
    Gated { gate: Tensor, bias: Tensor },
    /// `tanh(o)` of a recurrent cell over the slots of a block, with `J [3 r, D + 2 r]`.
    Rnn { joint: Tensor, bias: Tensor },
}

/// Codes of some slots, with the results that the backward needs.
pub struct Codes {
    /// Factor of the bias, `[slots, r]`.
    pub codes: Tensor,
    /// Embeddings of the tokens before, `[slots, r]`.
    pub embeddings: Tensor,
    previous: Tensor,
    saved: Saved,
}

enum Saved {
    Vanilla,
    Gated { input: Tensor, gate: Tensor },
    Rnn(Vec<CellStep>),
}

/// One slot number of all blocks that train it.
struct CellStep {
    /// Positions in the list of slots, and numbers of their blocks.
    slots: Tensor,
    blocks: Tensor,
    input: Tensor,
    state: Tensor,
    keep: Tensor,
    candidate: Tensor,
    output: Tensor,
}

/// Gradients by the hidden states, `[slots, D]`, and by the weights.
pub struct MarkovGradients {
    pub hidden: Option<Tensor>,
    pub weights: Vec<(String, Tensor)>,
}

/// State of the recurrent cell of one block in decoding.
pub struct MarkovState(Option<Tensor>);

impl Markov {
    /// Loads the head; `None` for rank 0.
    ///
    /// # Errors
    /// `ModelError::Input` if a tensor is absent.
    pub fn load(config: &DsparkConfig, params: &ParamSet) -> Result<Option<Markov>, ModelError> {
        if config.rank == 0 {
            return Ok(None);
        }
        let get = |name| wide_tensor(params, name);
        let mixer = match config.markov {
            MarkovKind::Vanilla => Mixer::Vanilla,
            MarkovKind::Gated => Mixer::Gated { gate: get(MARKOV_GATE)?, bias: get(MARKOV_GATE_BIAS)? },
            MarkovKind::Rnn => Mixer::Rnn { joint: get(MARKOV_JOINT)?, bias: get(MARKOV_JOINT_BIAS)? },
        };
        Ok(Some(Markov { w1: get(MARKOV_W1)?, w2: get(MARKOV_W2)?, mixer }))
    }

    /// Rows of the bias, `[vocab, r]`.
    pub fn rows(&self) -> &Tensor {
        &self.w2
    }

    /// Embeddings of token `ids`, `[ids, r]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor, ModelError> {
        Ok(self.w1.f_index_select(0, ids)?)
    }

    /// Codes of the slots at `indices`, whose tokens before their labels are `previous [slots]`. The slots of a block are
    /// consecutive numbers from 0, as DSpark trains them.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn forward(
        &self,
        hidden: &Tensor,
        previous: &Tensor,
        indices: &[i64],
        block_size: usize,
    ) -> Result<Codes, ModelError> {
        let embeddings = self.embed(previous)?;
        let hidden = hidden.f_to_kind(embeddings.f_kind()?)?;
        let previous = previous.shallow_clone();
        match &self.mixer {
            Mixer::Vanilla => {
                let codes = embeddings.shallow_clone();
                Ok(Codes { codes, embeddings, previous, saved: Saved::Vanilla })
            }
            Mixer::Gated { gate, bias } => {
                let input = Tensor::f_cat(&[&hidden, &embeddings], 1)?;
                let gate = input.f_linear(gate, Some(bias))?.f_sigmoid()?;
                let codes = gate.f_mul(&embeddings)?;
                Ok(Codes { codes, embeddings, previous, saved: Saved::Gated { input, gate } })
            }
            Mixer::Rnn { joint, bias } => {
                let steps = steps_of(indices, block_size);
                let (kind, device, rank) = (embeddings.f_kind()?, embeddings.device(), embeddings.size()[1]);
                let blocks = steps.first().map_or(0, |(_, blocks)| blocks.len() as i64);
                let mut states = Tensor::f_zeros([blocks, rank], (kind, device))?;
                let mut codes = Tensor::f_zeros_like(&embeddings)?;
                let mut saved = Vec::new();
                for (slots, blocks) in &steps {
                    let at = |numbers: &[i64]| Tensor::f_from_slice(numbers)?.f_to(device);
                    let (slots, blocks) = (at(slots)?, at(blocks)?);
                    let state = states.f_index_select(0, &blocks)?;
                    let (own, hidden) = (embeddings.f_index_select(0, &slots)?, hidden.f_index_select(0, &slots)?);
                    let step = cell(joint, bias, state, &own, &hidden, slots, blocks)?;
                    states = states.f_index_copy_(0, &step.blocks, &step.next()?)?;
                    codes = codes.f_index_copy_(0, &step.slots, &step.output)?;
                    saved.push(step);
                }
                Ok(Codes { codes, embeddings, previous, saved: Saved::Rnn(saved) })
            }
        }
    }

    /// Gradients from those of the codes and, for other readers of the embeddings, of the embeddings.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn backward(
        &self,
        codes: &Codes,
        d_codes: &Tensor,
        d_embeddings: Option<Tensor>,
        d_rows: Tensor,
    ) -> Result<MarkovGradients, ModelError> {
        let rank = self.w1.size()[1];
        let mut weights = vec![(MARKOV_W2.to_owned(), d_rows)];
        let (mut own, hidden) = match (&self.mixer, &codes.saved) {
            (Mixer::Gated { gate: weight, .. }, Saved::Gated { input, gate }) => {
                let slope = gate.f_neg()?.f_add_scalar(1.0)?.f_mul_(gate)?;
                let d_gate = d_codes.f_mul(&codes.embeddings)?.f_mul_(&slope)?;
                weights.push((MARKOV_GATE.into(), d_gate.f_transpose(0, 1)?.f_mm(input)?));
                weights.push((MARKOV_GATE_BIAS.into(), column_sums(&d_gate)?));
                let d_input = d_gate.f_mm(weight)?;
                let width = d_input.size()[1] - rank;
                let own = d_codes.f_mul(gate)?.f_add_(&d_input.f_narrow(1, width, rank)?)?;
                (own, Some(d_input.f_narrow(1, 0, width)?))
            }
            (Mixer::Rnn { joint, bias }, Saved::Rnn(steps)) => {
                let blocks = steps.first().map_or(0, |step| step.blocks.numel() as i64);
                let mut d_states = Tensor::f_zeros([blocks, rank], (d_codes.f_kind()?, d_codes.device()))?;
                let (mut d_joint, mut d_bias) = (joint.f_zeros_like()?, bias.f_zeros_like()?);
                let mut own = codes.embeddings.f_zeros_like()?;
                let width = joint.size()[1] - 2 * rank;
                let mut hidden = Tensor::f_zeros([own.size()[0], width], (own.f_kind()?, own.device()))?;
                for step in steps.iter().rev() {
                    let d_next = d_states.f_index_select(0, &step.blocks)?;
                    let d_output = d_codes.f_index_select(0, &step.slots)?;
                    let (d_state, d_gates) = step.backward(&d_next, &d_output)?;
                    d_joint = d_joint.f_add_(&d_gates.f_transpose(0, 1)?.f_mm(&step.input)?)?;
                    d_bias = d_bias.f_add_(&column_sums(&d_gates)?)?;
                    let d_input = d_gates.f_mm(joint)?;
                    let d_state = d_state.f_add(&d_input.f_narrow(1, 0, rank)?)?;
                    d_states = d_states.f_index_copy_(0, &step.blocks, &d_state)?;
                    own = own.f_index_copy_(0, &step.slots, &d_input.f_narrow(1, rank, rank)?)?;
                    hidden = hidden.f_index_copy_(0, &step.slots, &d_input.f_narrow(1, 2 * rank, width)?)?;
                }
                weights.push((MARKOV_JOINT.into(), d_joint));
                weights.push((MARKOV_JOINT_BIAS.into(), d_bias));
                (own, Some(hidden))
            }
            _ => (d_codes.shallow_clone(), None),
        };
        if let Some(more) = d_embeddings {
            own = own.f_add(&more)?;
        }
        let d_w1 = self.w1.f_zeros_like()?.f_index_add_(0, &codes.previous, &own)?;
        weights.push((MARKOV_W1.into(), d_w1));
        Ok(MarkovGradients { hidden, weights })
    }

    /// State before the first slot of a block.
    pub fn begin(&self) -> MarkovState {
        MarkovState(None)
    }

    /// Codes of the next slot, `[1, r]`, from its hidden state `[1, D]` and the embedding of the token before, `[1, r]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn next(&self, state: &mut MarkovState, hidden: &Tensor, embedding: &Tensor) -> Result<Tensor, ModelError> {
        let hidden = hidden.f_to_kind(embedding.f_kind()?)?;
        match &self.mixer {
            Mixer::Vanilla => Ok(embedding.shallow_clone()),
            Mixer::Gated { gate, bias } => {
                let input = Tensor::f_cat(&[&hidden, embedding], 1)?;
                Ok(input.f_linear(gate, Some(bias))?.f_sigmoid()?.f_mul(embedding)?)
            }
            Mixer::Rnn { joint, bias } => {
                let before = match state.0.take() {
                    Some(before) => before,
                    None => embedding.f_zeros_like()?,
                };
                let none = || Tensor::f_zeros([1], (Kind::Int64, embedding.device()));
                let step = cell(joint, bias, before, embedding, &hidden, none()?, none()?)?;
                state.0 = Some(step.next()?);
                Ok(step.output)
            }
        }
    }
}

/// One step of the cell: `(g, c, o) = J [s ; e ; h] + j` in three equal parts.
fn cell(
    joint: &Tensor,
    bias: &Tensor,
    state: Tensor,
    embedding: &Tensor,
    hidden: &Tensor,
    slots: Tensor,
    blocks: Tensor,
) -> Result<CellStep, ModelError> {
    let input = Tensor::f_cat(&[&state, embedding, hidden], 1)?;
    let gates = input.f_linear(joint, Some(bias))?;
    let rank = state.size()[1];
    let part = |index: i64| gates.f_narrow(1, index * rank, rank);
    Ok(CellStep {
        slots,
        blocks,
        keep: part(0)?.f_sigmoid()?,
        candidate: part(1)?.f_tanh()?,
        output: part(2)?.f_tanh()?,
        input,
        state,
    })
}

impl CellStep {
    /// State after the step: `sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`.
    fn next(&self) -> Result<Tensor, ModelError> {
        Ok(self.state.f_sub(&self.candidate)?.f_mul_(&self.keep)?.f_add_(&self.candidate)?)
    }

    /// Gradients by the state before, apart from the gates' part, and by the gates before their functions.
    fn backward(&self, d_next: &Tensor, d_output: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
        let CellStep { state, keep, candidate, output, .. } = self;
        let of_tanh = |x: &Tensor| x.f_square()?.f_neg()?.f_add_scalar(1.0);
        let drop = keep.f_neg()?.f_add_scalar(1.0)?;
        let d_keep = d_next.f_mul(&state.f_sub(candidate)?)?.f_mul_(keep)?.f_mul_(&drop)?;
        let d_candidate = d_next.f_mul(&drop)?.f_mul_(&of_tanh(candidate)?)?;
        let d_out = d_output.f_mul(&of_tanh(output)?)?;
        Ok((d_next.f_mul(keep)?, Tensor::f_cat(&[d_keep, d_candidate, d_out], 1)?))
    }
}

/// For each slot number: the positions in `indices` that have it, and the numbers of their blocks among those present.
fn steps_of(indices: &[i64], block_size: usize) -> Vec<(Vec<i64>, Vec<i64>)> {
    let size = block_size as i64;
    let mut steps: Vec<(Vec<i64>, Vec<i64>)> = Vec::new();
    let (mut block, mut last) = (-1, -1);
    for (position, index) in (0i64..).zip(indices) {
        if index / size != last {
            (block, last) = (block + 1, index / size);
        }
        let slot = (index % size) as usize;
        if steps.len() <= slot {
            steps.resize_with(slot + 1, Default::default);
        }
        steps[slot].0.push(position);
        steps[slot].1.push(block);
    }
    steps
}

fn column_sums(x: &Tensor) -> Result<Tensor, ModelError> {
    Ok(x.f_sum_dim_intlist(&[0i64][..], false, x.f_kind()?)?)
}
