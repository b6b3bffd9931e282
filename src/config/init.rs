//! Check of the drafter in `drafter.init_from`: its sizes and tapped layers must match the configuration.

use super::{load::Written, problem::Problems};
use crate::hf::{
    HfError,
    draft::{DraftConfig, LayerType},
    layout::DraftFolder,
};
use std::path::Path;

/// Returns the shape of a run that starts from the drafter in `folder`: `shape` with the folder's rotary base and epsilon.
///
/// Block size and mask token may differ: no weight of the drafter depends on them.
///
/// # Errors
/// If the folder cannot be read, has a value that is not finite, belongs to another target, or has another shape. The
/// remedy lists the settings that match.
pub fn start_from(folder: &Path, written: &Written, shape: &DraftConfig) -> Result<DraftConfig, Problems> {
    let problem =
        |message: String, remedy: String| Problems(vec![written.problem("drafter.init_from", message, remedy)]);
    let unusable = |error: HfError| problem(error.to_string(), String::new());
    let found = DraftFolder::open(folder, Some(shape.num_target_layers)).map_err(unusable)?;
    if let Some(tensor) = found.not_finite().map_err(unusable)? {
        let message = format!("{tensor} holds a NaN or an infinite value");
        return Err(problem(message, "use a drafter from before its training diverged".into()));
    }
    let init = found.config;
    let mut sets = Vec::new();
    let mut differ = |key: &str, found: usize, wanted: usize| {
        if found != wanted {
            sets.push(format!("{key} = {found}"));
        }
    };
    differ("drafter.layers", init.num_hidden_layers, shape.num_hidden_layers);
    differ("drafter.heads", init.num_attention_heads, shape.num_attention_heads);
    differ("drafter.kv_heads", init.num_key_value_heads, shape.num_key_value_heads);
    differ("drafter.head_dim", init.head_dim, shape.head_dim);
    differ("drafter.intermediate_size", init.intermediate_size, shape.intermediate_size);
    if init.head.name() != shape.head.name() {
        sets.push(format!("drafter.head = \"{}\"", init.head.name()));
    } else if init.head != shape.head {
        sets.push(format!("the keys of drafter.head as in its config.json: {:?}", init.head));
    }
    if init.layer_types != shape.layer_types {
        let kinds = init.layer_types.iter().map(|kind| match kind {
            LayerType::Full => "\"full\"",
            LayerType::Sliding => "\"sliding\"",
        });
        sets.push(format!("drafter.layer_types = [{}]", kinds.collect::<Vec<_>>().join(", ")));
    }
    if let (Some(window), true) = (init.sliding_window, init.sliding_window != shape.sliding_window) {
        sets.push(format!("drafter.sliding_window = {window}"));
    }
    if init.slides() && init.sliding_causal != shape.sliding_causal {
        sets.push(format!("drafter.sliding_causal = {}", init.sliding_causal));
    }
    if init.target_layer_ids != shape.target_layer_ids {
        sets.push(format!("target.layer_ids = {:?}", init.target_layer_ids));
    }
    let of_target = [
        ("hidden_size", init.hidden_size, shape.hidden_size),
        ("vocab_size", init.vocab_size, shape.vocab_size),
        ("num_target_layers", init.num_target_layers, shape.num_target_layers),
    ];
    if let Some((key, found, wanted)) = of_target.into_iter().find(|(_, found, wanted)| found != wanted) {
        let message =
            format!("this drafter belongs to another target: its `{key}` is {found}, this target has {wanted}");
        return Err(problem(message, "use a drafter of the model in target.dir".into()));
    }
    if !sets.is_empty() {
        return Err(problem(
            "the shape of this drafter differs from the configuration".into(),
            format!("set {}", sets.join(", ")),
        ));
    }
    Ok(DraftConfig { rope_theta: init.rope_theta, rms_norm_eps: init.rms_norm_eps, ..shape.clone() })
}
