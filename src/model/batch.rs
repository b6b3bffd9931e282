//! Token rows as model inputs: padded for the target, packed for the drafter.

use super::ModelError;
use crate::config::TopK;
use tch::{Device, Kind, Tensor};

/// Rows of token ids, right-padded to one width, with their real lengths.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// `[rows, width]`, row-major.
    pub ids: &'a [i32],
    pub lengths: &'a [u32],
}

impl<'a> Rows<'a> {
    /// Checks that the ids fill whole rows and that no row exceeds the width.
    ///
    /// # Errors
    /// `ModelError::Input` if they do not.
    pub fn new(ids: &'a [i32], lengths: &'a [u32], width: usize) -> Result<Rows<'a>, ModelError> {
        if ids.len() != lengths.len() * width || lengths.iter().any(|&len| len as usize > width) {
            let (have, rows) = (ids.len(), lengths.len());
            return Err(ModelError::Input(format!(
                "{have} ids and the given lengths do not form {rows} rows of width {width}"
            )));
        }
        Ok(Rows { ids, lengths })
    }

    /// Number of rows and their width.
    pub fn padded(&self) -> (i64, i64) {
        let rows = self.lengths.len() as i64;
        (rows, if rows == 0 { 0 } else { self.ids.len() as i64 / rows })
    }

    /// Number of real tokens.
    pub fn tokens(&self) -> i64 {
        self.lengths.iter().map(|&len| i64::from(len)).sum()
    }

    /// Indices of the real tokens in the padded rows, row by row; `None` without padding.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn real_positions(&self, device: Device) -> Result<Option<Tensor>, ModelError> {
        let (_, width) = self.padded();
        if self.tokens() == self.ids.len() as i64 {
            return Ok(None);
        }
        let indices: Vec<i64> = (0i64..)
            .zip(self.lengths)
            .flat_map(|(row, &len)| (0..i64::from(len)).map(move |position| row * width + position))
            .collect();
        Ok(Some(Tensor::f_from_slice(&indices)?.f_to_device(device)?))
    }

    /// Checks that every id is in the vocabulary; on a GPU an invalid id would abort the process.
    ///
    /// # Errors
    /// `ModelError::Input` that names the first invalid id.
    pub fn check_ids(&self, vocab_size: usize) -> Result<(), ModelError> {
        check_ids(self.ids, vocab_size)
    }
}

/// Labels from the target for packed rows.
#[derive(Debug, PartialEq)]
pub enum TargetLabels {
    TopK(TopKLabels),
    /// Final hidden states after the norm, which the head maps to all logits, `[tokens, hidden]`. The state of a token
    /// predicts the next token.
    States(Tensor),
}

/// Top-k predictions of the target for each token of packed rows, given the tokens before it, most likely first.
#[derive(Clone, Debug, PartialEq)]
pub struct TopKLabels {
    /// Number of predictions per token.
    pub k: usize,
    /// `[tokens, k]`.
    pub ids: Vec<i32>,
    /// Probabilities normalised over the `k` predictions of a token, `[tokens, k]`.
    pub probabilities: Vec<f32>,
}

impl TargetLabels {
    /// Setting that selects this kind of labels.
    pub fn top_k(&self) -> TopK {
        match self {
            TargetLabels::TopK(labels) => TopK::Tokens(labels.k as u32),
            TargetLabels::States(_) => TopK::All,
        }
    }

    /// Replaces the tensors, if any, by `map` of them.
    ///
    /// # Errors
    /// Returns the error of `map`.
    pub fn map_tensors(
        self,
        map: impl FnOnce(&Tensor) -> Result<Tensor, ModelError>,
    ) -> Result<TargetLabels, ModelError> {
        Ok(match self {
            TargetLabels::TopK(labels) => TargetLabels::TopK(labels),
            TargetLabels::States(states) => TargetLabels::States(map(&states)?),
        })
    }

    /// True if no value is NaN or infinite. Logits that are not finite give NaN probabilities.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn all_finite(&self) -> Result<bool, ModelError> {
        match self {
            TargetLabels::TopK(labels) => Ok(labels.probabilities.iter().all(|p| p.is_finite())),
            TargetLabels::States(states) => all_finite(states),
        }
    }

    fn check(&self, tokens: usize, hidden: usize, vocab_size: usize) -> Result<(), ModelError> {
        match self {
            TargetLabels::TopK(TopKLabels { k, ids, probabilities }) => {
                if *k == 0 || ids.len() != tokens * k || probabilities.len() != ids.len() {
                    return Err(ModelError::Input(format!(
                        "{} labels with {} probabilities do not form {k} for each of {tokens} tokens",
                        ids.len(),
                        probabilities.len()
                    )));
                }
                check_ids(ids, vocab_size)
            }
            TargetLabels::States(states) if states.size() != [tokens as i64, hidden as i64] => {
                let shape = states.size();
                Err(ModelError::Input(format!(
                    "the target's last states of shape {shape:?} do not form {tokens} states of width {hidden}"
                )))
            }
            TargetLabels::States(_) => Ok(()),
        }
    }

    /// Appends the labels of further tokens.
    ///
    /// # Errors
    /// `ModelError::Input` if the two have different kinds; otherwise if libtorch fails.
    pub fn append(&mut self, next: TargetLabels) -> Result<(), ModelError> {
        match (self, next) {
            (TargetLabels::TopK(all), TargetLabels::TopK(next)) => {
                all.k = next.k;
                all.ids.extend(next.ids);
                all.probabilities.extend(next.probabilities);
            }
            (TargetLabels::States(all), TargetLabels::States(next)) => *all = Tensor::f_cat(&[&*all, &next], 0)?,
            _ => return Err(ModelError::Input("some rows have top-k labels and others have states".into())),
        }
        Ok(())
    }
}

/// Extracted rows without padding, one after another: the training input of the drafter.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    /// Tapped hidden states, `[tokens, taps * hidden]`.
    pub hidden: &'a Tensor,
    /// Token ids, `[tokens]`.
    pub ids: &'a [i32],
    /// Labels of the tokens; `None` uses the ids themselves.
    pub target_labels: Option<&'a TargetLabels>,
    /// 1 for supervised tokens, `[tokens]`.
    pub loss_mask: &'a [u8],
    /// Tokens of each row.
    pub lengths: &'a [u32],
}

impl<'a> Packed<'a> {
    /// Creates a batch whose labels are its own tokens.
    pub fn of_ids(hidden: &'a Tensor, ids: &'a [i32], loss_mask: &'a [u8], lengths: &'a [u32]) -> Packed<'a> {
        Packed { hidden, ids, target_labels: None, loss_mask, lengths }
    }

    /// Checks that all fields describe the same tokens.
    ///
    /// # Errors
    /// `ModelError::Input` if sizes differ or an id is outside the vocabulary.
    pub fn check(&self, taps: usize, hidden: usize, vocab_size: usize) -> Result<(), ModelError> {
        let width = taps * hidden;
        let tokens: usize = self.lengths.iter().map(|&len| len as usize).sum();
        let shape = self.hidden.size();
        if shape != [tokens as i64, width as i64] || self.ids.len() != tokens || self.loss_mask.len() != tokens {
            return Err(ModelError::Input(format!(
                "features of shape {shape:?} with {} ids and {} mask entries do not describe {tokens} tokens of width {width}",
                self.ids.len(),
                self.loss_mask.len()
            )));
        }
        check_ids(self.ids, vocab_size)?;
        self.target_labels.map_or(Ok(()), |target_labels| target_labels.check(tokens, hidden, vocab_size))
    }

    /// Index of the first token of each row.
    pub fn offsets(&self) -> Vec<usize> {
        let starts = self.lengths.iter().scan(0, |next, &len| {
            let start = *next;
            *next += len as usize;
            Some(start)
        });
        starts.collect()
    }
}

/// True if no value is NaN or infinite.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn all_finite(x: &Tensor) -> Result<bool, ModelError> {
    let _no_grad = tch::no_grad_guard();
    Ok(x.f_isfinite()?.f_all()?.f_to_kind(Kind::Int64)?.f_int64_value(&[])? == 1)
}

fn check_ids(ids: &[i32], vocab_size: usize) -> Result<(), ModelError> {
    match ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= vocab_size)) {
        None => Ok(()),
        Some(id) => Err(ModelError::Input(format!(
            "token id {id} is outside the target's vocabulary of {vocab_size}; prepare the data with this target's tokenizer"
        ))),
    }
}
