//! Tiny targets, and drafters with an accuracy that the test sets.

use draftmill::hf::config::TargetConfig;
use draftmill::hf::draft::{DraftConfig, LayerType};
use draftmill::hf::head::{ConfidenceInput, Dflash2Config, DsparkConfig, HeadConfig, MarkovKind};
use draftmill::hf::tensors::{RawDtype, TensorFiles};
use draftmill::inference::{ContextCache, Draw, Proposal, Proposer};
use draftmill::model::ModelError;
use draftmill::model::batch::Packed;
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::drafter::{DraftOptions, Drafter, Shared};
use draftmill::model::params::{ParamSet, init_params, load_params};
use draftmill::model::target::{Depth, Target};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use safetensors::tensor::TensorView;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use tch::{Device, Kind, Tensor};

pub struct World {
    pub target: Target,
    files: TensorFiles,
    seed: u64,
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

impl World {
    pub fn golden(name: &str) -> World {
        World::load(&golden(name), 0)
    }

    /// Weights large enough that the text depends on what came before it.
    pub fn random(seed: u64, vocab: usize) -> World {
        let value = serde_json::json!({
            "model_type": "qwen3", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 128,
            "rope_theta": 1000.0, "dtype": "float32",
        });
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let shapes = TargetConfig::from_json(&value).unwrap().tensor_shapes();
        let bytes: Vec<_> = shapes
            .iter()
            .map(|(name, shape)| {
                let one = if shape.len() == 1 { 1.0 } else { 0.0 };
                let values = (0..shape.iter().product()).map(|_| one + rng.random_range(-0.6f32..0.6));
                (name, shape, values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            ((*name).clone(), TensorView::new(RawDtype::F32, (*shape).clone(), bytes).unwrap())
        });
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: Vec<u8>| std::fs::write(folder.path().join(name), bytes).unwrap();
        write("model.safetensors", safetensors::serialize(views, None).unwrap());
        write("config.json", value.to_string().into_bytes());
        World::load(folder.path(), seed)
    }

    fn load(folder: &Path, seed: u64) -> World {
        // Threads slow operations of this size down.
        tch::set_num_threads(1);
        let files = TensorFiles::open(folder).unwrap();
        let config = TargetConfig::load(folder).unwrap();
        let target = Target::load(config, &files, Depth::Whole, Kind::Float, Device::Cpu).unwrap();
        World { target, files, seed }
    }

    pub fn vocab(&self) -> usize {
        self.target.config().vocab_size
    }

    /// Prompts of one token, of less than a block, and longer.
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed + 100);
        let mut prompt = |len: usize| (0..len).map(|_| rng.random_range(0..self.vocab() as u32)).collect();
        [1, 2, 3, 11].map(&mut prompt).to_vec()
    }

    /// Drafter with random weights of the same scale.
    pub fn drafter(&self, block_size: usize, sliding: bool, mask_token_id: u32) -> Drafter {
        self.drafter_with(HeadConfig::Dflash, block_size, sliding, mask_token_id)
    }

    /// Drafter with a head whose own weights are random too, unlike those at the start of training.
    pub fn drafter_with(&self, head: HeadConfig, block_size: usize, sliding: bool, mask_token_id: u32) -> Drafter {
        let mut config = DraftConfig::for_target(self.target.config(), 2, vec![2, 0], block_size, mask_token_id);
        if sliding {
            config.layer_types[1] = LayerType::Sliding;
            config.sliding_window = Some(4);
            config.sliding_causal = self.seed.is_multiple_of(2);
        }
        config.head = head;
        let pairs = init_params(&config, self.seed).unwrap().into_pairs();
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed + 7);
        let scaled = pairs.into_iter().map(|(name, x)| {
            if x.abs().max().double_value(&[]) == 0.0 {
                let values: Vec<f32> = (0..x.numel()).map(|_| rng.random_range(-0.6f32..0.6)).collect();
                return (name, Tensor::from_slice(&values).reshape(x.size()));
            }
            (name, if x.dim() == 1 { x } else { x * 12.0 })
        });
        self.with(config, ParamSet::new(scaled.collect()))
    }

    pub fn golden_drafter(&self) -> Drafter {
        let config = DraftConfig::load(&golden("drafter")).unwrap();
        let weights = load_params(&config, &TensorFiles::open(&golden("drafter")).unwrap()).unwrap();
        self.with(config, weights)
    }

    fn with(&self, config: DraftConfig, weights: ParamSet) -> Drafter {
        let shared = Shared::load(self.target.config(), &self.files, Kind::Float, Device::Cpu).unwrap();
        let mut drafter = Drafter::new(config, shared, DraftOptions::new(Device::Cpu)).unwrap();
        drafter.load_weights(weights).unwrap();
        drafter
    }
}

/// Each head, with small settings.
pub fn heads() -> Vec<HeadConfig> {
    let dspark = |markov, rank, confidence| HeadConfig::Dspark(DsparkConfig { markov, rank, confidence });
    vec![
        HeadConfig::Dflash,
        dspark(MarkovKind::Vanilla, 6, Some(ConfidenceInput::HiddenAndMarkov)),
        dspark(MarkovKind::Gated, 6, Some(ConfidenceInput::Hidden)),
        dspark(MarkovKind::Rnn, 6, None),
        dspark(MarkovKind::Vanilla, 0, None),
        HeadConfig::Dflash2(Dflash2Config { conv_taps: 2, conv_group: 8, selector_rank: 5, selector_top_k: 3 }),
    ]
}

/// Drafter that knows the text. `right` maps the anchor's position in the response to the number of correct tokens. An
/// optional real drafter drafts every block in three ways, which must agree.
pub struct Scripted<'a, F: Fn(usize) -> usize> {
    world: &'a World,
    prompt: Vec<u32>,
    truth: Vec<u32>,
    size: usize,
    right: F,
    checked: Option<Drafter>,
    /// Blocks that were drafted in three ways.
    pub compared: Cell<usize>,
}

/// Context so far, and the real drafter's cache.
pub struct Memory {
    context: Tensor,
    cached: Option<ContextCache>,
}

impl<'a, F: Fn(usize) -> usize> Scripted<'a, F> {
    pub fn new(world: &'a World, prompt: &[u32], truth: &[u32], size: usize, right: F) -> Self {
        let (prompt, truth) = (prompt.to_vec(), truth.to_vec());
        Scripted { world, prompt, truth, size, right, checked: None, compared: Cell::new(0) }
    }

    pub fn checked(world: &'a World, prompt: &[u32], truth: &[u32], drafter: Drafter, right: F) -> Self {
        let size = drafter.config().block_size;
        Scripted { checked: Some(drafter), ..Scripted::new(world, prompt, truth, size, right) }
    }

    fn compare(&self, drafter: &Drafter, memory: &mut Memory, fresh: &Tensor, last: u32) {
        let cached = drafter.draft_cached(memory.cached.as_mut().unwrap(), fresh, last).unwrap();
        super::close("without a cache", &cached, &drafter.draft_block(&memory.context, last).unwrap());
        // The training form has the whole text, and must not use tokens after its anchor.
        let text: Vec<i32> = self.prompt.iter().chain(&self.truth).map(|&id| id as i32).collect();
        let (mask, lengths) = (vec![1; text.len()], [text.len() as u32]);
        let hidden = self.world.target.extend(&mut self.world.target.cache(), &text, self.taps()).unwrap().taps;
        let packed = Packed::of_ids(&hidden, &text, &mask, &lengths);
        let anchors = Anchors { rows: vec![vec![memory.context.size()[0] as u32]] };
        super::close("as it trains", &cached, &drafter.hidden(&packed, &anchors).unwrap());
        assert_eq!(memory.cached.as_ref().unwrap().len(), memory.context.size()[0]);
        self.compared.set(self.compared.get() + 1);
    }
}

impl<F: Fn(usize) -> usize> Proposer for Scripted<'_, F> {
    type Cache = Memory;

    fn taps(&self) -> &[usize] {
        &[2, 0]
    }

    fn begin(&self) -> Result<Memory, ModelError> {
        let width = 2 * self.world.target.config().hidden_size as i64;
        let cached = self.checked.as_ref().map(Proposer::begin).transpose()?;
        Ok(Memory { context: Tensor::zeros([0, width], (Kind::Float, Device::Cpu)), cached })
    }

    fn propose(
        &self,
        memory: &mut Memory,
        context: &Tensor,
        last: u32,
        limit: usize,
        draw: Draw<'_>,
    ) -> Result<Proposal, ModelError> {
        memory.context = Tensor::cat(&[&memory.context, context], 0);
        let at = memory.context.size()[0] as usize - self.prompt.len();
        assert_eq!(last, self.truth[at], "the anchor follows the context");
        if let Some(drafter) = &self.checked {
            self.compare(drafter, memory, context, last);
        }
        let vocab = self.world.vocab();
        let slots = (1..self.size).map(|slot| {
            let true_id = self.truth.get(at + slot).copied().unwrap_or(0) as usize;
            let id = if slot <= (self.right)(at) { true_id } else { (true_id + 1) % vocab };
            (0..vocab).map(move |other| if other == id { 1f32 } else { 0.0 }).collect::<Vec<f32>>()
        });
        let slots = slots.take(limit).collect::<Vec<_>>();
        let logits = Tensor::from_slice(&slots.concat()).reshape([slots.len() as i64, vocab as i64]);
        Ok(Proposal { tokens: draw(&logits)?, logits, confidence: None })
    }
}
