//! Settings that depend on the target: the drafter's shape, tapped layers, bytes per token, and limits of pool and step.

use super::{
    ByteSize, Config, LayerAttention, Pool, TopK,
    load::Written,
    problem::{Problem, Problems},
};
use crate::hf::{
    config::TargetConfig,
    draft::{DraftConfig, LayerType, default_target_layer_ids},
    head::{Dflash2Config, HeadConfig},
};
use draftmill_actors::{
    messages::engine::FeatureDtype,
    pool::{self, Deadlock, DrawPolicy},
};

/// Bytes of an i32 token id and a u8 loss mask, which the pool stores with the hidden states.
const TOKEN_BYTES: u64 = 5;
/// Bytes of an i32 label and its f32 probability.
const LABEL_BYTES: u64 = 8;
/// Bytes of the length of a row.
pub const ROW_BYTES: u64 = 4;

/// Returns the pool bytes of one real token: `taps` hidden states of `width` values, the id, the loss mask, and the labels
/// from the target: either the given number of labels, or the last hidden state for the whole distribution.
pub fn feature_bytes_per_token(taps: usize, width: usize, dtype: FeatureDtype, labels: Option<TopK>) -> u64 {
    let state = width as u64 * dtype.bytes();
    let label_bytes = match labels {
        None => 0,
        Some(TopK::Tokens(each)) => u64::from(each) * LABEL_BYTES,
        Some(TopK::All) => state,
    };
    taps as u64 * state + TOKEN_BYTES + label_bytes
}

/// Returns the drafter's shape with every "auto" resolved.
///
/// `mask_token_id` is the choice of [`super::mask::mask_token`]; a configured id overrides it.
///
/// # Errors
/// All settings that do not fit the target.
pub fn draft_config(
    config: &Config,
    written: &Written,
    target: &TargetConfig,
    mask_token_id: u32,
) -> Result<DraftConfig, Problems> {
    let drafter = &config.drafter;
    let layers = drafter.layers as usize;
    let or = |given: Option<u32>, target: usize| given.map_or(target, |given| given as usize);
    let ids = match &config.target.layer_ids {
        Some(ids) => ids.iter().map(|&id| id as usize).collect(),
        None => default_target_layer_ids(target.num_hidden_layers, layers),
    };
    let mask = drafter.mask_token_id.unwrap_or(mask_token_id);
    let mut shape = DraftConfig::for_target(target, layers, ids, drafter.block_size as usize, mask);
    shape.head = drafter.head;
    if let Some(kinds) = &drafter.layer_types {
        let kind = |kind: &LayerAttention| match kind {
            LayerAttention::Full => LayerType::Full,
            LayerAttention::Sliding => LayerType::Sliding,
        };
        shape.layer_types = kinds.iter().map(kind).collect();
        shape.sliding_window = shape.slides().then_some(drafter.sliding_window as usize);
        shape.sliding_causal = !shape.slides() || drafter.sliding_causal;
    }
    shape.intermediate_size = or(drafter.intermediate_size, target.intermediate_size);
    shape.num_attention_heads = or(drafter.heads, target.num_attention_heads);
    shape.num_key_value_heads = or(drafter.kv_heads, target.num_key_value_heads);
    shape.head_dim = or(drafter.head_dim, target.head_dim);

    let mut problems = Vec::new();
    problems.extend(layer_problem(config, written, &shape));
    let (heads, kv_heads) = (shape.num_attention_heads, shape.num_key_value_heads);
    if !heads.is_multiple_of(kv_heads.max(1)) {
        problems.push(written.problem(
            if drafter.kv_heads.is_some() { "drafter.kv_heads" } else { "drafter.heads" },
            format!("{heads} attention heads are not divisible by {kv_heads} heads of keys and values"),
            "choose heads as a multiple of kv_heads",
        ));
    }
    if mask as usize >= target.vocab_size {
        problems.push(written.problem(
            "drafter.mask_token_id",
            format!("the target's embedding has {} rows, so row {mask} does not exist", target.vocab_size),
            "choose an existing row that text never uses, or \"auto\"",
        ));
    }
    if matches!(drafter.labels, Some(TopK::Tokens(each)) if each as usize > target.vocab_size) {
        problems.push(written.problem(
            "drafter.label_top_k",
            format!("is more than the {} tokens of the target's vocabulary", target.vocab_size),
            "choose a smaller number, or \"all\"",
        ));
    }
    if let HeadConfig::Dflash2(Dflash2Config { conv_group, selector_top_k, .. }) = shape.head {
        if conv_group > 0 && !shape.hidden_size.is_multiple_of(conv_group) {
            problems.push(written.problem(
                "drafter.conv_group",
                format!("does not divide the target's width of {}", shape.hidden_size),
                "choose a divisor, such as 16",
            ));
        }
        if selector_top_k > target.vocab_size {
            problems.push(written.problem(
                "drafter.selector_top_k",
                format!("is more than the {} tokens of the target's vocabulary", target.vocab_size),
                "choose a smaller number",
            ));
        }
    }
    if problems.is_empty() {
        // Rules of the file format. The checks above report the same mistakes with the keys of this configuration.
        problems.extend(shape.validate().err().map(|error| written.problem("drafter.layers", error.to_string(), "")));
    }
    if problems.is_empty() { Ok(shape) } else { Err(Problems(problems)) }
}

fn layer_problem(config: &Config, written: &Written, shape: &DraftConfig) -> Option<Problem> {
    let (ids, layers) = (&shape.target_layer_ids, shape.num_target_layers);
    let last = layers.saturating_sub(1);
    if config.target.layer_ids.is_none() && !ids.windows(2).all(|pair| pair[0] < pair[1]) {
        return Some(written.problem(
            "target.layer_ids",
            format!("a target of {layers} layers has no {} different layers for the \"auto\" formula", ids.len()),
            "list the layers, for example [1, 2], or lower drafter.layers",
        ));
    }
    let id = ids.iter().find(|&&id| id >= last)?;
    Some(written.problem(
        "target.layer_ids",
        format!(
            "layer {id} cannot be tapped: the target has layers 0 to {last}, and inference engines return the last one \
             normalised"
        ),
        format!("choose layers below {last}"),
    ))
}

/// Returns the problem of a pool that would deadlock with the largest job of a plan.
///
/// A reservation may wait while `min_ready - 1` batches are ready. If it does not fit then, no draw ever frees bytes. Hence
/// `min_ready` batches of the largest job must fit. With draw policy `replay` the next batch to draw may be the last of its
/// window to arrive, so the whole window must fit.
pub fn pool_problem(config: &Config, written: &Written, largest_job_bytes: u64) -> Option<Problem> {
    let settings = pool_settings(config, largest_job_bytes, 0);
    let (job, most, batches) = (ByteSize(largest_job_bytes), config.pool.max_bytes, settings.at_once());
    let (message, remedy) = match settings.deadlock(largest_job_bytes)? {
        Deadlock::LargeBatch => (
            format!("a job of up to {job} never fits into a pool of {most}"),
            format!(
                "raise it to at least {}, or lower plan.job_tokens or target.feature_dtype",
                mebibytes(job.0.into())
            ),
        ),
        // `broken_rules` refuses this case; it does not depend on the job.
        Deadlock::FewBatches => return None,
        Deadlock::FewBytes { needed } => {
            let (name, why) = match config.pool.draw_policy {
                DrawPolicy::Replay => ("pool.replay_window", "the next batch to draw may be the last to arrive of"),
                _ => ("pool.min_ready", "draws wait for"),
            };
            let needed = mebibytes(needed);
            (
                format!(
                    "the run could stop permanently: {why} {name} = {batches} batches, the largest takes {job}, and \
                     {batches} x {job} = {needed} is more than {most}"
                ),
                format!("raise it to at least {needed}, or lower {name}, plan.job_tokens or target.feature_dtype"),
            )
        }
    };
    Some(written.problem("pool.max_bytes", message, remedy))
}

/// Returns the pool's settings for the largest job of a plan. `start_step` is the step of the initial weights.
pub fn pool_settings(config: &Config, largest_job_bytes: u64, start_step: u64) -> pool::Settings {
    let pool = &config.pool;
    pool::Settings {
        max_bytes: pool.max_bytes.0,
        max_batches: pool.max_batches as usize,
        min_ready: pool.min_ready as usize,
        draw_policy: pool.draw_policy,
        replay_window: replay_window(pool, largest_job_bytes) as usize,
        start_step,
        seed: config.run.seed,
    }
}

/// Formats bytes in MiB, rounded up so that the remedy suffices.
fn mebibytes(bytes: u128) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Returns the window of draw policy `replay` in jobs: as configured, or the number of largest jobs that fit.
pub fn replay_window(pool: &Pool, largest_job_bytes: u64) -> u32 {
    let fit = pool.max_bytes.0 / largest_job_bytes.max(1);
    let most = u32::try_from(fit).unwrap_or(u32::MAX).min(pool.max_batches);
    pool.replay_window.or(|| most.max(1))
}

/// Returns the problem of a step with more micro-batches than the whole run has jobs.
pub fn step_problem(config: &Config, written: &Written, jobs_per_epoch: usize) -> Option<Problem> {
    let (accumulation, step) = (u64::from(config.optimizer.accumulation), config.micro_batches_per_step());
    let drafters = step / accumulation;
    let epochs = u64::from(config.run.epochs);
    let jobs = epochs * jobs_per_epoch as u64;
    (step > jobs && jobs > 0).then(|| {
        written.problem(
            "optimizer.accumulation",
            format!(
                "no step would ever be complete: {accumulation} x {drafters} drafters = {step} micro-batches, and the whole \
                 run has {epochs} epochs x {jobs_per_epoch} jobs = {jobs}"
            ),
            match jobs / drafters {
                0 => format!("use at most {jobs} drafters, lower plan.job_tokens to get more jobs, or prepare more data"),
                most => format!("lower it to at most {most}, or lower plan.job_tokens to get more jobs"),
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_text;
    use serde_json::json;

    /// Values of Qwen3-8B's config.json.
    fn qwen3_8b(layers: usize) -> TargetConfig {
        TargetConfig::from_json(&json!({
            "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": layers,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
            "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "tie_word_embeddings": false, "eos_token_id": 151_645
        }))
        .unwrap()
    }

    fn shape(text: &str, target: &TargetConfig) -> Result<DraftConfig, Problems> {
        let loaded = load_text(text, "x.toml", &[]).unwrap();
        draft_config(&loaded.config, &loaded.written, target, 151_669)
    }

    #[test]
    fn the_default_drafter_is_the_published_one() {
        let shape = shape("", &qwen3_8b(36)).unwrap();
        assert_eq!(shape.target_layer_ids, [1, 9, 17, 25, 33]);
        assert_eq!(shape.mask_token_id, 151_669);
        let parameters: usize = shape.tensor_shapes().values().map(|dims| dims.iter().product::<usize>()).sum();
        assert_eq!(parameters / 1_000_000, 1_048);
        assert_eq!(feature_bytes_per_token(5, 4096, FeatureDtype::Bf16, None), 40_960 + 5);
        assert_eq!(feature_bytes_per_token(5, 4096, FeatureDtype::Bf16, Some(TopK::Tokens(3))), 40_960 + 29);
        assert_eq!(feature_bytes_per_token(5, 4096, FeatureDtype::Bf16, Some(TopK::All)), 6 * 8192 + 5);
    }

    #[test]
    fn given_sizes_win_over_the_targets() {
        let text = "[drafter]\nheads = 16\nkv_heads = 4\nhead_dim = 64\nintermediate_size = 100\nmask_token_id = 9";
        let shape = shape(text, &qwen3_8b(36)).unwrap();
        assert_eq!((shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim), (16, 4, 64));
        assert_eq!((shape.intermediate_size, shape.mask_token_id), (100, 9));
    }

    #[test]
    fn all_misfits_with_the_target_are_reported_at_once() {
        let text = "[target]\nlayer_ids = [1, 35]\n[drafter]\nkv_heads = 5\nmask_token_id = 151936\n";
        let keys: Vec<_> = shape(text, &qwen3_8b(36)).unwrap_err().0.into_iter().map(|p| (p.line, p.key)).collect();
        let expected = [(2, "target.layer_ids"), (4, "drafter.kv_heads"), (5, "drafter.mask_token_id")];
        assert_eq!(keys, expected.map(|(line, key)| (Some(line), key.to_string())));
    }

    #[test]
    fn a_target_too_shallow_for_the_formula_is_refused() {
        let problems = shape("", &qwen3_8b(6)).unwrap_err();
        assert!(problems.to_string().contains("no 5 different layers"), "{problems}");
        assert!(shape("[drafter]\nlayers = 2", &qwen3_8b(6)).is_ok());
    }

    #[test]
    fn a_pool_that_would_deadlock_is_refused() {
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

    #[test]
    fn a_job_larger_than_the_pool_is_refused() {
        let loaded = load_text("[pool]\nmax_bytes = \"1 GiB\"\nmin_ready = 1", "x.toml", &[]).unwrap();
        assert_eq!(pool_problem(&loaded.config, &loaded.written, 1 << 30), None);
        let problem = pool_problem(&loaded.config, &loaded.written, (1 << 30) + 1).unwrap().to_string();
        assert!(problem.contains("a job of up to 1073741825 B never fits into a pool of 1 GiB"), "{problem}");
        assert!(problem.contains("raise it to at least 1025 MiB"), "{problem}");
    }

    #[test]
    fn a_replay_window_larger_than_the_pool_is_refused() {
        let replay = |window: &str| {
            let text = format!("[pool]\nmax_bytes = \"2 GiB\"\ndraw_policy = \"replay\"\nmin_ready = 16\n{window}");
            load_text(&text, "x.toml", &[]).unwrap()
        };
        let loaded = replay("replay_window = 8");
        // min_ready has no effect.
        assert_eq!(pool_problem(&loaded.config, &loaded.written, 1 << 28), None);
        let problem = pool_problem(&loaded.config, &loaded.written, (1 << 28) + 1).unwrap().to_string();
        assert!(problem.contains("8 x 268435457 B = 2049 MiB is more than 2 GiB"), "{problem}");
        assert!(problem.contains("or lower pool.replay_window"), "{problem}");
        let auto = replay("");
        for (largest, window) in [(1, 16), (1 << 28, 8), (1 << 30, 2), (1 << 31, 1)] {
            assert_eq!(replay_window(&auto.config.pool, largest), window, "{largest}");
            assert_eq!(pool_problem(&auto.config, &auto.written, largest), None);
        }
    }

    #[test]
    fn a_step_that_never_completes_is_refused() {
        let text = "[run]\nepochs = 3\n[drafter]\ndevices = [\"cpu\", \"cpu\"]\n[optimizer]\naccumulation = 8";
        let loaded = load_text(text, "x.toml", &[]).unwrap();
        assert_eq!(step_problem(&loaded.config, &loaded.written, 6), None);
        let problem = step_problem(&loaded.config, &loaded.written, 5).unwrap().to_string();
        assert!(problem.starts_with("x.toml:6: optimizer.accumulation = 8"), "{problem}");
        let arithmetic = "8 x 2 drafters = 16 micro-batches, and the whole run has 3 epochs x 5 jobs = 15";
        assert!(problem.contains(arithmetic) && problem.contains("lower it to at most 7"), "{problem}");
    }
}
