//! Interface of block proposers, and the DFlash drafter as one, with a cache of context keys.

use crate::hf::draft::LayerType;
use crate::model::ModelError;
use crate::model::drafter::Drafter;
use crate::model::drafter::head::{self, Draw, Proposal};
use crate::model::drafter::layers::Layers;
use crate::model::ops::{additive_mask, attention};
use crate::model::target::kv_cache::KvCache;
use tch::{Device, Kind, Tensor};

/// Interface between decoding and the drafter. Tests implement it with a proposer that is always right.
pub trait Proposer {
    /// State of one response.
    type Cache;

    /// Target layers whose outputs are the context.
    fn taps(&self) -> &[usize];

    /// Creates an empty cache.
    ///
    /// # Errors
    /// Returns an error if the proposer fails.
    fn begin(&self) -> Result<Self::Cache, ModelError>;

    /// Proposes at most `limit` tokens after the anchor `last`. `context [tokens, taps * hidden]` holds the taps of the
    /// tokens committed since the last call, all of them before the anchor. `draw` draws each token, so that a head may
    /// compute the logits of a slot from the token before it.
    ///
    /// # Errors
    /// Returns an error if the proposer or `draw` fails.
    fn propose(
        &self,
        cache: &mut Self::Cache,
        context: &Tensor,
        last: u32,
        limit: usize,
        draw: Draw<'_>,
    ) -> Result<Proposal, ModelError>;
}

/// Keys and values of the committed context in each layer, and the weights in the compute dtype.
pub struct ContextCache {
    keys: KvCache,
    layers: Layers,
}

impl ContextCache {
    /// Number of cached context tokens.
    pub fn len(&self) -> i64 {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

impl Proposer for Drafter {
    type Cache = ContextCache;

    fn taps(&self) -> &[usize] {
        &self.config().target_layer_ids
    }

    fn begin(&self) -> Result<ContextCache, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let layers = Layers::new(self.config(), self.params(), self.options().kind)?;
        Ok(ContextCache { keys: KvCache::new(self.config().num_hidden_layers), layers })
    }

    fn propose(
        &self,
        cache: &mut ContextCache,
        context: &Tensor,
        last: u32,
        limit: usize,
        draw: Draw<'_>,
    ) -> Result<Proposal, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let hidden = self.draft_cached(cache, context, last)?;
        head::propose(self.config(), self.params(), self.shared(), &hidden, last, limit, draw)
    }
}

impl Drafter {
    /// Final hidden states of the block after the context, `[block_size, hidden]`. Equals `Drafter::draft_block`,
    /// with the keys of earlier context taken from `cache`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn draft_cached(&self, cache: &mut ContextCache, context: &Tensor, last: u32) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let (config, kind, device) = (self.config(), self.options().kind, self.options().device);
        let (known, fresh, size) = (cache.len(), context.size()[0], config.block_size as i64);
        let anchor = known + fresh;
        let context_table = self.rope().table(&(known..anchor).collect::<Vec<i64>>(), kind)?;
        let slot_table = self.rope().table(&(anchor..anchor + size).collect::<Vec<i64>>(), kind)?;
        let mut ids = vec![i64::from(config.mask_token_id); config.block_size];
        ids[0] = last.into();
        let ids = Tensor::f_from_slice(&ids)?.f_to(device)?;
        let sliding = match config.sliding_window {
            Some(window) => {
                let mask = sliding_mask(anchor, size, window as i64, config.sliding_causal, device)?;
                Some(additive_mask(&mask, kind)?.f_unsqueeze(0)?.f_unsqueeze(0)?)
            }
            None => None,
        };

        let ContextCache { keys: cache, layers } = cache;
        let context = layers.context(context)?;
        let mut x = self.shared().embedding.f_index_select(0, &ids)?;
        for (index, (layer, &layer_type)) in layers.layers.iter().zip(&config.layer_types).enumerate() {
            let normed = layer.inner(&x)?;
            let inner = layer.attended(&normed)?;
            let queries = layer.queries(&inner, &slot_table)?.f_unsqueeze(0)?.f_transpose(1, 2)?;
            let (before, own) = (layer.keys_values(&context, &context_table)?, layer.keys_values(&inner, &slot_table)?);
            let keys = Tensor::f_cat(&[before.0, own.0], 0)?;
            let values = Tensor::f_cat(&[before.1, own.1], 0)?;
            let (keys, values) = cache.write(index, &keys, &values)?;
            let mask = sliding.as_ref().filter(|_| layer_type == LayerType::Sliding);
            let mixed = attention(&queries, &keys, &values, mask, false)?;
            x = layer.finish(&x, &normed, &mixed.f_transpose(1, 2)?.f_reshape([size, -1])?)?;
        }
        // Commits the context only; the keys of the block after it are overwritten by the next call.
        cache.commit(fresh);
        layers.normed(&x)
    }
}

/// Visible keys of sliding layers, `[size, anchor + size]`: slot `j` of a block at `anchor` sees context from `anchor + j -
/// (window - 1)` on, and the slots of its block, up to `j` if `causal`.
fn sliding_mask(anchor: i64, size: i64, window: i64, causal: bool, device: Device) -> Result<Tensor, ModelError> {
    let key = Tensor::f_arange(anchor + size, (Kind::Int64, device))?;
    let slot = Tensor::f_arange_start(anchor, anchor + size, (Kind::Int64, device))?.f_unsqueeze(1)?;
    let near = key.f_gt_tensor(&slot.f_sub_scalar(window)?)?.f_logical_or(&key.f_ge(anchor)?)?;
    if causal { Ok(near.f_logical_and(&key.f_le_tensor(&slot)?)?) } else { Ok(near) }
}
