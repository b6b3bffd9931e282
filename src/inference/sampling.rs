//! How a token is chosen from logits, and which drafted tokens stand: exact for any drafter.

use super::Settings;
use crate::model::ModelError;
use crate::model::ops::largest;
use draftmill_actors::runtime::random::stream_seed;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tch::{Device, Kind, Tensor};

/// The choices of one response.
pub struct Chance {
    temperature: f64,
    rng: ChaCha8Rng,
}

impl Chance {
    pub fn new(settings: &Settings, stream: u64) -> Chance {
        let rng = ChaCha8Rng::from_seed(stream_seed(settings.seed, "decode", &[stream]));
        Chance { temperature: settings.temperature, rng }
    }

    /// A token for each row of `logits [rows, vocab]`.
    pub fn choose(&mut self, logits: &Tensor) -> Result<Vec<u32>, ModelError> {
        if self.temperature == 0.0 {
            return most_likely(logits);
        }
        let shares = self.shares(logits)?;
        (0..logits.size()[0]).map(|row| Ok(self.sample(&row_of(&shares, row)?))).collect()
    }

    /// How many of the `drafted` tokens stand, and the target's own token behind them. `draft [drafted, vocab]` are the
    /// logits that they were chosen from, `target [drafted + 1, vocab]` those of the verification.
    ///
    /// Greedily a token stands while it is the target's most likely one. With a temperature it stands with probability
    /// min(1, p / q), p being the target's and q the drafter's share, and the first one that falls is drawn anew from
    /// max(p - q, 0), normalised: what comes out has the target's distribution (Leviathan et al. 2023; Chen et al. 2023).
    pub fn verify(&mut self, drafted: &[u32], draft: &Tensor, target: &Tensor) -> Result<(usize, u32), ModelError> {
        if self.temperature == 0.0 {
            let own = most_likely(target)?;
            let stands = drafted.iter().zip(&own).take_while(|(drafted, own)| drafted == own).count();
            return Ok((stands, own[stands]));
        }
        let (shares, proposed) = (self.shares(target)?, self.shares(draft)?);
        for (place, &token) in drafted.iter().enumerate() {
            let p = shares.f_double_value(&[place as i64, token.into()])?;
            let q = proposed.f_double_value(&[place as i64, token.into()])?;
            if self.rng.random::<f64>() * q < p {
                continue;
            }
            let (p, q) = (row_of(&shares, place as i64)?, row_of(&proposed, place as i64)?);
            let rest: Vec<f64> = p.iter().zip(&q).map(|(p, q)| (p - q).max(0.0)).collect();
            // Nothing is left only where both agree up to rounding, and then either will do.
            let rest = if rest.iter().sum::<f64>() > 0.0 { rest } else { p };
            return Ok((place, self.sample(&rest)));
        }
        Ok((drafted.len(), self.sample(&row_of(&shares, drafted.len() as i64)?)))
    }

    /// Softmax at the temperature, in f64 on the CPU.
    fn shares(&self, logits: &Tensor) -> Result<Tensor, ModelError> {
        let wide = logits.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        Ok(wide.f_div_scalar(self.temperature)?.f_softmax(-1, Kind::Double)?)
    }

    /// A place with a probability proportional to its weight.
    fn sample(&mut self, weights: &[f64]) -> u32 {
        let mut left = self.rng.random::<f64>() * weights.iter().sum::<f64>();
        let mut last = 0;
        for (place, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            last = place;
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        last as u32
    }
}

/// The largest logit of each row.
pub fn most_likely(logits: &Tensor) -> Result<Vec<u32>, ModelError> {
    let best = Vec::<i64>::try_from(largest(logits)?.f_to_device(Device::Cpu)?)?;
    Ok(best.into_iter().map(|id| id as u32).collect())
}

fn row_of(shares: &Tensor, row: i64) -> Result<Vec<f64>, ModelError> {
    Ok(Vec::try_from(shares.f_get(row)?)?)
}
