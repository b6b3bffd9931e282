//! Keys and values of the tokens that are committed, layer by layer, for target and drafter alike.

use crate::model::ModelError;
use tch::{Kind, Tensor};

/// The cache of one response. Tokens are written behind the committed ones and count only once they are kept, so whatever
/// a forward wrote and nobody kept is overwritten by the next one.
pub struct KvCache {
    layers: Vec<Option<(Tensor, Tensor)>>,
    len: i64,
}

/// Tokens for which a buffer has room at first; it doubles when they do not fit.
const ROOM: i64 = 256;

impl KvCache {
    pub fn new(layers: usize) -> KvCache {
        KvCache { layers: (0..layers).map(|_| None).collect(), len: 0 }
    }

    /// Committed tokens.
    pub fn len(&self) -> i64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes keys and values, each `[tokens, kv_heads, head_dim]`, behind the committed ones of `layer` without keeping
    /// them. Gives both with the committed ones before them, `[1, kv_heads, len + tokens, head_dim]`.
    pub fn write(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor), ModelError> {
        let end = self.len + keys.size()[0];
        let Some(slot) = self.layers.get_mut(layer) else {
            return Err(ModelError::Input(format!("the cache has no layer {layer}")));
        };
        let buffers = match slot.take() {
            Some(buffers) if buffers.0.size()[2] >= end => buffers,
            old => {
                let room = old.as_ref().map_or(ROOM, |(keys, _)| 2 * keys.size()[2]).max(end);
                let (old_keys, old_values) = old.unzip();
                (grown(old_keys, keys, self.len, room)?, grown(old_values, values, self.len, room)?)
            }
        };
        let put = |buffer: &Tensor, x: &Tensor| -> Result<Tensor, ModelError> {
            let place = buffer.f_narrow(2, self.len, x.size()[0])?;
            place.shallow_clone().f_copy_(&x.f_transpose(0, 1)?.f_unsqueeze(0)?)?;
            Ok(buffer.f_narrow(2, 0, end)?)
        };
        let seen = (put(&buffers.0, keys)?, put(&buffers.1, values)?);
        *slot = Some(buffers);
        Ok(seen)
    }

    /// Commits the first `tokens` of what every layer wrote last.
    pub fn keep(&mut self, tokens: i64) {
        self.len += tokens;
    }

    /// Takes back what was committed beyond `len` tokens.
    pub fn crop(&mut self, len: i64) {
        self.len = self.len.min(len);
    }
}

/// A buffer of `room` tokens that begins with the `len` committed ones of `old`.
fn grown(old: Option<Tensor>, like: &Tensor, len: i64, room: i64) -> Result<Tensor, ModelError> {
    let (heads, dim) = (like.size()[1], like.size()[2]);
    let kind: Kind = like.f_kind()?;
    let buffer = Tensor::f_zeros([1, heads, room, dim], (kind, like.device()))?;
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
    fn what_nobody_kept_is_overwritten_and_what_was_cropped_is_gone() {
        let mut cache = KvCache::new(1);
        let _ = cache.write(0, &tokens(&[1.0, 2.0, 3.0]), &tokens(&[-1.0, -2.0, -3.0])).unwrap();
        cache.keep(2);
        let (keys, negative) = cache.write(0, &tokens(&[4.0, 5.0]), &tokens(&[-4.0, -5.0])).unwrap();
        assert_eq!((values(&keys), values(&negative)), (vec![1.0, 2.0, 4.0, 5.0], vec![-1.0, -2.0, -4.0, -5.0]));
        cache.keep(2);
        cache.crop(1);
        let (keys, _) = cache.write(0, &tokens(&[6.0]), &tokens(&[-6.0])).unwrap();
        assert_eq!(values(&keys), [1.0, 6.0]);
    }

    #[test]
    fn a_full_buffer_grows_with_what_it_holds() {
        let mut cache = KvCache::new(1);
        let all: Vec<f32> = (0..3 * ROOM).map(|i| i as f32).collect();
        for part in all.chunks(100) {
            let _ = cache.write(0, &tokens(part), &tokens(part)).unwrap();
            cache.keep(part.len() as i64);
        }
        let (keys, _) = cache.write(0, &tokens(&[-1.0]), &tokens(&[-1.0])).unwrap();
        assert_eq!(values(&keys), [all, vec![-1.0]].concat());
    }
}
