//! Engines of a torch run: targets, drafters, the optimizer and the evaluator.

use super::{Failed, engine_set::EngineSet, least_squares_init::least_squares_weights, models::Models};
use crate::run_dir::RunDir;
use crate::{
    collective::{
        nccl::Communicator,
        nccl_ffi::Table,
        peer_copy::{PeerCopies, PeerCopy, copy_pairs},
    },
    common::exit::{Exit, Failure},
    config::{self, Config, InitMethod, Loaded},
    data::{Split, Store},
    engines::{
        checkpointing::{CheckpointSettings, CheckpointWriter},
        gradient_exchange::GradientExchange,
        optimizer::TorchOptimizer,
        torch::{DrafterOptions, TargetOptions, TorchDrafter, TorchTarget},
    },
    eval::evaluator::{self, Setup},
    hf::{layout::DraftFolder, tensors::TensorFiles},
    model::{
        adamw::Hyper,
        drafter::{DraftOptions, Shared, head::LossOptions},
        libtorch::{open_device, set_threads},
        load::kind_of,
        loss::weighting::Weighting,
        muon::Muon,
        params::{Weights, folder_params, init_params},
    },
    run_dir::{checkpoint::Verified, eval_log::EvalLog},
};
use draftmill_actors::messages::engine::DraftEngine;
use std::sync::Arc;
use tch::Device;
use tokio::sync::watch;

/// Engines of a torch run.
type TorchEngines = EngineSet<TorchTarget, TorchDrafter, TorchOptimizer>;

/// Loads the models, which reads gigabytes, and resumes from the checkpoint `from`, if any.
///
/// # Errors
/// A model, device or checkpoint that cannot be used.
pub async fn load(
    in_force: watch::Receiver<Loaded>,
    models: Models,
    folder: RunDir,
    from: Option<Verified>,
    settings: watch::Receiver<CheckpointSettings>,
    store: Arc<Store>,
) -> Result<TorchEngines, Failure> {
    let config = in_force.borrow().config.clone();
    let start_step = from.as_ref().map_or(0, |from| from.state.step);
    let samples = store.clone();
    let setup = Setup {
        eval: config.eval.clone(),
        in_force,
        target: config.target.dir.clone(),
        kind: kind_of(config.target.dtype.into()),
        draft: models.draft.clone(),
        gamma: weighting(&config).gamma(),
        loss: loss_options(&config),
        seed: config.run.seed,
        labels: config.drafter.labels,
        store,
    };
    let (log, history) =
        EvalLog::open(folder.root(), start_step).map_err(|e| folder.cannot_write(&EvalLog::file(folder.root()), &e))?;
    let run = folder.clone();
    let load = move || load_blocking(&config, models, &run, settings, from.as_ref(), &samples);
    let (mut engines, weights) =
        tokio::task::spawn_blocking(load).await.map_err(|e| Failure::new(Exit::Internal, e))??;
    for (drafter, weights) in engines.drafters.iter_mut().zip(weights) {
        drafter.load_weights(weights).await.failed(Exit::Model)?;
    }
    let first = start_step == 0 && history.0.is_empty();
    if let Some((snapshots, evaluator)) = evaluator::start(setup, log, history).failed(Exit::Config)? {
        engines.optimizer = engines.optimizer.with_evaluation(snapshots, first);
        engines.evaluator = Some(evaluator);
    }
    Ok(engines)
}

fn load_blocking(
    config: &Config,
    models: Models,
    folder: &RunDir,
    settings: watch::Receiver<CheckpointSettings>,
    from: Option<&Verified>,
    store: &Store,
) -> Result<(TorchEngines, Vec<Weights>), Failure> {
    set_threads(config.run.threads);
    let Models { target, draft } = models;
    let files = Arc::new(TensorFiles::open(&config.target.dir).failed(Exit::Model)?);
    let devices = |devices: &[config::Device]| -> Result<Vec<Device>, Failure> {
        devices.iter().map(|d| open_device(*d).failed(Exit::Config)).collect()
    };
    let (target_devices, drafter_devices) = (devices(&config.target.devices)?, devices(&config.drafter.devices)?);
    let device = drafter_devices.first().copied().unwrap_or(Device::Cpu);
    let measures = config.evaluates(store.len(Split::Validation) > 0).then_some(config.eval.device);
    let measured = devices(measures.as_slice())?.pop();
    // Before the models are loaded, so that the self-tests have memory.
    let routes = PeerCopies::self_test(copy_pairs(device, &drafter_devices, measured), |from, to| {
        PeerCopy::Direct.self_test(from, to)
    });
    let mut exchange = GradientExchange::with_peer_copies(routes);
    if config.drafter.collectives == config::Collectives::Nccl {
        exchange = exchange.with_nccl(&drafter_devices, |gpus| Communicator::open(Table::open()?, gpus));
    }

    let mut targets = Vec::new();
    for device in target_devices {
        let options = TargetOptions {
            device,
            compute: config.target.dtype.into(),
            features: config.target.feature_dtype,
            features_on: Device::Cpu,
            taps: draft.target_layer_ids.clone(),
            labels: config.drafter.labels,
        };
        targets.push(TorchTarget::new(target.clone(), files.clone(), options).failed(Exit::Model)?);
    }
    let mut drafters = Vec::new();
    for &device in &drafter_devices {
        let kind = kind_of(config.drafter.dtype.into());
        let shared = Shared::load(&target, &files, kind, device).failed(Exit::Model)?;
        let model = DraftOptions {
            kind,
            weighting: weighting(config),
            loss: loss_options(config),
            recompute: config.drafter.recompute_layers,
            window_start: config.drafter.sliding_start,
            ..DraftOptions::new(device)
        };
        let options = DrafterOptions { model, num_anchors: config.drafter.anchors as usize, seed: config.run.seed };
        drafters.push(TorchDrafter::new(draft.clone(), shared, options).failed(Exit::Model)?);
    }

    let config::Optimizer { beta1, beta2, eps, weight_decay, .. } = config.optimizer;
    let hyper = Hyper { beta1, beta2, eps, weight_decay };
    let muon = muon(&config.optimizer);
    let (run, seed) = (folder.run_id()?, config.run.seed);
    let checkpoints = CheckpointWriter { folder: folder.checkpoints(), settings, seed, run, draft: draft.clone() };
    let on = drafter_devices.clone();
    let optimizer = match from {
        Some(from) => TorchOptimizer::resume(from, hyper, muon, device, on, checkpoints).failed(Exit::Model)?,
        None => {
            let weights = match &config.drafter.init_from {
                Some(folder) => {
                    let folder = DraftFolder::open(folder, Some(draft.num_target_layers)).failed(Exit::Model)?;
                    folder_params(&folder).failed(Exit::Model)?
                }
                None => {
                    let random = init_params(&draft, config.run.seed).failed(Exit::Model)?;
                    match config.drafter.init_method {
                        InitMethod::Random => random,
                        InitMethod::LeastSquares => {
                            least_squares_weights(config, &target, &files, &draft, store, random)?
                        }
                    }
                }
            };
            TorchOptimizer::new(&weights, hyper, muon, device, on, checkpoints).failed(Exit::Model)?
        }
    };
    let optimizer = optimizer.with_exchange(exchange);
    let weights = drafter_devices.iter().map(|&device| optimizer.masters_on(device).failed(Exit::Model));
    let weights = weights.collect::<Result<_, _>>()?;
    Ok((EngineSet { targets, drafters, optimizer, evaluator: None }, weights))
}

fn muon(optimizer: &config::Optimizer) -> Option<Muon> {
    (optimizer.kind == config::OptimizerKind::Muon).then_some(Muon {
        momentum: optimizer.muon_momentum,
        weight_decay: optimizer.muon_weight_decay,
        iterations: optimizer.muon_iterations,
        rate: optimizer.muon_rate_scale,
        scale: optimizer.muon_scale,
    })
}

fn loss_options(config: &Config) -> LossOptions {
    LossOptions {
        terms: config.drafter.loss,
        ce_label: config.drafter.ce_label,
        confidence_weight: config.drafter.confidence_loss_weight,
        selector_weight: config.drafter.selector_loss_weight,
        selector_missing: config.drafter.selector_missing_label,
    }
}

fn weighting(config: &Config) -> Weighting {
    config.drafter.d_pace.map_or(Weighting::Decay(config.drafter.loss_decay_gamma), Weighting::DPace)
}
