//! Engines under memory pressure: results of split work are compared with results at enough memory.
//!
//! `cargo bench --bench dispatch -- --pressure --device cuda:0` prints one line of JSON, like `--parity`. A GPU is filled
//! except for a small rest; on the CPU the address space of this process is limited.

use crate::{
    machine::{Failed, Outcome, status},
    parity::{F32, Figures, gap, worst},
    step::{SEED, device_alone},
    table::Target::{AtLeast, Below},
    widths::widths,
};
use draftmill::{
    engines::torch::{DrafterOptions, TargetOptions, TorchDrafter, TorchFeatures, TorchTarget},
    hf::{config::TargetConfig, tensors::RawDtype},
    model::{
        drafter::DraftOptions,
        params::{Gradient, init_params},
    },
};
use draftmill_actors::messages::{
    engine::{DraftEngine, EngineError, FeatureDtype, TargetEngine},
    types::{JobId, PaddedBatch},
};
use safetensors::tensor::TensorView;
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
};
use tch::{Device, Kind, Tensor};
use tokio::runtime::Builder;
use tracing::field::Field;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

const ROWS: usize = 32;
const LENGTH: usize = 512;
/// Blocks of each row.
const ANCHORS: usize = 16;
/// Free memory in MiB: from more than every engine needs to less than a whole batch needs.
const ROOMS: [u64; 5] = [512, 48, 32, 24, 16];

/// Measures and prints the line.
pub fn run(arguments: &[&str]) -> Outcome<()> {
    let device = device_alone(arguments)?;
    // Tensors are mapped separately; otherwise the heap keeps freed memory and the limit has no effect.
    // SAFETY: sets a parameter of the allocator.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 256 << 10) };
    let (warnings, warned) = mpsc::channel();
    let subscriber = tracing_subscriber::registry().with(Warnings(warnings));
    tracing::subscriber::set_global_default(subscriber).failed("listen to warnings")?;
    // One thread for all units of work, as no thread can be created without free memory.
    let runtime = Builder::new_current_thread().max_blocking_threads(1).enable_all().build();
    let figures = runtime.failed("start a runtime")?.block_on(measure(device, &warned))?;
    println!("{}", json!(figures.into_lines()));
    Ok(())
}

async fn measure(device: Device, warned: &mpsc::Receiver<String>) -> Outcome<Figures> {
    let mut figures = Figures::default();
    let (mut target, mut drafter) = engines(device).await?;
    let batch = batch(target_config()?.vocab_size);
    let whole = target.extract(batch.clone()).await.failed("extract")?;
    let hidden = whole.packed().hidden.copy();
    let gradient = trained(&mut drafter, whole).await.failed("train")?;
    let (mut fitting, mut gaps) = ((0, 0), (0.0f64, 0.0f64));
    for mib in ROOMS {
        let told = |what: &str, error: EngineError| match error {
            EngineError::OutOfMemory(text) => {
                eprintln!("bench: {what} with {mib} MiB: {text}");
                Ok(())
            }
            error => Err(format!("{what} with {mib} MiB failed: {error}")),
        };
        let pressure = Pressure::but_for(device, mib << 20)?;
        let extracted = target.extract(batch.clone()).await;
        drop(pressure);
        let features = match extracted {
            Ok(features) => {
                fitting.0 += 1;
                gaps.0 = gaps.0.max(gap(features.packed().hidden, &hidden));
                features
            }
            Err(error) => {
                told("extracting", error)?;
                target.extract(batch.clone()).await.failed("extract with room for all")?
            }
        };
        let pressure = Pressure::but_for(device, mib << 20)?;
        let sums = trained(&mut drafter, features).await;
        drop(pressure);
        match sums {
            Ok(sums) => {
                fitting.1 += 1;
                gaps.1 = gaps.1.max(worst(sums.iter(), &gradient)?);
            }
            Err(error) => told("training", error)?,
        }
    }
    let warnings: Vec<String> = warned.try_iter().collect();
    for (figure, what) in
        [("pressure_batches_halved", "a batch of"), ("pressure_micro_batches_halved", "a micro-batch of")]
    {
        let halved = warnings.iter().filter(|text| text.starts_with(what)).count();
        figures.add(figure, AtLeast(1.0), "ends of memory after which pieces were halved", || Ok(halved as f64));
    }
    let (rooms, note) = (f64::from(fitting.0), "rooms of 512 to 16 MiB in which a batch was extracted");
    figures.add("pressure_extractions", AtLeast(2.0), note, || Ok(rooms));
    figures.add("pressure_extraction", Below(F32), "hidden states, to those with room for all", || Ok(gaps.0));
    let note = "the same for a micro-batch";
    figures.add("pressure_micro_batches", AtLeast(2.0), note, || Ok(f64::from(fitting.1)));
    figures.add("pressure_gradient", Below(F32), "its gradient, to that with room for all", || Ok(gaps.1));
    Ok(figures)
}

async fn trained(drafter: &mut TorchDrafter, features: TorchFeatures) -> Result<Gradient, EngineError> {
    let job = JobId { epoch: 0, index: 0 };
    if let Err(failure) = drafter.micro_batch(job, features).await {
        return Err(failure.error);
    }
    let gradient = drafter.take_gradient().await?;
    gradient.ok_or_else(|| EngineError::Failed("nothing was supervised".into()))
}

fn target_config() -> Outcome<TargetConfig> {
    widths("tiny")?.target()
}

/// Loads a target and a drafter of random weights from a temporary folder.
async fn engines(device: Device) -> Outcome<(TorchTarget, TorchDrafter)> {
    let folder = Folder::new()?;
    folder.fill()?;
    let widths = widths("tiny")?;
    let (compute, features) = (FeatureDtype::F32, FeatureDtype::F32);
    let options =
        TargetOptions { device, compute, features, features_on: Device::Cpu, taps: widths.taps.to_vec(), labels: None };
    let target = TorchTarget::load(&folder.0, options).failed("load the target")?;
    let config = widths.drafter(2);
    let options = DrafterOptions { model: DraftOptions::new(device), num_anchors: ANCHORS, seed: SEED };
    let mut drafter = TorchDrafter::load(config.clone(), &folder.0, options).failed("load the drafter")?;
    drafter.load_weights(init_params(&config, SEED).failed("draw weights")?).await.failed("load weights")?;
    Ok((target, drafter))
}

fn batch(vocab: usize) -> Arc<PaddedBatch> {
    Arc::new(PaddedBatch {
        rows: ROWS,
        width: LENGTH,
        lengths: vec![LENGTH as u32; ROWS],
        ids: (0..ROWS * LENGTH).map(|i| (i * 7919 % (vocab - 1)) as i32).collect(),
        loss_mask: vec![1; ROWS * LENGTH],
        ..PaddedBatch::default()
    })
}

/// Model folder that is deleted on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Outcome<Folder> {
        let path = std::env::temp_dir().join(format!("draftmill-bench-{}", std::process::id()));
        fs::create_dir_all(&path).failed("make a folder")?;
        Ok(Folder(path))
    }

    fn fill(&self) -> Outcome<()> {
        let write = |name: &str, bytes: Vec<u8>| fs::write(self.0.join(name), bytes).failed("write a target");
        write("config.json", widths("tiny")?.target_json().to_string().into_bytes())?;
        let draw = crate::extract::random_weight(Kind::Float, Device::Cpu);
        let mut tensors = BTreeMap::new();
        for (name, shape) in target_config()?.tensor_shapes() {
            let values = Vec::<f32>::try_from(draw(&name, &shape).failed("draw weights")?.flatten(0, -1));
            let bytes = values.failed("draw weights")?.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
            tensors.insert(name, (shape, bytes));
        }
        let views = tensors.iter().map(|(name, (shape, bytes))| {
            TensorView::new(RawDtype::F32, shape.clone(), bytes).map(|view| (name.clone(), view))
        });
        let views = views.collect::<Result<Vec<_>, _>>().failed("write a target")?;
        write("model.safetensors", safetensors::serialize(views, None).failed("write a target")?)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0 as &Path);
    }
}

/// Guard that leaves little free memory until it is dropped.
enum Pressure {
    Ballast(#[expect(dead_code, reason = "it is only held")] Tensor),
    Addresses,
}

impl Pressure {
    fn but_for(device: Device, room: u64) -> Outcome<Pressure> {
        draftmill_torch_ext::empty_cache(device).failed("give memory back")?;
        match draftmill_torch_ext::memory(device).failed("ask for the device's memory")? {
            Some(memory) => {
                let size = memory.free.saturating_sub(room) as i64;
                Ok(Pressure::Ballast(Tensor::f_empty([size], (Kind::Int8, device)).failed("fill the device up")?))
            }
            None => {
                let used = status("VmSize:").ok_or("/proc does not tell of memory")?;
                addresses(used.saturating_add(room))?;
                Ok(Pressure::Addresses)
            }
        }
    }
}

impl Drop for Pressure {
    fn drop(&mut self) {
        if let Pressure::Addresses = self
            && let Err(error) = addresses(libc::RLIM_INFINITY)
        {
            eprintln!("bench: {error}");
        }
    }
}

/// Limits the address space of this process.
fn addresses(most: u64) -> Outcome<()> {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: reads the struct behind the pointer.
    match unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) } {
        0 => Ok(()),
        _ => Err(format!("could not limit memory: {}", std::io::Error::last_os_error())),
    }
}

/// Layer that forwards warnings.
struct Warnings(mpsc::Sender<String>);

impl<S: tracing::Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() == tracing::Level::WARN {
            event.record(&mut |field: &Field, value: &dyn std::fmt::Debug| {
                if field.name() == "message" {
                    let text = format!("{value:?}");
                    eprintln!("bench: {text}");
                    // The receiver is gone.
                    let _ = self.0.send(text);
                }
            });
        }
    }
}
