//! Identity of a run: the settings that must stay the same over all its starts.

use super::{Failed, models::Models};
use crate::{
    common::exit::{Exit, Failure},
    config::{Config, Labels, OptimizerKind, TopK},
    data::Store,
    run_dir::db::Identity,
};
use draftmill_actors::planner::plan::PlanSettings;

/// Identity by setting, under names for messages.
///
/// # Errors
/// A model folder that cannot be read.
pub fn of(config: &Config, plan: &PlanSettings, store: &Store, models: Option<&Models>) -> Result<Identity, Failure> {
    let made_with = |key| store.metadata().get(key).cloned().unwrap_or_else(|| "unknown".into());
    let mut identity = Identity::new();
    for (name, value) in [
        ("data", data_name(store)),
        ("data.max_length", made_with("max_length")),
        ("tokenizer", made_with("tokenizer_sha256")),
        ("template", made_with("template_sha256")),
        ("run.engine", format!("{:?}", config.run.engine).to_lowercase()),
        ("run.seed", config.run.seed.to_string()),
        ("plan.job_tokens", plan.job_tokens.to_string()),
        ("plan buckets", format!("{:?}", plan.bounds)),
        ("plan.order", format!("{:?}", plan.order).to_lowercase()),
    ] {
        identity.insert(name.into(), value);
    }
    // Only non-default values, so that older runs can resume.
    if config.optimizer.kind == OptimizerKind::Muon {
        identity.insert("optimizer.kind".into(), config.optimizer.kind.to_string());
    }
    if let Some(each) = config.drafter.labels {
        identity.insert("drafter.labels".into(), Labels::Target.to_string());
        if each != TopK::Tokens(1) {
            identity.insert("drafter.label_top_k".into(), each.to_string());
        }
    }
    if let Some(models) = models {
        models.identity(&config.target.dir, config.drafter.init_from.as_deref(), &mut identity).failed(Exit::Model)?;
    }
    Ok(identity)
}

/// Fingerprint of the store, with the names of its input files for messages.
fn data_name(store: &Store) -> String {
    let inputs = store.metadata().get("inputs").and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    let names = inputs.as_ref().and_then(|inputs| inputs.as_array()).into_iter().flatten();
    let names: Vec<_> = names.filter_map(|input| input["name"].as_str()).collect();
    format!("{} ({})", store.fingerprint(), names.join(", "))
}
