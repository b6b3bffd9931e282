//! Results of a device, compared with the reference implementation in f64 and with the CPU: the drafter's forward and
//! backward, the target's forward on each attention kernel, the optimizer, and the report of an out-of-memory error.
//!
//! `cargo bench --bench dispatch -- --parity --device cuda:0` prints one line of JSON: each result with its limit. The
//! shapes are tiny.

use crate::{
    machine::{Failed, Outcome},
    sampled::wait_for,
    step::{Micro, SEED, device_alone, random},
    table::Target::{self as Limit, AtLeast, Below},
    widths::{Widths, widths},
};
use draftmill::{
    engines::transfer::self_tested,
    hf::draft::{DraftConfig, LayerType},
    model::{
        ModelError,
        adamw::{AdamW, Hyper},
        batch::{Packed, Rows},
        drafter::{DraftOptions, Drafter, Shared, anchors::Anchors, reference::Dense},
        loss::weighting::Weighting,
        params::{Gradient, ParamSet, init_params},
        target::{Depth, Target},
    },
};
use draftmill_actors::messages::engine::MicroReport;
use draftmill_torch_ext::Attention;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;
/// Limit relative to a tensor's largest value.
pub const F32: f64 = 1e-4;
/// Limit for bf16, which keeps 8 bits; the roundings of a few layers add up.
const BF16: f64 = 0.1;

/// Measures and prints the line.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let device = device_alone(arguments)?;
    let widths = widths("tiny")?;
    let mut figures = Figures::default();
    drafter(device, &widths, &mut figures)?;
    target(device, &widths, &mut figures)?;
    figures.add("parity_fused_adamw", Below(1e-5), "three updates, to plain operations on the CPU", || {
        optimizer(device, &widths)
    });
    memory(device, &mut figures);
    println!("{}", json!(figures.into_lines()));
    Ok(())
}

/// Results with their limits.
#[derive(Default)]
pub struct Figures(Vec<Value>);

impl Figures {
    /// Adds a result. An unavailable one is reported as such, and the others are still measured.
    pub fn add(&mut self, name: &str, limit: Limit, note: &str, compute: impl FnOnce() -> Outcome<f64>) {
        let (value, note) = match compute() {
            Ok(value) => (value, note.to_owned()),
            Err(error) => (f64::NAN, error),
        };
        let (key, limit) = match limit {
            AtLeast(least) => ("at_least", least),
            Below(limit) => ("below", limit),
            Limit::None => ("none", 0.0),
        };
        self.0.push(json!({ "name": name, "value": value, key: limit, "note": note }));
    }

    pub fn into_lines(self) -> Vec<Value> {
        self.0
    }
}

/// Drafter with a sliding layer, ragged rows and holes in the loss mask.
struct Scene {
    config: DraftConfig,
    micro: Micro,
    anchors: Anchors,
    tables: [Tensor; 2],
    weights: ParamSet,
}

impl Scene {
    fn new(widths: &Widths) -> Outcome<Scene> {
        let mut config = widths.drafter(2);
        config.layer_types[1] = LayerType::Sliding;
        config.sliding_window = Some(24);
        let micro = Micro::of(vec![61, 40, 17], &config, |place| place % 5 != 4);
        let batch = micro.batch();
        let mut rng = ChaCha8Rng::seed_from_u64(SEED);
        let anchors = Anchors::sample(batch.loss_mask, batch.lengths, 8, &mut rng).failed("draw anchors")?;
        let table = || random([config.vocab_size as i64, config.hidden_size as i64], CPU);
        // Large enough that every path through the layers contributes.
        let scaled = |(name, x): (String, Tensor)| (name, if x.dim() == 2 { x * 6.0 } else { x });
        let weights = init_params(&config, SEED).failed("draw weights")?.into_pairs().into_iter().map(scaled);
        let weights = ParamSet::new(weights.collect());
        Ok(Scene { tables: [table(), table() * 0.3], micro, anchors, weights, config })
    }

    fn drafter(&self, device: Device, kind: Kind, recompute: bool) -> Result<Drafter, ModelError> {
        let [embedding, head] = self.tables.each_ref().map(|table| table.f_to_device_(device, kind, false, false));
        let shared = Shared { embedding: embedding?, head: head? };
        let weighting = Weighting::Decay(Some(7.0));
        let options = DraftOptions { kind, weighting, recompute, ..DraftOptions::new(device) };
        let mut drafter = Drafter::new(self.config.clone(), shared, options)?;
        drafter.load_weights(self.weights.deep_copy(CPU, Kind::Float)?)?;
        Ok(drafter)
    }

    /// Computes loss and gradients by the fused forward and backward.
    fn trained(&self, device: Device, kind: Kind, recompute: bool) -> Outcome<(MicroReport, Gradient)> {
        let compute = || {
            let batch = self.micro.batch();
            let hidden = batch.hidden.f_to_device_(device, kind, false, false)?;
            let batch = Packed { hidden: &hidden, ..batch };
            self.drafter(device, kind, recompute)?.loss_and_gradient(&batch, &self.anchors)
        };
        let (report, gradient) = compute().failed("train a micro-batch")?;
        Ok((report, gradient.ok_or("nothing was supervised")?))
    }
}

fn drafter(device: Device, widths: &Widths, figures: &mut Figures) -> Outcome<()> {
    let scene = Scene::new(widths)?;
    let oracle = || {
        let dense = Dense::pad(&scene.micro.batch(), &scene.anchors)?;
        scene.drafter(CPU, Kind::Double, false)?.trace(&dense)
    };
    let exact = oracle().failed("compute the oracle")?;
    let loss = |report: &MicroReport| (report.loss_numerator / exact.numerator - 1.0).abs();
    let f32 = scene.trained(device, Kind::Float, false);
    let f32 = f32.as_ref().map_err(String::clone);
    figures.add("parity_loss_f32", Below(F32), "to the dense oracle in f64 on the CPU", || Ok(loss(&f32.clone()?.0)));
    figures.add("parity_gradient_f32", Below(F32), "the same, of each tensor's largest entry", || {
        worst(f32.clone()?.1.iter(), &exact.gradient)
    });
    figures.add("parity_gradient_f32_to_cpu", Below(F32), "to the same pass on the CPU", || {
        worst(f32.clone()?.1.iter(), &scene.trained(CPU, Kind::Float, false)?.1)
    });
    figures.add("parity_gradient_recomputed", Below(F32), "to layers that are kept", || {
        worst(scene.trained(device, Kind::Float, true)?.1.iter(), &f32.clone()?.1)
    });
    let bf16 = scene.trained(device, Kind::BFloat16, false);
    let bf16 = bf16.as_ref().map_err(String::clone);
    figures.add("parity_loss_bf16", Below(0.03), "to the oracle", || Ok(loss(&bf16.clone()?.0)));
    figures.add("parity_gradient_bf16", Below(0.02), "the same, one less the smallest cosine of a tensor", || {
        angle(&bf16.clone()?.1, &exact.gradient)
    });
    Ok(())
}

fn target(device: Device, widths: &Widths, figures: &mut Figures) -> Outcome<()> {
    let config = widths.target()?;
    let taps = widths.taps;
    let draw = crate::extract::random_weight(Kind::Float, CPU);
    let weights: BTreeMap<String, Tensor> = config
        .tensor_shapes()
        .into_iter()
        .map(|(name, shape)| draw(&name, &shape).map(|tensor| (name, tensor)))
        .collect::<Result<_, _>>()
        .failed("draw weights")?;
    let lengths = [40u32, 33, 17];
    let ids: Vec<i32> = (0..lengths.len() as i32 * 40).map(|i| i * 7919 % (config.vocab_size as i32 - 1)).collect();
    let rows = Rows::new(&ids, &lengths, 40).failed("make a batch")?;
    let hidden = |device: Device, kind: Kind| {
        let weight = |name: &str, _: &[usize]| {
            let missing = || ModelError::Input(format!("there is no `{name}`"));
            Ok(weights.get(name).ok_or_else(missing)?.f_to_device_(device, kind, false, false)?)
        };
        let target = Target::of(config.clone(), Depth::Layers(taps[4] + 1), kind, device, weight)?;
        target.taps(&rows, &taps, kind)
    };
    let exact = hidden(CPU, Kind::Double).failed("extract in f64")?;
    let chosen = draftmill_torch_ext::attention().failed("ask for the kernels of attention")?;
    let none = Attention::default();
    let kernels = [
        ("", chosen),
        ("_flash", Attention { flash: true, ..none }),
        ("_efficient", Attention { efficient: true, ..none }),
        ("_math", Attention { math: true, ..none }),
    ];
    for (kind, name, limit) in [(Kind::Float, "f32", F32), (Kind::BFloat16, "bf16", BF16)] {
        for (kernel, switches) in kernels {
            draftmill_torch_ext::set_attention(switches).failed("choose a kernel of attention")?;
            let found = hidden(device, kind);
            // libtorch lacks some kernels for some devices and dtypes.
            let may_lack = found.is_err() && ["_flash", "_efficient"].contains(&kernel);
            let limit = if may_lack { Limit::None } else { Below(limit) };
            let note = "hidden states, to f64 on the CPU, of the largest of each tap";
            figures.add(&format!("parity_target_{name}{kernel}"), limit, note, || {
                let found = found.failed("extract")?;
                let by_tap =
                    |x: &Tensor, tap: usize| x.narrow(1, (tap * config.hidden_size) as i64, config.hidden_size as i64);
                let gaps = (0..taps.len()).map(|tap| gap(&by_tap(&found, tap), &by_tap(&exact, tap)));
                Ok(gaps.fold(0.0, f64::max))
            });
        }
    }
    draftmill_torch_ext::set_attention(chosen).failed("choose the kernels of attention again")
}

fn optimizer(device: Device, widths: &Widths) -> Outcome<f64> {
    let config = widths.drafter(1);
    let hyper = Hyper { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let draw = |seed, device| init_params(&config, seed).and_then(|weights| weights.deep_copy(device, Kind::Float));
    let updated = |device: Device, plain: bool| {
        let mut adamw = AdamW::new(draw(SEED, device)?, hyper)?;
        if plain {
            adamw = adamw.unfused();
        }
        for step in 0..3 {
            adamw.step(draw(SEED + 1 + step, device)?, 3.0, 1e-2, 1.0)?;
        }
        Ok::<_, ModelError>(adamw.masters)
    };
    worst(updated(device, false).failed("update")?.iter(), &updated(CPU, true).failed("update plainly")?)
}

fn memory(device: Device, figures: &mut Figures) {
    figures.add("out_of_memory_is_told", AtLeast(1.0), "and the device goes on", || {
        let error = Tensor::f_empty([1i64 << 50], (Kind::Int8, device)).err().ok_or("a pebibyte was there")?;
        let told = ModelError::from(error).is_out_of_memory();
        let after = Tensor::f_ones([8], (Kind::Float, device)).and_then(|x| x.f_sum(Kind::Float)).failed("go on")?;
        wait_for(device);
        Ok(f64::from(u8::from(told && f64::try_from(after).failed("go on")? == 8.0)))
    });
    if device != CPU {
        figures.add("copies_are_right", AtLeast(1.0), "through pinned buffers, both ways", || {
            Ok(f64::from(u8::from(self_tested(device).failed("send bits to and fro")?.is_some())))
        });
        figures.add("cache_is_given_back", AtLeast(1.0), "256 MiB that no tensor touches", || {
            let reserved = || {
                let memory = draftmill_torch_ext::memory(device).failed("ask for the device's memory")?;
                Ok::<_, String>(memory.ok_or("the device tells of no memory")?.reserved)
            };
            drop(Tensor::f_zeros([256 << 20], (Kind::Int8, device)).failed("take memory")?);
            let before = reserved()?;
            draftmill_torch_ext::empty_cache(device).failed("give memory back")?;
            Ok(f64::from(u8::from(reserved()? + (256 << 20) <= before)))
        });
    }
}

/// Returns the largest difference of any tensor, relative to its largest entry.
pub fn worst<'a>(got: impl Iterator<Item = (&'a str, &'a Tensor)>, want: &ParamSet) -> Outcome<f64> {
    let gaps = got.map(|(name, got)| want.need(name).map(|want| gap(got, want)));
    let gaps: Vec<f64> = gaps.collect::<Result<_, _>>().failed("compare")?;
    // A fold with `max` would ignore NaN.
    Ok(gaps.into_iter().fold(0.0, |worst, gap| if gap <= worst { worst } else { gap }))
}

pub fn gap(got: &Tensor, want: &Tensor) -> f64 {
    let wide = |x: &Tensor| x.to_device(CPU).to_kind(Kind::Double);
    let (got, want) = (wide(got), wide(want));
    ((&got - &want).abs().max() / want.abs().max()).double_value(&[])
}

/// Returns one minus the smallest cosine between two tensors of the same name.
fn angle(got: &ParamSet, want: &ParamSet) -> Outcome<f64> {
    let mut worst = 0.0;
    for (name, got) in got.iter() {
        let flat = |x: &Tensor| x.to_device(CPU).to_kind(Kind::Double).flatten(0, -1);
        let (got, want) = (flat(got), flat(want.need(name).failed("compare")?));
        let off = 1.0 - (got.dot(&want) / got.norm() / want.norm()).double_value(&[]);
        worst = if off <= worst { worst } else { off };
    }
    Ok(worst)
}
