//! The target's forward over many sequences at once: the next token of those that are under way, and whole prompts of new ones.

use super::super::batch::Rows;
use super::super::ops::{attention, rms_norm};
use super::batched_kv_cache::{Group, Shelves};
use super::{Layer, ModelError, Target};
use crate::model::rope::RopeTable;
use tch::Tensor;

/// What one forward reads: a token behind each sequence of the cache, then new sequences.
struct Feed<'a> {
    held: i64,
    groups: Vec<Group>,
    /// Tokens of each new sequence.
    prompts: &'a [&'a [i32]],
    /// Where each sequence's result stands among those of the groups.
    order: Option<Tensor>,
}

impl Target {
    /// An empty cache for many sequences.
    pub fn shelves(&self) -> Shelves {
        let heads = (self.config.num_key_value_heads as i64, self.config.head_dim as i64);
        Shelves::new(self.layers.len(), heads, (self.kind, self.device))
    }

    /// A whole forward: `next` is the token behind each sequence of the cache, and `prompts` become sequences behind those.
    /// Gives what [`Target::logits`] takes of the last token of each, `[sequences, hidden]`. Needs [`super::Depth::Whole`].
    pub fn advance(&self, cache: &mut Shelves, next: &[i32], prompts: &[&[i32]]) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let top = self.top("decoding needs")?;
        if next.len() != cache.len() || prompts.iter().any(|prompt| prompt.is_empty()) {
            let (tokens, held) = (next.len(), cache.len());
            return Err(ModelError::Input(format!(
                "{tokens} tokens do not follow {held} sequences, or a prompt is empty"
            )));
        }
        let ids: Vec<i32> = next.iter().chain(prompts.iter().copied().flatten()).copied().collect();
        Rows::new(&ids, &[ids.len() as u32], ids.len())?.check_ids(self.config.vocab_size)?;
        let new = prompts.iter().flat_map(|prompt| 0..prompt.len() as i64);
        let positions: Vec<i64> = cache.lengths().chain(new).collect();
        let table = self.rope.table(&positions, self.kind)?;
        let mut x = self.embedding.f_index_select(0, &Tensor::f_from_slice(&ids)?.f_to_device(self.device)?)?;

        let groups = cache.groups()?;
        let order = match &groups[..] {
            [] => None,
            groups => {
                let numbers: Vec<&Tensor> = groups.iter().map(|group| &group.sequences).collect();
                Some(Tensor::f_cat(&numbers, 0)?.f_argsort(0, false)?)
            }
        };
        for prompt in prompts {
            cache.add(prompt.len() as i64)?;
        }
        let feed = Feed { held: next.len() as i64, groups, prompts, order };
        for (index, layer) in self.layers.iter().enumerate() {
            x = self.advance_layer(layer, index, &x, &table, cache, &feed)?;
        }
        cache.grow(next.len());
        let mut end = feed.held;
        let ends = prompts.iter().map(|prompt| {
            end += prompt.len() as i64;
            end - 1
        });
        let last: Vec<i64> = (0..feed.held).chain(ends).collect();
        let last = Tensor::f_from_slice(&last)?.f_to_device(self.device)?;
        rms_norm(&x.f_index_select(0, &last)?, &top.norm, self.config.rms_norm_eps)
    }

    fn advance_layer(
        &self,
        layer: &Layer,
        index: usize,
        x: &Tensor,
        table: &RopeTable,
        cache: &mut Shelves,
        feed: &Feed<'_>,
    ) -> Result<Tensor, ModelError> {
        let (q, k, v) = self.heads(layer, x, table)?;
        let (kv_heads, dim) = (k.size()[1], k.size()[2]);
        let mut gathered = Vec::new();
        for group in &feed.groups {
            let of = |x: &Tensor| x.f_index_select(0, &group.sequences);
            let (keys, values) = cache.write(index, group, &of(&k)?, &of(&v)?)?;
            // Heads that share keys are as good as several queries: so no kernel has to copy keys for them.
            let queries = of(&q)?.f_reshape([keys.size()[0], kv_heads, -1, dim])?;
            let mixed = attention(&queries, &keys, &values, group.mask.as_ref(), false)?;
            gathered.push(mixed.f_reshape([keys.size()[0], -1])?);
        }
        if let Some(order) = &feed.order {
            gathered = vec![Tensor::f_cat(&gathered, 0)?.f_index_select(0, order)?];
        }
        let mut start = feed.held;
        for (number, prompt) in (feed.held as usize..).zip(feed.prompts) {
            let len = prompt.len() as i64;
            let of = |x: &Tensor| x.f_narrow(0, start, len);
            let (q, k, v) = (of(&q)?, of(&k)?, of(&v)?);
            cache.fill(index, number, &k, &v)?;
            let by_head = |x: &Tensor| x.f_unsqueeze(0)?.f_transpose(1, 2);
            let mixed = attention(&by_head(&q)?, &by_head(&k)?, &by_head(&v)?, None, true)?;
            gathered.push(mixed.f_transpose(1, 2)?.f_reshape([len, -1])?);
            start += len;
        }
        self.finish(layer, x, &Tensor::f_cat(&gathered, 0)?)
    }
}
