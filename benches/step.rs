//! One training step of a drafter alone, which `benches/peers` compares with other trainers.
//!
//! `cargo bench --bench dispatch -- --step --rows 2 --anchors 64 --layers 2` prints one line of JSON: the seconds of each
//! step and the rise of the memory peak above the weights. Data and weights are random. The default is f32 on the CPU with
//! two threads; `--device cuda:0` and `--dtype bf16` change it. `--attention kernel` or `plain` replaces the device's
//! default for attention to the context.
//! `--labels data,16,all` runs a step with each of these labels in turn, from the same anchors, and prints a line for
//! each; the peak is then the maximum of all. `--head dspark` or `dflash2` trains another head with its default loss.

use crate::{
    machine::{Failed, Outcome},
    sampled::{Options, Sampled},
    widths::{Widths, widths},
};
use draftmill::{
    config::{CeLabel, LossTerms, TopK},
    hf::{
        draft::DraftConfig,
        head::{ConfidenceInput, Dflash2Config, DsparkConfig, HeadConfig, MarkovKind},
    },
    model::{
        adamw::{AdamW, Hyper},
        batch::{Packed, TargetLabels, TopKLabels},
        drafter::{AttentionBackend, DraftOptions, Drafter, Shared, anchors::Anchors, head::LossOptions},
        loss::{head_loss::Tile, weighting::Weighting},
        params::init_params,
    },
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

/// Prompt tokens of a row, which are not supervised.
const PROMPT: usize = 64;
/// Labels from the data.
const DATA: &str = "data";
pub const SEED: u64 = 1;
/// Number of libtorch threads.
pub const THREADS: i32 = 2;

/// Published rank of Markov head and selector.
const RANK: usize = 256;

type Head = (HeadConfig, LossOptions);

/// Options of the measurement; every field is an option of the same name.
pub struct Shape {
    pub device: Device,
    /// `dtype` of features and activations.
    pub kind: Kind,
    widths: Widths,
    rows: usize,
    length: usize,
    pub anchors: usize,
    layers: usize,
    pub steps: usize,
    pub tile: Tile,
    pub group_slots: usize,
    attention: AttentionBackend,
    /// `None` selects labels from the data.
    labels: Vec<Option<TopK>>,
    head: Head,
}

/// Micro-batch of random features.
pub struct Micro {
    hidden: Tensor,
    ids: Vec<i32>,
    loss_mask: Vec<u8>,
    lengths: Vec<u32>,
    target_labels: Option<TargetLabels>,
}

pub fn shape(arguments: &[&str]) -> Outcome<Shape> {
    let mut given = Options::read(arguments)?;
    let (device, kind) = (given.device()?, given.kind()?);
    let defaults = DraftOptions::new(device);
    let mut widths = widths(given.word("widths", "smollm2"))?;
    widths.vocab = given.number("vocab", widths.vocab)?;
    let shape = Shape {
        device,
        kind,
        widths,
        rows: given.number("rows", 2)?,
        length: given.number("length", 512)?,
        anchors: given.number("anchors", 64)?,
        layers: given.number("layers", 2)?,
        steps: given.number("steps", 5)?,
        tile: Tile {
            slots: given.number("tile-slots", defaults.tile.slots)?,
            tokens: given.number("tile-tokens", defaults.tile.tokens)?,
        },
        group_slots: given.number("group-slots", defaults.group_slots)?,
        attention: match given.word("attention", "default") {
            "default" => defaults.attention,
            "kernel" => AttentionBackend::Kernel,
            "plain" => AttentionBackend::Plain,
            other => return Err(format!("--attention is kernel or plain, not {other}")),
        },
        labels: given.word("labels", DATA).split(',').map(labels).collect::<Outcome<_>>()?,
        head: head(given.word("head", "dflash"))?,
    };
    given.done().map(|()| shape)
}

fn labels(text: &str) -> Outcome<Option<TopK>> {
    if text == DATA { Ok(None) } else { text.parse().map(Some) }
}

/// A head with the published settings, and its default loss.
fn head(name: &str) -> Outcome<Head> {
    match name {
        "dflash" => Ok((HeadConfig::Dflash, LossOptions::default())),
        "dspark" => Ok((
            HeadConfig::Dspark(DsparkConfig {
                markov: MarkovKind::Vanilla,
                rank: RANK,
                confidence: Some(ConfidenceInput::HiddenAndMarkov),
            }),
            LossOptions { terms: LossTerms::DSPARK, ce_label: CeLabel::Data, ..LossOptions::default() },
        )),
        "dflash2" => Ok((
            HeadConfig::Dflash2(Dflash2Config {
                conv_taps: 2,
                conv_group: 16,
                selector_rank: RANK,
                selector_top_k: 16,
            }),
            LossOptions::default(),
        )),
        other => Err(format!("--head is dflash, dspark or dflash2, not {other}")),
    }
}

pub fn config(shape: &Shape) -> DraftConfig {
    shape.widths.drafter(shape.layers)
}

/// Device of a mode without other options, seeded for equal random numbers in every run.
pub fn device_alone(arguments: &[&str]) -> Outcome<Device> {
    let mut given = Options::read(arguments)?;
    let device = given.device()?;
    given.done()?;
    tch::set_num_threads(THREADS);
    tch::manual_seed(SEED as i64);
    Ok(device)
}

impl Micro {
    pub fn new(shape: &Shape, config: &DraftConfig) -> Micro {
        let supervised = |place: usize| place >= PROMPT.min(shape.length / 2);
        let mut micro = Micro::of(vec![shape.length as u32; shape.rows], config, supervised);
        micro.hidden = micro.hidden.to_device(shape.device).to_kind(shape.kind);
        micro
    }

    /// Shapes in f32 on the CPU.
    pub fn of(lengths: Vec<u32>, config: &DraftConfig, supervised: impl Fn(usize) -> bool) -> Micro {
        let tokens = lengths.iter().map(|&length| length as usize).sum::<usize>();
        let width = config.target_layer_ids.len() * config.hidden_size;
        let places = lengths.iter().flat_map(|&length| 0..length as usize);
        Micro {
            hidden: random([tokens as i64, width as i64], Device::Cpu),
            ids: (0..tokens).map(|i| (i * 7919 % (config.vocab_size - 1)) as i32).collect(),
            loss_mask: places.map(|place| u8::from(supervised(place))).collect(),
            lengths,
            target_labels: None,
        }
    }

    /// Micro-batch with random label probabilities of a target.
    pub fn with_labels(self, labels: Option<TopK>, config: &DraftConfig) -> Micro {
        let tokens = self.ids.len();
        let target_labels = labels.map(|labels| match labels {
            TopK::Tokens(each) => {
                let (each, vocab) = (each as usize, config.vocab_size);
                let ids = (0..tokens * each).map(|i| (i * 7919 % vocab) as i32).collect();
                TargetLabels::TopK(TopKLabels { k: each, ids, probabilities: vec![1.0 / each as f32; tokens * each] })
            }
            TopK::All => {
                let states = random([tokens as i64, config.hidden_size as i64], Device::Cpu);
                TargetLabels::States(states.to_device(self.hidden.device()).to_kind(self.hidden.kind()))
            }
        });
        Micro { target_labels, ..self }
    }

    pub fn batch(&self) -> Packed<'_> {
        let Micro { hidden, ids, loss_mask, lengths, target_labels } = self;
        Packed { target_labels: target_labels.as_ref(), ..Packed::of_ids(hidden, ids, loss_mask, lengths) }
    }
}

pub fn random(size: [i64; 2], device: Device) -> Tensor {
    Tensor::randn(size, (Kind::Float, device))
}

/// Measures and prints the line.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let shape = &shape(arguments)?;
    tch::set_num_threads(THREADS);
    tch::manual_seed(SEED as i64);
    let (head, loss) = shape.head;
    let config = DraftConfig { head, ..config(shape) };
    let options = DraftOptions {
        loss,
        tile: shape.tile,
        group_slots: shape.group_slots,
        attention: shape.attention,
        weighting: Weighting::Decay(Some(7.0)),
        kind: shape.kind,
        ..DraftOptions::new(shape.device)
    };
    let table =
        || (random([config.vocab_size as i64, config.hidden_size as i64], shape.device) * 0.02).to_kind(shape.kind);
    let shared = Shared { embedding: table(), head: table() };
    let mut drafter = Drafter::new(config.clone(), shared, options).failed("make a drafter")?;
    let weights = init_params(&config, SEED).failed("draw weights")?;
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    let masters = weights.deep_copy(shape.device, Kind::Float).failed("copy weights")?;
    let mut adamw = AdamW::new(masters, hyper).failed("make an optimizer")?;
    drafter.load_weights(weights).failed("load weights")?;

    let new = |&labels| (labels, Micro::new(shape, &config).with_labels(labels, &config));
    let micros: Vec<_> = shape.labels.iter().map(new).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);

    let mut sides = Vec::new();
    for (labels, micro) in &micros {
        sides.push((labels, micro.batch(), Sampled::begin(shape.device)?));
    }
    for _ in 0..=shape.steps {
        let Some((_, first, _)) = sides.first() else { break };
        let anchors =
            Anchors::sample(first.loss_mask, first.lengths, shape.anchors, &mut rng).failed("draw anchors")?;
        for (_, batch, sampled) in &mut sides {
            sampled.step(|| {
                let (report, gradient) = drafter.loss_and_gradient(batch, &anchors).failed("compute a gradient")?;
                let gradient = gradient.ok_or("nothing was supervised")?;
                adamw.step(gradient, report.loss_denominator, 1e-4, 1.0).failed("take a step")?;
                let weights = adamw.masters.deep_copy(shape.device, Kind::Float).failed("publish weights")?;
                drafter.load_weights(weights).failed("load weights")
            })?;
        }
    }
    for (labels, _, sampled) in sides {
        let mut line = sampled.json()?;
        line["labels"] = labels.map_or_else(|| DATA.into(), |labels| labels.to_string().into());
        println!("{line}");
    }
    Ok(())
}
