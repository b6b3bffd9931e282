//! Forward of the target over many sequences: the next token of cached sequences, and whole prompts of new ones.

use super::super::batch::Rows;
use super::super::ops::{attention, rms_norm};
use super::batched_kv_cache::{BatchedKvCache, Group};
use super::{Layer, ModelError, Target};
use crate::model::rope::RopeTable;
use tch::Tensor;

/// Input of one forward: one token per cached sequence, then new sequences.
struct StepInput<'a> {
    cached: i64,
    groups: Vec<Group>,
    /// Tokens of each new sequence.
    prompts: &'a [&'a [i32]],
    /// Index of each sequence's result in the concatenated results of the groups.
    inverse: Option<Tensor>,
}

impl Target {
    /// Creates an empty cache for many sequences.
    pub fn batched_cache(&self) -> BatchedKvCache {
        let heads = (self.config.num_key_value_heads as i64, self.config.head_dim as i64);
        BatchedKvCache::new(self.layers.len(), heads, (self.kind, self.device))
    }

    /// Runs a whole forward: `next` holds one token per cached sequence, and `prompts` become new sequences after
    /// those. Returns the normed state of each sequence's last token, `[sequences, hidden]`, for [`Target::logits`].
    /// Needs [`super::Depth::Whole`].
    ///
    /// # Errors
    /// `ModelError::Input` if the counts differ, a prompt is empty or an id is invalid; otherwise if libtorch fails.
    pub fn advance(&self, cache: &mut BatchedKvCache, next: &[i32], prompts: &[&[i32]]) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let top = self.top("decoding needs")?;
        if next.len() != cache.len() || prompts.iter().any(|prompt| prompt.is_empty()) {
            let (tokens, cached) = (next.len(), cache.len());
            return Err(ModelError::Input(format!("{tokens} tokens for {cached} sequences, or an empty prompt")));
        }
        let ids: Vec<i32> = next.iter().chain(prompts.iter().copied().flatten()).copied().collect();
        Rows::new(&ids, &[ids.len() as u32], ids.len())?.check_ids(self.config.vocab_size)?;
        let new = prompts.iter().flat_map(|prompt| 0..prompt.len() as i64);
        let positions: Vec<i64> = cache.lengths().chain(new).collect();
        let table = self.rope.table(&positions, self.kind)?;
        let mut x = self.embedding.f_index_select(0, &Tensor::f_from_slice(&ids)?.f_to_device(self.device)?)?;

        let groups = cache.prepare_step()?;
        let inverse = match &groups[..] {
            [] => None,
            groups => {
                let numbers: Vec<&Tensor> = groups.iter().map(|group| &group.sequences).collect();
                Some(Tensor::f_cat(&numbers, 0)?.f_argsort(0, false)?)
            }
        };
        for prompt in prompts {
            cache.add(prompt.len() as i64)?;
        }
        let input = StepInput { cached: next.len() as i64, groups, prompts, inverse };
        for (index, layer) in self.layers.iter().enumerate() {
            x = self.advance_layer(layer, index, &x, &table, cache, &input)?;
        }
        cache.commit(next.len());
        let mut end = input.cached;
        let ends = prompts.iter().map(|prompt| {
            end += prompt.len() as i64;
            end - 1
        });
        let last: Vec<i64> = (0..input.cached).chain(ends).collect();
        let last = Tensor::f_from_slice(&last)?.f_to_device(self.device)?;
        rms_norm(&x.f_index_select(0, &last)?, &top.norm, self.config.rms_norm_eps)
    }

    fn advance_layer(
        &self,
        layer: &Layer,
        index: usize,
        x: &Tensor,
        table: &RopeTable,
        cache: &mut BatchedKvCache,
        input: &StepInput<'_>,
    ) -> Result<Tensor, ModelError> {
        let (q, k, v) = self.heads(layer, x, table)?;
        let (kv_heads, dim) = (k.size()[1], k.size()[2]);
        let mut attended = Vec::new();
        for group in &input.groups {
            let of = |x: &Tensor| x.f_index_select(0, &group.sequences);
            let (keys, values) = cache.write(index, group, &of(&k)?, &of(&v)?)?;
            // Heads that share keys are passed as several queries, so that no kernel copies keys for them.
            let queries = of(&q)?.f_reshape([keys.size()[0], kv_heads, -1, dim])?;
            let mixed = attention(&queries, &keys, &values, group.mask.as_ref(), false)?;
            attended.push(mixed.f_reshape([keys.size()[0], -1])?);
        }
        if let Some(inverse) = &input.inverse {
            attended = vec![Tensor::f_cat(&attended, 0)?.f_index_select(0, inverse)?];
        }
        let mut start = input.cached;
        for (number, prompt) in (input.cached as usize..).zip(input.prompts) {
            let len = prompt.len() as i64;
            let of = |x: &Tensor| x.f_narrow(0, start, len);
            let (q, k, v) = (of(&q)?, of(&k)?, of(&v)?);
            cache.fill(index, number, &k, &v)?;
            let by_head = |x: &Tensor| x.f_unsqueeze(0)?.f_transpose(1, 2);
            let mixed = attention(&by_head(&q)?, &by_head(&k)?, &by_head(&v)?, None, true)?;
            attended.push(mixed.f_transpose(1, 2)?.f_reshape([len, -1])?);
            start += len;
        }
        self.finish(layer, x, &Tensor::f_cat(&attended, 0)?)
    }
}
