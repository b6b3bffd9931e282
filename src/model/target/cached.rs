//! Forward of the target over a few new tokens after a cache of earlier ones, for decoding.

use super::super::batch::Rows;
use super::super::ops::{additive_mask, attention, linear, rms_norm};
use super::kv_cache::KvCache;
use super::{ModelError, Target};
use tch::{Kind, Tensor};

/// Results of a forward for the new tokens.
pub struct Extended {
    /// Residual streams after the tapped layers, concatenated, `[tokens, taps * hidden]`.
    pub taps: Tensor,
    /// States after the final norm, `[tokens, hidden]`, for [`Target::logits`].
    pub normed: Tensor,
}

impl Target {
    /// Creates an empty cache for one sequence.
    pub fn cache(&self) -> KvCache {
        KvCache::new(self.layers.len())
    }

    /// Runs a whole forward over `ids`, which follow the committed tokens of the cache. Writes their keys and values
    /// but commits none: call [`KvCache::commit`]. Needs [`super::Depth::Whole`].
    ///
    /// # Errors
    /// `ModelError::Input` if a tap or id is invalid or the target is not whole; otherwise if libtorch fails.
    pub fn extend(&self, cache: &mut KvCache, ids: &[i32], taps: &[usize]) -> Result<Extended, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let top = self.top("decoding needs")?;
        if let Some(tap) = taps.iter().find(|&&tap| tap >= self.layers.len()) {
            let have = self.layers.len();
            return Err(ModelError::Input(format!("layer {tap} is tapped, but the target has {have} layers")));
        }
        let (start, count) = (cache.len(), ids.len() as i64);
        let lengths = [ids.len() as u32];
        Rows::new(ids, &lengths, ids.len())?.check_ids(self.config.vocab_size)?;
        let mut x = self.embedding.f_index_select(0, &Tensor::f_from_slice(ids)?.f_to_device(self.device)?)?;
        let table = self.rope.table(&(start..start + count).collect::<Vec<i64>>(), self.kind)?;
        // A new token sees all earlier tokens and the new ones up to itself.
        let mask = if start > 0 && count > 1 {
            let on = (Kind::Int64, self.device);
            let (query, key) =
                (Tensor::f_arange_start(start, start + count, on)?, Tensor::f_arange(start + count, on)?);
            let allowed = key.f_le_tensor(&query.f_unsqueeze(1)?)?;
            Some(additive_mask(&allowed, self.kind)?.f_unsqueeze(0)?.f_unsqueeze(0)?)
        } else {
            None
        };
        let mut tapped: Vec<Option<Tensor>> = taps.iter().map(|_| None).collect();
        for (index, layer) in self.layers.iter().enumerate() {
            let (q, k, v) = self.heads(layer, &x, &table)?;
            let (keys, values) = cache.write(index, &k, &v)?;
            let q = q.f_unsqueeze(0)?.f_transpose(1, 2)?;
            let mixed = attention(&q, &keys, &values, mask.as_ref(), start == 0)?;
            x = self.finish(layer, &x, &mixed.f_transpose(1, 2)?.f_reshape([count, -1])?)?;
            for tap in (0..taps.len()).filter(|&tap| taps[tap] == index) {
                tapped[tap] = Some(x.shallow_clone());
            }
        }
        let tapped: Vec<Tensor> = tapped.into_iter().flatten().collect();
        let taps = match tapped.is_empty() {
            true => Tensor::f_empty([count, 0], (self.kind, self.device))?,
            false => Tensor::f_cat(&tapped, 1)?,
        };
        Ok(Extended { taps, normed: rms_norm(&x, &top.norm, self.config.rms_norm_eps)? })
    }

    /// Logits `[rows, vocab]` of states after the final norm. Needs [`super::Depth::Whole`].
    ///
    /// # Errors
    /// Returns an error if the target is not whole or libtorch fails.
    pub fn logits(&self, normed: &Tensor) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        linear(normed, &self.top("logits need")?.head, None)
    }
}
