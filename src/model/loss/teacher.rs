//! Teacher of a chunk of slots, and the drafter's distribution compared with it.

use super::head_loss::Labels;
use crate::model::ModelError;
use crate::model::ops::{argmax, wide};
use draftmill_torch_ext::distributions;
use tch::Tensor;

/// Distributions over the vocabulary that some slots learn from. Several slots may share one.
pub struct Teacher {
    /// Probabilities, `[distributions, vocab]`.
    pub p: Tensor,
    /// Distribution of each slot, `[slots]`.
    pub index: Tensor,
    /// `sum p ln p` of each distribution, `[distributions, 1]`.
    pub entropy: Tensor,
    /// First label of each slot, `[slots, 1]`.
    pub first: Tensor,
}

/// The drafter's softmax `q` compared with the teacher's `p`, `[slots, 1]` each except `q [slots, vocab]`.
pub struct Compared {
    pub q: Tensor,
    pub max: Tensor,
    /// Logarithm of the sum of `exp(logit)`.
    pub log_sum: Tensor,
    /// `KL(p || q)`.
    pub kl: Tensor,
    /// Acceptance `sum min(p, q)`.
    pub alpha: Tensor,
    /// Sum of `q` over the tokens with `q < p`.
    pub under: Tensor,
}

impl Teacher {
    /// Teacher of slots with these labels. `head [vocab, hidden]` maps target states to logits.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn new(labels: &Labels, head: &Tensor) -> Result<Teacher, ModelError> {
        match labels {
            Labels::Tokens { ids, probabilities } => {
                let probabilities = probabilities.f_to_kind(wide(head.f_kind()?))?;
                let (slots, device) = (ids.size()[0], head.device());
                let empty = Tensor::f_zeros([slots, head.size()[0]], (probabilities.f_kind()?, device))?;
                let terms = probabilities.f_xlogy(&probabilities)?;
                Ok(Teacher {
                    p: empty.f_scatter_add(1, ids, &probabilities)?,
                    index: Tensor::f_arange(slots, (tch::Kind::Int64, device))?,
                    entropy: terms.f_sum_dim_intlist(&[1i64][..], true, terms.f_kind()?)?,
                    first: ids.f_narrow(1, 0, 1)?,
                })
            }
            Labels::States { states, index } => {
                // Blocks overlap, so several slots may have the same state.
                let (used, index, _) = index.f_unique_dim(0, true, true, false)?;
                let logits = states.f_index_select(0, &used)?.f_mm(&head.f_transpose(0, 1)?)?;
                let mut p = logits.f_to_kind(wide(logits.f_kind()?))?;
                let first = argmax(&p)?.f_index_select(0, &index)?.f_unsqueeze(1)?;
                let entropy = match distributions::softmax_entropy(&mut p)? {
                    Some(entropy) => entropy,
                    None => {
                        let log_p = p.f_log_softmax(-1, p.f_kind()?)?;
                        p = log_p.f_exp()?;
                        p.f_mul(&log_p)?.f_sum_dim_intlist(&[1i64][..], true, p.f_kind()?)?
                    }
                };
                Ok(Teacher { p, index, entropy, first })
            }
        }
    }

    /// Probabilities of each slot, `[slots, vocab]`.
    fn of_slots(&self) -> Result<Tensor, ModelError> {
        Ok(self.p.f_index_select(0, &self.index)?)
    }

    /// Compares the softmax of `logits [slots, vocab]`, whose storage becomes `q`, with the teacher.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn compare(&self, mut logits: Tensor) -> Result<Compared, ModelError> {
        let mut entropy = self.entropy.f_index_select(0, &self.index)?;
        if let Some(found) = distributions::compare(&mut logits, &self.p, &self.index)? {
            return Ok(Compared {
                q: logits,
                kl: entropy.f_sub_(&found.cross)?.f_add_(&found.log_total)?,
                log_sum: found.log_total.f_add(&found.max)?,
                max: found.max,
                alpha: found.shared,
                under: found.under,
            });
        }
        let (p, kind) = (self.of_slots()?, logits.f_kind()?);
        let total = |x: &Tensor| x.f_sum_dim_intlist(&[1i64][..], true, kind);
        let log_sum = logits.f_logsumexp(&[-1i64][..], true)?;
        let log_q = logits.f_sub(&log_sum)?;
        let q = log_q.f_exp()?;
        Ok(Compared {
            kl: entropy.f_sub_(&total(&p.f_mul(&log_q)?)?)?,
            max: logits.f_amax(&[1i64][..], true)?,
            log_sum,
            alpha: total(&p.f_minimum(&q)?)?,
            under: total(&q.f_mul(&q.f_lt_tensor(&p)?)?)?,
            q,
        })
    }

    /// Replaces `q` by `q (own - [q < p] below) - against p`, with numbers `[slots, 1]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn slope(&self, mut q: Tensor, own: &Tensor, below: &Tensor, against: &Tensor) -> Result<Tensor, ModelError> {
        if distributions::slope(&mut q, &self.p, &self.index, own, below, against)? {
            return Ok(q);
        }
        let p = self.of_slots()?;
        let less = q.f_lt_tensor(&p)?.f_to_kind(q.f_kind()?)?;
        Ok(q.f_mul(&own.f_sub(&less.f_mul(below)?)?)?.f_sub_(&p.f_mul(against)?)?)
    }

    /// `ln q - ln p` of each token, `[slots, vocab]`, and its mean under `q`, `[slots, 1]`, which is `KL(q || p)`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn reverse(&self, logits: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
        let kind = logits.f_kind()?;
        let log_q = logits.f_log_softmax(-1, kind)?;
        let ratio = log_q.f_sub(&self.of_slots()?.f_log()?)?;
        let mean = log_q.f_exp()?.f_mul(&ratio)?.f_sum_dim_intlist(&[1i64][..], true, kind)?;
        Ok((ratio, mean))
    }
}
