//! Token sampling and lossless verification of drafted tokens.

use super::Settings;
use crate::model::ModelError;
use crate::model::ops::argmax;
use draftmill_actors::runtime::random::stream_seed;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tch::{Device, Kind, Tensor};

/// Sampler of one response.
pub struct Sampler {
    temperature: f64,
    rng: ChaCha8Rng,
}

impl Sampler {
    pub fn new(settings: &Settings, stream: u64) -> Sampler {
        let rng = ChaCha8Rng::from_seed(stream_seed(settings.seed, "decode", &[stream]));
        Sampler { temperature: settings.temperature, rng }
    }

    /// Chooses a token for each row of `logits [rows, vocab]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn choose(&mut self, logits: &Tensor) -> Result<Vec<u32>, ModelError> {
        if self.temperature == 0.0 {
            return most_likely(logits);
        }
        let probabilities = self.probabilities(logits)?;
        (0..logits.size()[0]).map(|row| Ok(self.sample(&row_of(&probabilities, row)?))).collect()
    }

    /// Returns the number of accepted tokens of `drafted`, and the target's own token after them. `draft [drafted,
    /// vocab]` are the logits that the tokens were drawn from, `target [drafted + 1, vocab]` those of the verification.
    ///
    /// Greedy decoding accepts a token while it is the target's most likely one. With a temperature, a token is
    /// accepted with probability `min(1, p / q)`, with `p` of the target and `q` of the drafter. The first rejected
    /// token is drawn again from `max(p - q, 0)`, normalised. The output then has the target's distribution (Leviathan
    /// et al. 2023; Chen et al. 2023).
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn verify(&mut self, drafted: &[u32], draft: &Tensor, target: &Tensor) -> Result<(usize, u32), ModelError> {
        if self.temperature == 0.0 {
            let own = most_likely(target)?;
            let accepted = drafted.iter().zip(&own).take_while(|(drafted, own)| drafted == own).count();
            return Ok((accepted, own[accepted]));
        }
        let (probabilities, proposed) = (self.probabilities(target)?, self.probabilities(draft)?);
        for (index, &token) in drafted.iter().enumerate() {
            let p = probabilities.f_double_value(&[index as i64, token.into()])?;
            let q = proposed.f_double_value(&[index as i64, token.into()])?;
            if self.rng.random::<f64>() * q < p {
                continue;
            }
            let (p, q) = (row_of(&probabilities, index as i64)?, row_of(&proposed, index as i64)?);
            let rest: Vec<f64> = p.iter().zip(&q).map(|(p, q)| (p - q).max(0.0)).collect();
            // The difference is all zero only if both agree up to rounding; then either distribution will do.
            let rest = if rest.iter().sum::<f64>() > 0.0 { rest } else { p };
            return Ok((index, self.sample(&rest)));
        }
        Ok((drafted.len(), self.sample(&row_of(&probabilities, drafted.len() as i64)?)))
    }

    /// Softmax at the temperature, in f64 on the CPU.
    fn probabilities(&self, logits: &Tensor) -> Result<Tensor, ModelError> {
        let wide = logits.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        Ok(wide.f_div_scalar(self.temperature)?.f_softmax(-1, Kind::Double)?)
    }

    /// Draws an index with probability proportional to its weight.
    fn sample(&mut self, weights: &[f64]) -> u32 {
        let mut left = self.rng.random::<f64>() * weights.iter().sum::<f64>();
        let mut last = 0;
        for (index, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            last = index;
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        last as u32
    }
}

/// Index of the largest logit of each row.
pub fn most_likely(logits: &Tensor) -> Result<Vec<u32>, ModelError> {
    let best = Vec::<i64>::try_from(argmax(logits)?.f_to_device(Device::Cpu)?)?;
    Ok(best.into_iter().map(|id| id as u32).collect())
}

fn row_of(probabilities: &Tensor, row: i64) -> Result<Vec<f64>, ModelError> {
    Ok(Vec::try_from(probabilities.f_get(row)?)?)
}
