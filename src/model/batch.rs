//! Token rows as models take them: padded for the target, packed for the drafter.

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
    /// Checks that the ids fill whole rows and that no row is longer than the width.
    pub fn new(ids: &'a [i32], lengths: &'a [u32], width: usize) -> Result<Rows<'a>, ModelError> {
        if ids.len() != lengths.len() * width || lengths.iter().any(|&len| len as usize > width) {
            let (have, rows) = (ids.len(), lengths.len());
            return Err(ModelError::Input(format!("{have} ids do not make {rows} rows of width {width}")));
        }
        Ok(Rows { ids, lengths })
    }

    /// Rows and width.
    pub fn padded(&self) -> (i64, i64) {
        let rows = self.lengths.len() as i64;
        (rows, if rows == 0 { 0 } else { self.ids.len() as i64 / rows })
    }

    /// Real tokens.
    pub fn tokens(&self) -> i64 {
        self.lengths.iter().map(|&len| i64::from(len)).sum()
    }

    /// Places of the real tokens among the padded ones, row after row; `None` when there is no padding.
    pub fn real_positions(&self, device: Device) -> Result<Option<Tensor>, ModelError> {
        let (_, width) = self.padded();
        if self.tokens() == self.ids.len() as i64 {
            return Ok(None);
        }
        let places: Vec<i64> = (0i64..)
            .zip(self.lengths)
            .flat_map(|(row, &len)| (0..i64::from(len)).map(move |place| row * width + place))
            .collect();
        Ok(Some(Tensor::f_from_slice(&places)?.f_to_device(device)?))
    }

    /// An id outside the vocabulary would end the whole process on a GPU, so it is found here.
    pub fn check_ids(&self, vocab_size: usize) -> Result<(), ModelError> {
        check_ids(self.ids, vocab_size)
    }
}

/// What the target says of the places of packed rows.
#[derive(Debug, PartialEq)]
pub enum Teacher {
    Likeliest(Likeliest),
    /// All of it: the hidden state that its head reads, after the final norm, `[tokens, hidden]`. The state of a token is for
    /// the one behind it.
    States(Tensor),
}

/// At each token of packed rows: the likeliest tokens behind those before it, the likeliest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Likeliest {
    /// Tokens at each place.
    pub each: usize,
    /// `[tokens, each]`.
    pub ids: Vec<i32>,
    /// Probabilities among the tokens of a place, which sum to 1, `[tokens, each]`.
    pub shares: Vec<f32>,
}

impl Teacher {
    /// How it was asked for.
    pub fn top_k(&self) -> TopK {
        match self {
            Teacher::Likeliest(said) => TopK::Likeliest(said.each as u32),
            Teacher::States(_) => TopK::All,
        }
    }

    /// The same, with its tensors where `brought` brings them.
    pub fn by(self, brought: impl FnOnce(&Tensor) -> Result<Tensor, ModelError>) -> Result<Teacher, ModelError> {
        Ok(match self {
            Teacher::Likeliest(said) => Teacher::Likeliest(said),
            Teacher::States(states) => Teacher::States(brought(&states)?),
        })
    }

    /// True when nothing that the target says is NaN or infinite. The shares of a token whose logits are not finite are NaN.
    pub fn all_finite(&self) -> Result<bool, ModelError> {
        match self {
            Teacher::Likeliest(said) => Ok(said.shares.iter().all(|share| share.is_finite())),
            Teacher::States(states) => all_finite(states),
        }
    }

    fn check(&self, tokens: usize, hidden: usize, vocab_size: usize) -> Result<(), ModelError> {
        match self {
            Teacher::Likeliest(Likeliest { each, ids, shares }) => {
                if *each == 0 || ids.len() != tokens * each || shares.len() != ids.len() {
                    return Err(ModelError::Input(format!(
                        "{} labels with {} shares do not make {each} for each of {tokens} tokens",
                        ids.len(),
                        shares.len()
                    )));
                }
                check_ids(ids, vocab_size)
            }
            Teacher::States(states) if states.size() != [tokens as i64, hidden as i64] => {
                let shape = states.size();
                Err(ModelError::Input(format!(
                    "the target's last states of shape {shape:?} do not make {tokens} of width {hidden}"
                )))
            }
            Teacher::States(_) => Ok(()),
        }
    }

    /// Sets what is said of further tokens behind what is said of those before.
    pub fn append(&mut self, next: Teacher) -> Result<(), ModelError> {
        match (self, next) {
            (Teacher::Likeliest(all), Teacher::Likeliest(next)) => {
                all.each = next.each;
                all.ids.extend(next.ids);
                all.shares.extend(next.shares);
            }
            (Teacher::States(all), Teacher::States(next)) => *all = Tensor::f_cat(&[&*all, &next], 0)?,
            _ => return Err(ModelError::Input("some rows have labels and others have states".into())),
        }
        Ok(())
    }
}

/// Extracted rows, one after another without padding: what the drafter trains on.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    /// Tapped hidden states, `[tokens, taps * hidden]`.
    pub hidden: &'a Tensor,
    /// Token ids, `[tokens]`.
    pub ids: &'a [i32],
    /// What is to be predicted at each token; without it the ids themselves.
    pub teacher: Option<&'a Teacher>,
    /// 1 where a token is supervised, `[tokens]`.
    pub loss_mask: &'a [u8],
    /// Tokens of each row.
    pub lengths: &'a [u32],
}

impl<'a> Packed<'a> {
    /// Rows whose labels are their own tokens.
    pub fn of_ids(hidden: &'a Tensor, ids: &'a [i32], loss_mask: &'a [u8], lengths: &'a [u32]) -> Packed<'a> {
        Packed { hidden, ids, teacher: None, loss_mask, lengths }
    }

    /// Checks that all parts speak of the same tokens.
    pub fn check(&self, taps: usize, hidden: usize, vocab_size: usize) -> Result<(), ModelError> {
        let width = taps * hidden;
        let tokens: usize = self.lengths.iter().map(|&len| len as usize).sum();
        let shape = self.hidden.size();
        if shape != [tokens as i64, width as i64] || self.ids.len() != tokens || self.loss_mask.len() != tokens {
            return Err(ModelError::Input(format!(
                "features of shape {shape:?} with {} ids and {} mask entries do not make {tokens} tokens of width {width}",
                self.ids.len(),
                self.loss_mask.len()
            )));
        }
        check_ids(self.ids, vocab_size)?;
        self.teacher.map_or(Ok(()), |teacher| teacher.check(tokens, hidden, vocab_size))
    }

    /// First token of each row.
    pub fn offsets(&self) -> Vec<usize> {
        let starts = self.lengths.iter().scan(0, |next, &len| {
            let start = *next;
            *next += len as usize;
            Some(start)
        });
        starts.collect()
    }
}

/// True when no value is NaN or infinite.
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
