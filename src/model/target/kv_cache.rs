//! KV cache of one sequence, for target and drafter.

use crate::model::ModelError;
use tch::{Kind, Tensor};

/// KV cache of one response. Tokens are written after the committed ones and count only once committed. The next
/// forward overwrites tokens that were not committed.
pub struct KvCache {
    layers: Vec<Option<(Tensor, Tensor)>>,
    len: i64,
}

/// Initial capacity of a buffer in tokens; it doubles when full.
const INITIAL_CAPACITY: i64 = 256;

impl KvCache {
    pub fn new(layers: usize) -> KvCache {
        KvCache { layers: (0..layers).map(|_| None).collect(), len: 0 }
    }

    /// Number of committed tokens.
    pub fn len(&self) -> i64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes keys and values, each `[tokens, kv_heads, head_dim]`, after the committed ones of `layer` without
    /// committing them. Returns all keys and values, `[1, kv_heads, len + tokens, head_dim]`.
    ///
    /// # Errors
    /// Returns an error if the layer does not exist or libtorch fails.
    pub fn write(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
        let end = self.len + keys.size()[0];
        let Some(slot) = self.layers.get_mut(layer) else {
            return Err(ModelError::Input(format!("the cache has no layer {layer}")));
        };
        let buffers = match slot.take() {
            Some(buffers) if buffers.0.size()[2] >= end => buffers,
            old => {
                let capacity = old.as_ref().map_or(INITIAL_CAPACITY, |(keys, _)| 2 * keys.size()[2]).max(end);
                let (old_keys, old_values) = old.unzip();
                (grown(old_keys, keys, self.len, capacity)?, grown(old_values, values, self.len, capacity)?)
            }
        };
        let put = |buffer: &Tensor, x: &Tensor| -> Result<Tensor, ModelError> {
            let target = buffer.f_narrow(2, self.len, x.size()[0])?;
            target.shallow_clone().f_copy_(&x.f_transpose(0, 1)?.f_unsqueeze(0)?)?;
            Ok(buffer.f_narrow(2, 0, end)?)
        };
        let all = (put(&buffers.0, keys)?, put(&buffers.1, values)?);
        *slot = Some(buffers);
        Ok(all)
    }

    /// Commits the first `tokens` of the last write of every layer.
    pub fn commit(&mut self, tokens: i64) {
        self.len += tokens;
    }
}

/// Buffer of `capacity` tokens that starts with the `len` committed ones of `old`.
fn grown(old: Option<Tensor>, like: &Tensor, len: i64, capacity: i64) -> Result<Tensor, ModelError> {
    let (heads, dim) = (like.size()[1], like.size()[2]);
    let kind: Kind = like.f_kind()?;
    let buffer = Tensor::f_zeros([1, heads, capacity, dim], (kind, like.device()))?;
    if let Some(old) = old {
        buffer.f_narrow(2, 0, len)?.f_copy_(&old.f_narrow(2, 0, len)?)?;
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn tokens(values: &[f32]) -> Tensor {
        Tensor::from_slice(values).reshape([-1, 1, 1])
    }

    fn values(x: &Tensor) -> Vec<f32> {
        Vec::try_from(x.flatten(0, -1).to_device(Device::Cpu)).unwrap()
    }

    #[test]
    fn uncommitted_tokens_are_overwritten() {
        let mut cache = KvCache::new(1);
        let _ = cache.write(0, &tokens(&[1.0, 2.0, 3.0]), &tokens(&[-1.0, -2.0, -3.0])).unwrap();
        cache.commit(2);
        let (keys, negative) = cache.write(0, &tokens(&[4.0, 5.0]), &tokens(&[-4.0, -5.0])).unwrap();
        assert_eq!((values(&keys), values(&negative)), (vec![1.0, 2.0, 4.0, 5.0], vec![-1.0, -2.0, -4.0, -5.0]));
    }

    #[test]
    fn full_buffer_grows_and_keeps_its_tokens() {
        let mut cache = KvCache::new(1);
        let all: Vec<f32> = (0..3 * INITIAL_CAPACITY).map(|i| i as f32).collect();
        for part in all.chunks(100) {
            let _ = cache.write(0, &tokens(part), &tokens(part)).unwrap();
            cache.commit(part.len() as i64);
        }
        let (keys, _) = cache.write(0, &tokens(&[-1.0]), &tokens(&[-1.0])).unwrap();
        assert_eq!(values(&keys), [all, vec![-1.0]].concat());
    }
}
