//! What the configuration leaves to the target: the drafter's shape, the tapped layers, and bytes per token.

use super::{
    Config,
    load::Written,
    problem::{Problem, Problems},
};
use draftmill_actors::engine::FeatureDtype;

/// What has to be known of a target: fields of its config.json, and the rows that its embedding really has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetFacts {
    pub layers: u32,
    pub hidden_size: u32,
    pub intermediate_size: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Rows of the embedding, padding included.
    pub vocab_rows: u32,
}

/// The drafter with nothing left open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrafterShape {
    pub layers: u32,
    /// The target's hidden size.
    pub hidden_size: u32,
    pub intermediate_size: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub block_size: u32,
    /// Tapped layers of the target, ascending.
    pub layer_ids: Vec<u32>,
    /// Layers of the target.
    pub target_layers: u32,
    pub vocab_rows: u32,
}

impl DrafterShape {
    /// Trained values: fc, norms and layers; embedding and head are the target's (`reference/dflash.md` section 2.1).
    pub fn parameters(&self) -> u64 {
        let [hidden, inner] = [self.hidden_size, self.intermediate_size].map(u64::from);
        let [heads, kv_heads, head_dim] = [self.heads, self.kv_heads, self.head_dim].map(u64::from);
        let attention = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim;
        let layer = attention + 3 * hidden * inner + 2 * hidden;
        self.layer_ids.len() as u64 * hidden * hidden + 2 * hidden + u64::from(self.layers) * layer
    }

    /// Bytes of hidden states per real token, with its id and its loss mask.
    pub fn feature_bytes_per_token(&self, dtype: FeatureDtype) -> u64 {
        self.layer_ids.len() as u64 * u64::from(self.hidden_size) * dtype.bytes() + TOKEN_BYTES
    }
}

/// An i32 token id and a byte of loss mask.
const TOKEN_BYTES: u64 = 5;

/// Layers to tap for a drafter of `taps` layers (`reference/dflash.md` section 1.4): the middle one, or evenly from 1 to
/// L-3, rounded half to even as Python does.
pub fn spread_layer_ids(target_layers: u32, taps: u32) -> Vec<u32> {
    if taps == 1 {
        return vec![target_layers / 2];
    }
    let step = (f64::from(target_layers) - 4.0) / f64::from(taps.saturating_sub(1));
    (0..taps).map(|index| (1.0 + f64::from(index) * step).round_ties_even().max(0.0) as u32).collect()
}

/// Puts configuration and target together, or tells everything that does not fit.
pub fn drafter_shape(config: &Config, written: &Written, target: &TargetFacts) -> Result<DrafterShape, Problems> {
    let drafter = &config.drafter;
    let shape = DrafterShape {
        layers: drafter.layers,
        hidden_size: target.hidden_size,
        intermediate_size: drafter.intermediate_size.unwrap_or(target.intermediate_size),
        heads: drafter.heads.unwrap_or(target.heads),
        kv_heads: drafter.kv_heads.unwrap_or(target.kv_heads),
        head_dim: drafter.head_dim.unwrap_or(target.head_dim),
        block_size: drafter.block_size,
        layer_ids: config.target.layer_ids.clone().unwrap_or_else(|| spread_layer_ids(target.layers, drafter.layers)),
        target_layers: target.layers,
        vocab_rows: target.vocab_rows,
    };
    let mut problems = Vec::new();
    let ids = &shape.layer_ids;
    let last = target.layers.saturating_sub(1);
    if config.target.layer_ids.is_none() && !ids.windows(2).all(|pair| pair[0] < pair[1]) {
        problems.push(written.problem(
            "target.layer_ids",
            format!("a target of {} layers has no {} different layers to tap by the formula", target.layers, ids.len()),
            "list the layers, for example [1, 2], or lower drafter.layers",
        ));
    } else if ids.last().is_some_and(|&id| id >= last) {
        problems.push(written.problem(
            "target.layer_ids",
            format!(
                "layer {} cannot be tapped: the target has layers 0 to {last}, and its last one is never tapped \
                 because engines hand it over normalised",
                ids.last().copied().unwrap_or_default()
            ),
            format!("choose layers below {last}"),
        ));
    }
    if !shape.heads.is_multiple_of(shape.kv_heads.max(1)) {
        problems.push(written.problem(
            if drafter.kv_heads.is_some() { "drafter.kv_heads" } else { "drafter.heads" },
            format!("{} heads cannot be shared among {} heads of keys and values", shape.heads, shape.kv_heads),
            "choose heads as a multiple of kv_heads",
        ));
    }
    if !shape.head_dim.is_multiple_of(2) {
        problems.push(written.problem(
            "drafter.head_dim",
            format!("the target's {} is odd, and rotary positions need an even number", shape.head_dim),
            "choose an even number",
        ));
    }
    if let Some(id) = drafter.mask_token_id.filter(|&id| id >= target.vocab_rows) {
        problems.push(written.problem(
            "drafter.mask_token_id",
            format!("the target's embedding has {} rows, so row {id} does not exist", target.vocab_rows),
            "choose a row that exists and that text never uses, or \"auto\"",
        ));
    }
    if problems.is_empty() { Ok(shape) } else { Err(Problems(problems)) }
}

/// The rule that keeps the pool from stopping for good, for the largest job of a plan.
///
/// A reservation may wait while `min_ready - 1` batches are ready; if it then still finds no room, no draw ever makes
/// any. So `min_ready` of the largest job have to fit.
pub fn pool_problem(config: &Config, written: &Written, largest_job_bytes: u64) -> Option<Problem> {
    let (ready, most) = (config.pool.min_ready, config.pool.max_bytes);
    let needed = u128::from(ready) * u128::from(largest_job_bytes);
    if needed <= u128::from(most.0) {
        return None;
    }
    // Rounded up, so that the remedy suffices.
    let needed = format!("{} MiB", needed.div_ceil(1 << 20));
    let job = super::ByteSize(largest_job_bytes);
    Some(written.problem(
        "pool.max_bytes",
        format!(
            "the run could stop for good: draws wait for pool.min_ready = {ready} batches, the largest takes {job}, and \
             {ready} x {job} = {needed} is more than {most}"
        ),
        format!("raise it to at least {needed}, or lower pool.min_ready, plan.job_tokens or target.feature_dtype"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;

    /// Qwen3-8B: the numbers of its config.json.
    fn qwen3_8b() -> TargetFacts {
        TargetFacts {
            layers: 36,
            hidden_size: 4096,
            intermediate_size: 12288,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab_rows: 151_936,
        }
    }

    fn shape(text: &str, target: &TargetFacts) -> Result<DrafterShape, Problems> {
        let loaded = load_text(text, "x.toml", &[]).unwrap();
        drafter_shape(&loaded.config, &loaded.written, target)
    }

    #[test]
    fn layer_ids_are_those_of_the_published_drafters() {
        for (layers, ids) in [
            (24, [1, 6, 11, 16, 21]),
            (36, [1, 9, 17, 25, 33]),
            (38, [1, 10, 18, 26, 35]),
            (62, [1, 16, 30, 44, 59]),
            (94, [1, 24, 46, 68, 91]),
        ] {
            assert_eq!(spread_layer_ids(layers, 5), ids, "{layers} layers");
        }
        assert_eq!(spread_layer_ids(28, 1), [14]);
    }

    #[test]
    fn the_default_drafter_has_the_published_size() {
        let target = qwen3_8b();
        let shape = shape("", &target).unwrap();
        assert_eq!(shape.layer_ids, [1, 9, 17, 25, 33]);
        assert_eq!(shape.parameters() / 1_000_000, 1_048);
        assert_eq!(shape.feature_bytes_per_token(FeatureDtype::Bf16), 40_960 + 5);
    }

    #[test]
    fn everything_that_does_not_fit_the_target_is_told_at_once() {
        let text = "[target]\nlayer_ids = [1, 35]\n[drafter]\nkv_heads = 5\nmask_token_id = 151936\n";
        let keys: Vec<_> = shape(text, &qwen3_8b()).unwrap_err().0.into_iter().map(|p| (p.line, p.key)).collect();
        let expected = [(2, "target.layer_ids"), (4, "drafter.kv_heads"), (5, "drafter.mask_token_id")];
        assert_eq!(keys, expected.map(|(line, key)| (Some(line), key.to_string())));
    }

    #[test]
    fn a_target_too_shallow_for_the_formula_is_refused() {
        let target = TargetFacts { layers: 6, ..qwen3_8b() };
        let problems = shape("", &target).unwrap_err();
        assert!(problems.to_string().contains("no 5 different layers"), "{problems}");
        assert!(shape("[drafter]\nlayers = 2", &target).is_ok());
    }

    #[test]
    fn a_pool_that_would_stop_for_good_is_refused_with_the_arithmetic() {
        let loaded = load_text("[pool]\nmax_bytes = \"3 GiB\"\nmin_ready = 4", "x.toml", &[]).unwrap();
        let fits = 3 << 28;
        assert_eq!(pool_problem(&loaded.config, &loaded.written, fits), None);
        let problem = pool_problem(&loaded.config, &loaded.written, fits + 1).unwrap().to_string();
        assert!(problem.starts_with("x.toml:2: pool.max_bytes = \"3 GiB\""), "{problem}");
        assert!(
            problem.contains("4 x 805306369 B = 3073 MiB is more than 3 GiB; raise it to at least 3073 MiB"),
            "{problem}"
        );
    }
}
