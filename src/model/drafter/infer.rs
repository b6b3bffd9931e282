//! Reference implementation of block drafting for tests: no mask, each slot receives only what it may see.

use super::Drafter;
use super::layers::Layers;
use crate::hf::draft::LayerType;
use crate::model::ModelError;
use crate::model::ops::attention;
use tch::Tensor;

impl Drafter {
    /// Final hidden states of a block, `[block_size, hidden]`, whose anchor `id` follows the tokens of `context
    /// [tokens, taps * hidden]`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn draft_block(&self, context: &Tensor, id: u32) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let (config, kind) = (self.config(), self.options().kind);
        let (anchor, size) = (context.size()[0], config.block_size as i64);
        let context_table = self.rope().table(&(0..anchor).collect::<Vec<i64>>(), kind)?;
        let slot_table = self.rope().table(&(anchor..anchor + size).collect::<Vec<i64>>(), kind)?;
        let mut ids = vec![i64::from(config.mask_token_id); config.block_size];
        ids[0] = id.into();
        let ids = Tensor::f_from_slice(&ids)?.f_to(self.options().device)?;

        let layers = Layers::new(config, self.params(), kind)?;
        let context = layers.context(context)?;
        let mut x = self.shared().embedding.f_index_select(0, &ids)?;
        let by_head = |x: &Tensor| x.f_unsqueeze(0)?.f_transpose(1, 2);
        for (layer, &layer_type) in layers.layers.iter().zip(&config.layer_types) {
            let normed = layer.inner(&x)?;
            let inner = layer.attended(&normed)?;
            let queries = layer.queries(&inner, &slot_table)?;
            let (before, own) = (layer.keys_values(&context, &context_table)?, layer.keys_values(&inner, &slot_table)?);
            let keys = Tensor::f_cat(&[before.0, own.0], 0)?;
            let values = Tensor::f_cat(&[before.1, own.1], 0)?;
            // Query ranges with the key ranges that they see.
            let spans: Vec<(i64, i64, i64, i64)> = match (layer_type, config.sliding_window) {
                (LayerType::Sliding, Some(window)) => (0..size)
                    .map(|slot| {
                        let from = (anchor + slot - (window as i64 - 1)).clamp(0, anchor);
                        let end = if config.sliding_causal { anchor + slot + 1 } else { anchor + size };
                        (slot, 1, from, end - from)
                    })
                    .collect(),
                _ => vec![(0, size, 0, anchor + size)],
            };
            let mut parts = Vec::new();
            for (slot, slots, from, len) in spans {
                let query = by_head(&queries.f_narrow(0, slot, slots)?)?;
                let (key, value) = (by_head(&keys.f_narrow(0, from, len)?)?, by_head(&values.f_narrow(0, from, len)?)?);
                let mixed = attention(&query, &key, &value, None, false)?;
                parts.push(mixed.f_transpose(1, 2)?.f_reshape([slots, -1])?);
            }
            x = layer.finish(&x, &normed, &Tensor::f_cat(&parts, 0)?)?;
        }
        layers.normed(&x)
    }
}
