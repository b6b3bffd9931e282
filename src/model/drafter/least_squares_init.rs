//! Least-squares initialisation of the drafter from the target's hidden states (`docs/dflash.md#initial-weights`).
//!
//! Random weights spend about a thousand steps on learning to attend to the anchor and to the newest context. Here the
//! first layer copies the anchor's embedding `e` to every slot of its block, and the second layer copies the context
//! feature `c` of the newest token before it. Two matrices map both to the target's last hidden state at the anchor: `A
//! e + C c` is the ridge regression of that state.
//!
//! The first drafted token is then right about as often as a linear map allows. The rest is left to training, and so is
//! one third of the heads.

use super::Shared;
use super::anchors::candidates;
use crate::hf::draft::{DraftConfig, layer_weight};
use crate::model::ModelError;
use crate::model::ops::rms_norm;
use crate::model::params::ParamSet;
use tch::{Device, Kind, Tensor};

/// Ridge of the regression, relative to the mean square of an input.
const RIDGE: f64 = 0.02;
/// Factor on the random weights that are kept next to the fitted ones.
const RANDOM_SCALE: f64 = 0.3;
/// Ratio of the fitted part of a key or query to the random part.
const FITTED_RATIO: f64 = 8.0;
/// Logit range between newest and oldest token in the second layer's attention.
const SHARPNESS: f64 = 40.0;
/// Limit on the anchors whose slots determine the second layer's keys.
const MAX_SLOTS: usize = 8192;

/// Regression sums over anchors, in fp64 on the CPU.
pub struct LeastSquaresInit<'a> {
    config: &'a DraftConfig,
    shared: &'a Shared,
    /// Random initial weights, modified in place.
    start: ParamSet,
    /// Weight of the target's final norm.
    norm: Tensor,
    /// Initial residual of a slot: the mask token's embedding.
    mask: Tensor,
    /// Sum of input outer products, with inputs `[e, c]` of one anchor, `[2 D, 2 D]`; sum of inputs times outputs, `[2
    /// D, D]`.
    inputs: Tensor,
    outputs: Tensor,
    /// Sum of the inputs, `[2 D]`.
    sum: Tensor,
    anchors: Vec<i64>,
}

impl<'a> LeastSquaresInit<'a> {
    /// Starts from the random weights `start` of `config`; `norm [D]` is the weight of the target's final norm.
    ///
    /// # Errors
    /// `ModelError::Input` if the drafter has fewer than two layers; otherwise if libtorch fails.
    pub fn new(
        config: &'a DraftConfig,
        shared: &'a Shared,
        start: ParamSet,
        norm: &Tensor,
    ) -> Result<LeastSquaresInit<'a>, ModelError> {
        let _no_grad = tch::no_grad_guard();
        if config.num_hidden_layers < 2 {
            return Err(ModelError::Input("least-squares initialisation needs a drafter of two layers or more".into()));
        }
        let width = config.hidden_size as i64;
        let mut start = start;
        // The last tap passes through unchanged; the other taps and the random part are scaled by 0.2.
        let newest = (0..config.target_layer_ids.len()).max_by_key(|&tap| config.target_layer_ids[tap]).unwrap_or(0);
        let fc = start.need_mut("fc.weight")?.f_mul_scalar_(0.2)?;
        let eye = Tensor::f_eye(width, (Kind::Float, Device::Cpu))?;
        let _ = fc.f_narrow(1, newest as i64 * width, width)?.f_add_(&eye)?;
        let zeros = |size: &[i64]| Tensor::f_zeros(size, (Kind::Double, Device::Cpu));
        let mask = to_f64(&shared.embedding.f_get(config.mask_token_id.into())?)?;
        Ok(LeastSquaresInit {
            config,
            shared,
            start,
            norm: to_f64(norm)?,
            mask,
            inputs: zeros(&[2 * width, 2 * width])?,
            outputs: zeros(&[2 * width, width])?,
            sum: zeros(&[2 * width])?,
            anchors: Vec::new(),
        })
    }

    /// Number of anchors so far.
    pub fn anchors(&self) -> usize {
        self.anchors.len()
    }

    /// Adds one row: ids, loss mask, tapped hidden states `[tokens, taps * D]` and final normed states `[tokens, D]` of
    /// the target.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn add(&mut self, ids: &[i32], loss_mask: &[u8], taps: &Tensor, last: &Tensor) -> Result<(), ModelError> {
        let _no_grad = tch::no_grad_guard();
        // The newest context of a block is the token before its anchor.
        let at: Vec<i64> = candidates(loss_mask).into_iter().filter(|&a| a > 0).map(i64::from).collect();
        if at.is_empty() {
            return Ok(());
        }
        let tokens: Vec<i64> = at.iter().map(|&a| i64::from(ids[a as usize])).collect();
        let positions = Tensor::f_from_slice(&at)?;
        let before = positions.f_sub_scalar(1)?.f_to(taps.device())?;
        let fc = to_f64(self.start.need("fc.weight")?)?;
        let context = self.unit(&to_f64(&taps.f_index_select(0, &before)?)?.f_mm(&fc.f_transpose(0, 1)?)?)?;
        let x = Tensor::f_cat(&[self.embedded(&tokens)?, context], 1)?;
        let y = to_f64(&last.f_index_select(0, &positions.f_to(last.device())?)?)?;
        let y = y.f_div(&self.scale()?)?.f_sub(&self.mask)?;
        let transposed = x.f_transpose(0, 1)?;
        let _ = self.inputs.f_addmm_(&transposed, &x)?;
        let _ = self.outputs.f_addmm_(&transposed, &y)?;
        self.sum = self.sum.f_add(&x.f_sum_dim_intlist(&[0i64][..], false, Kind::Double)?)?;
        self.anchors.extend(tokens);
        Ok(())
    }

    /// Solves the regression and returns the initial weights.
    ///
    /// # Errors
    /// `ModelError::Input` if no row had an anchor; otherwise if libtorch fails.
    pub fn finish(mut self) -> Result<ParamSet, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let (config, width) = (self.config, self.config.hidden_size as i64);
        if self.anchors.is_empty() {
            return Err(ModelError::Input(
                "no sample has a position where a block could start, so least-squares initialisation has no data"
                    .into(),
            ));
        }
        let count = self.anchors.len() as f64;
        let inputs = self.inputs.f_div_scalar(count)?;
        let mean = self.sum.f_div_scalar(count)?;
        let map = ridge(&inputs, &self.outputs.f_div_scalar(count)?, RIDGE)?.f_transpose(0, 1)?;
        let (of_anchor, of_context) = (map.f_narrow(1, 0, width)?, map.f_narrow(1, width, width)?);
        let block = |from: i64| inputs.f_narrow(0, from, width)?.f_narrow(1, from, width);
        let (anchors, context) = (
            Moments { square: block(0)?, mean: mean.f_narrow(0, 0, width)? },
            Moments { square: block(width)?, mean: mean.f_narrow(0, width, width)? },
        );
        let mask = Moments::of(&self.unit(&self.mask.f_unsqueeze(0)?)?)?;

        // First layer: mask tokens attend to anchors, not to mask tokens or context.
        let half = config.head_dim / 2;
        self.set_attention(
            0,
            &mask.mean.f_div(&mask.mean.f_dot(&mask.mean)?)?,
            &discriminant(&anchors, &[&mask, &context])?,
            &(3 * half / 4..half).collect::<Vec<_>>(),
        )?;
        self.set_values(0, &of_anchor, &anchors.square)?;
        // Second layer: every slot attends to the newest context token.
        let anchor_ids = &self.anchors[..self.anchors.len().min(MAX_SLOTS)];
        let carried = self.embedded(anchor_ids)?.f_mm(&of_anchor.f_transpose(0, 1)?)?;
        let slots = self.unit(&carried.f_add(&self.mask)?)?;
        let own = self.unit(&carried.f_add(&to_f64(&self.rows(anchor_ids)?)?)?)?;
        let (slots, own) = (Moments::of(&slots)?, Moments::of(&own)?);
        let pairs = position_pairs(config);
        self.set_attention(
            1,
            &ridge(&slots.square, &slots.mean.f_unsqueeze(1)?, 0.05)?.f_squeeze_dim(1)?,
            &discriminant(&context, &[&slots, &own])?,
            &pairs,
        )?;
        let factor = (SHARPNESS / (config.head_dim as f64).sqrt()).sqrt();
        for name in ["self_attn.q_norm", "self_attn.k_norm"] {
            let norm = self.start.need_mut(&layer_weight(1, name))?;
            for dim in pairs.iter().flat_map(|&pair| [pair, pair + half]) {
                let _ = norm.f_get(dim as i64)?.f_fill_(factor)?;
            }
        }
        self.set_values(1, &of_context, &context.square)?;
        for layer in 0..config.num_hidden_layers {
            let scaled = if layer < 2 { &["mlp.down_proj"][..] } else { &["mlp.down_proj", "self_attn.o_proj"][..] };
            for name in scaled {
                let _ = self.start.need_mut(&layer_weight(layer, name))?.f_mul_scalar_(0.1)?;
            }
        }
        // A regression underestimates the length of its target by what it cannot explain; the final norm would hide
        // that.
        let length = self.length(&map, &inputs, &mean)?;
        let scale = self.scale()?.f_mul_scalar(length)?;
        self.start.need_mut("norm.weight")?.f_copy_(&scale)?;
        Ok(self.start)
    }

    /// Ratio of the root mean square of the predicted states to that of the target's.
    fn length(&self, map: &Tensor, inputs: &Tensor, mean: &Tensor) -> Result<f64, ModelError> {
        let square = map.f_mm(inputs)?.f_mul(map)?.f_sum(Kind::Double)?;
        let cross = map.f_mv(mean)?.f_dot(&self.mask)?.f_mul_scalar(2.0)?;
        let total = square.f_add(&cross)?.f_add(&self.mask.f_dot(&self.mask)?)?.f_double_value(&[])?;
        Ok((total.max(0.0) / self.config.hidden_size as f64).sqrt())
    }

    /// Sets queries `[D]` and keys `[D]` of a layer on the rotary pairs `pairs` of all fitted heads.
    fn set_attention(&mut self, layer: usize, query: &Tensor, key: &Tensor, pairs: &[usize]) -> Result<(), ModelError> {
        let config = self.config;
        let (dim, half) = (config.head_dim, config.head_dim / 2);
        let mut direction = vec![0.0; dim];
        for &pair in pairs {
            (direction[pair], direction[pair + half]) = (1.0, 1.0);
        }
        let norm = (2.0 * pairs.len() as f64).sqrt();
        let strength = FITTED_RATIO * RANDOM_SCALE * 0.02 * ((config.hidden_size * dim) as f64).sqrt();
        let direction = Tensor::f_from_slice(&direction)?.f_mul_scalar(strength / norm)?.f_unsqueeze(1)?;
        let kv = fitted_kv_heads(config);
        let group = config.num_attention_heads / config.num_key_value_heads;
        for (name, heads, of) in [("self_attn.q_proj", kv * group, query), ("self_attn.k_proj", kv, key)] {
            let fitted = direction.f_mm(&of.f_unsqueeze(0)?)?.f_repeat([heads as i64, 1])?;
            let rest = self.start.need_mut(&layer_weight(layer, name))?.f_mul_scalar_(RANDOM_SCALE)?;
            let _ = rest.f_narrow(0, 0, (heads * dim) as i64)?.f_add_(&fitted.f_to_kind(Kind::Float)?)?;
        }
        Ok(())
    }

    /// Sets values and outputs of a layer that add `map x` of the attended tokens, with mean square `square [D, D]`. If
    /// the heads cannot hold all directions, keeps those with the largest variance.
    fn set_values(&mut self, layer: usize, map: &Tensor, square: &Tensor) -> Result<(), ModelError> {
        let config = self.config;
        let (dim, kv) = (config.head_dim as i64, fitted_kv_heads(config) as i64);
        let group = (config.num_attention_heads / config.num_key_value_heads) as i64;
        let (width, kept) = (config.hidden_size as i64, (kv * dim).min(config.hidden_size as i64));
        let spread = map.f_mm(square)?.f_mm(&map.f_transpose(0, 1)?)?;
        let (_, axes) = spread.f_linalg_eigh("L")?;
        let axes = axes.f_narrow(1, width - kept, kept)?;
        let values = axes.f_transpose(0, 1)?.f_mm(map)?.f_to_kind(Kind::Float)?;
        let into = self.start.need_mut(&layer_weight(layer, "self_attn.v_proj"))?;
        into.f_narrow(0, 0, kept)?.f_copy_(&values)?;
        let _ = into.f_narrow(0, kept, kv * dim - kept)?.f_zero_()?;
        // Each query head of a group contributes an equal fraction of the same values.
        let pad = Tensor::f_zeros([width, kv * dim - kept], (Kind::Double, Device::Cpu))?;
        let outputs =
            Tensor::f_cat(&[axes, pad], 1)?.f_view([width, kv, 1, dim])?.f_expand([width, kv, group, dim], false)?;
        let outputs =
            outputs.f_reshape([width, kv * group * dim])?.f_div_scalar(group as f64)?.f_to_kind(Kind::Float)?;
        let into = self.start.need_mut(&layer_weight(layer, "self_attn.o_proj"))?;
        into.f_narrow(1, 0, kv * group * dim)?.f_copy_(&outputs)?;
        Ok(())
    }

    fn rows(&self, tokens: &[i64]) -> Result<Tensor, ModelError> {
        let table = &self.shared.embedding;
        Ok(table.f_index_select(0, &Tensor::f_from_slice(tokens)?.f_to(table.device())?)?)
    }

    /// Normed embeddings of tokens, as a layer sees them.
    fn embedded(&self, tokens: &[i64]) -> Result<Tensor, ModelError> {
        self.unit(&to_f64(&self.rows(tokens)?)?)
    }

    fn unit(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        rms_norm(x, &Tensor::f_ones([x.size()[1]], (Kind::Double, Device::Cpu))?, self.config.rms_norm_eps)
    }

    /// Weight of the final norm with its smallest entries raised, as it is a divisor.
    fn scale(&self) -> Result<Tensor, ModelError> {
        let size = self.norm.f_abs()?;
        let least = size.f_mean(Kind::Double)?.f_mul_scalar(0.2)?;
        let sign = self.norm.f_ge(0.0)?.f_to_kind(Kind::Double)?.f_mul_scalar(2.0)?.f_sub_scalar(1.0)?;
        Ok(size.f_maximum(&least)?.f_mul(&sign)?)
    }
}

/// Number of fitted key heads; the others stay random.
fn fitted_kv_heads(config: &DraftConfig) -> usize {
    let heads = config.num_key_value_heads;
    heads - heads / 3
}

/// Rotary pairs whose wavelength exceeds a block's reach but still separates its positions.
fn position_pairs(config: &DraftConfig) -> Vec<usize> {
    let half = config.head_dim / 2;
    let wave = |pair: usize| config.rope_theta.powf(-(pair as f64) / half as f64);
    let pairs: Vec<usize> = (0..half).filter(|&pair| (0.008..0.5).contains(&wave(pair))).collect();
    if pairs.is_empty() { (0..half).collect() } else { pairs }
}

/// Second moment `[D, D]` and mean `[D]` of one class of vectors.
struct Moments {
    square: Tensor,
    mean: Tensor,
}

impl Moments {
    fn of(x: &Tensor) -> Result<Moments, ModelError> {
        let count = x.size()[0] as f64;
        Ok(Moments {
            square: x.f_transpose(0, 1)?.f_mm(x)?.f_div_scalar(count)?,
            mean: x.f_mean_dim(&[0i64][..], false, Kind::Double)?,
        })
    }
}

/// Linear functional `[D]` that is nearest to 1 on one class of vectors and to -1 on the others.
fn discriminant(one: &Moments, others: &[&Moments]) -> Result<Tensor, ModelError> {
    let (mut square, mut mean) = (one.square.copy(), one.mean.copy());
    for other in others {
        square = square.f_add(&other.square)?;
        mean = mean.f_sub(&other.mean)?;
    }
    Ok(ridge(&square, &mean.f_unsqueeze(1)?, 1e-3)?.f_squeeze_dim(1)?)
}

/// `(square + ridge I)^-1 target`.
fn ridge(square: &Tensor, target: &Tensor, ridge: f64) -> Result<Tensor, ModelError> {
    let eye = Tensor::f_eye(square.size()[0], (Kind::Double, Device::Cpu))?;
    Ok(Tensor::f_linalg_solve(&square.f_add(&eye.f_mul_scalar(ridge)?)?, target, true)?)
}

fn to_f64(x: &Tensor) -> Result<Tensor, ModelError> {
    Ok(x.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::config::TargetConfig;
    use crate::model::batch::Packed;
    use crate::model::drafter::anchors::Anchors;
    use crate::model::drafter::{DraftOptions, Drafter};
    use crate::model::ops::argmax;
    use crate::model::params::init_params;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const WIDTH: i64 = 48;
    const VOCAB: i64 = 200;

    fn config() -> DraftConfig {
        let target = serde_json::json!({
            "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 9, "head_dim": 16,
            "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": VOCAB, "max_position_embeddings": 128,
            "rope_theta": 10000.0,
        });
        DraftConfig::for_target(&TargetConfig::from_json(&target).unwrap(), 2, vec![1, 7], 4, 199)
    }

    /// Values of mean 0 and variance 1. (libtorch's generator is shared by all tests of the process.)
    fn noise(rng: &mut ChaCha8Rng, size: &[i64]) -> Tensor {
        let count: i64 = size.iter().product();
        let values: Vec<f64> = (0..count).map(|_| rng.random_range(-1.0..1.0) * 3f64.sqrt()).collect();
        Tensor::from_slice(&values).reshape(size)
    }

    fn unit(x: &Tensor) -> Tensor {
        rms_norm(x, &Tensor::ones([x.size()[1]], (Kind::Double, Device::Cpu)), 1e-6).unwrap()
    }

    /// Target whose last hidden state is linear in the last token and in the newest tap, up to its length. Vectors of
    /// one class share a direction, as in real models.
    struct Linear {
        embedding: Tensor,
        norm: Tensor,
        of_anchor: Tensor,
        of_context: Tensor,
        shared: [Tensor; 2],
    }

    impl Linear {
        fn new(rng: &mut ChaCha8Rng) -> Linear {
            let mut normal = |size: &[i64]| noise(rng, size);
            let embedding = (normal(&[VOCAB, WIDTH]) + normal(&[1, WIDTH])) * 0.1;
            Linear {
                embedding,
                norm: normal(&[WIDTH]).abs() + 0.5,
                of_anchor: normal(&[WIDTH, WIDTH]) * 0.1,
                of_context: normal(&[WIDTH, WIDTH]) * 0.1,
                shared: [normal(&[1, WIDTH]), normal(&[1, WIDTH])],
            }
        }

        /// Ids, taps and last hidden states of one row.
        fn row(&self, rng: &mut ChaCha8Rng, tokens: i64) -> (Vec<i32>, Tensor, Tensor) {
            let ids: Vec<i64> = (0..tokens).map(|_| rng.random_range(0..VOCAB - 1)).collect();
            let ids = Tensor::from_slice(&ids);
            let [first, second] = [0, 1].map(|tap| noise(rng, &[tokens, WIDTH]) + &self.shared[tap]);
            let anchor = unit(&self.embedding.index_select(0, &ids)).mm(&self.of_anchor.transpose(0, 1));
            let context = unit(&second).mm(&self.of_context.transpose(0, 1)).roll([1], [0]);
            let last = unit(&(anchor + context + self.embedding.get(199))) * &self.norm;
            let ids = Vec::<i64>::try_from(ids).unwrap().into_iter().map(|id| id as i32).collect();
            (ids, Tensor::cat(&[first, second], 1).to_kind(Kind::Float), last.to_kind(Kind::Float))
        }
    }

    /// Fraction of anchors whose first slot predicts the same token as the target.
    fn accuracy(config: &DraftConfig, target: &Linear, rng: &mut ChaCha8Rng, params: ParamSet) -> f64 {
        let head = target.embedding.to_kind(Kind::Float);
        let shared = Shared { embedding: head.copy(), head: head.copy() };
        let mut drafter = Drafter::new(config.clone(), shared, DraftOptions::new(Device::Cpu)).unwrap();
        drafter.load_weights(params).unwrap();
        let (ids, taps, last) = target.row(rng, 120);
        let anchors: Vec<u32> = (1..119).collect();
        let (mask, lengths) = ([1; 120], [120]);
        let batch = Packed::of_ids(&taps, &ids, &mask, &lengths);
        let hidden = drafter.hidden(&batch, &Anchors { rows: vec![anchors] }).unwrap();
        let first = hidden.reshape([118, config.block_size as i64, WIDTH]).select(1, 1);
        let prediction = |x: &Tensor| argmax(&x.mm(&head.transpose(0, 1))).unwrap();
        let same = prediction(&first).eq_tensor(&prediction(&last.narrow(0, 1, 118)));
        f64::try_from(same.to_kind(Kind::Double).mean(Kind::Double)).unwrap()
    }

    #[test]
    fn a_linear_target_is_predicted_before_the_first_step() {
        let rng = &mut ChaCha8Rng::seed_from_u64(5);
        let (config, target) = (config(), Linear::new(rng));
        let start = || init_params(&config, 3).unwrap();
        let embedding = target.embedding.to_kind(Kind::Float);
        let shared = Shared { head: embedding.copy(), embedding };
        let mut init = LeastSquaresInit::new(&config, &shared, start(), &target.norm).unwrap();
        for _ in 0..20 {
            let (ids, taps, last) = target.row(rng, 120);
            init.add(&ids, &[1; 120], &taps, &last).unwrap();
        }
        // The first token has no context before it, and nothing is supervised after the last one.
        assert_eq!(init.anchors(), 20 * 118);
        let fitted = init.finish().unwrap();
        assert_eq!(fitted.names(), start().names());
        let (random, fitted) = (accuracy(&config, &target, rng, start()), accuracy(&config, &target, rng, fitted));
        assert!(random < 0.1 && fitted > 0.7, "accuracy: random weights {random}, fitted weights {fitted}");
    }

    #[test]
    fn one_layer_or_no_anchor_is_an_error() {
        let rng = &mut ChaCha8Rng::seed_from_u64(6);
        let (one, target) = (DraftConfig { num_hidden_layers: 1, ..config() }, Linear::new(rng));
        let shared = Shared { head: target.embedding.copy(), embedding: target.embedding.copy() };
        let start = || init_params(&config(), 3).unwrap();
        let error = LeastSquaresInit::new(&one, &shared, start(), &target.norm).err().unwrap().to_string();
        assert!(error.contains("two layers"), "{error}");
        let config = config();
        let mut init = LeastSquaresInit::new(&config, &shared, start(), &target.norm).unwrap();
        let (ids, taps, last) = target.row(rng, 3);
        init.add(&ids, &[0, 1, 0], &taps, &last).unwrap();
        assert!(init.finish().err().unwrap().to_string().contains("has no data"));
    }
}
