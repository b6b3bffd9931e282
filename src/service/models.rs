//! Configurations of the target and of the drafter, read from their folders without libtorch.

use crate::{
    hf::{config::TargetConfig, draft::DraftConfig, fingerprint, head::HeadConfig},
    run_dir::db::Identity,
};
use std::{io, path::Path};

/// Configurations of both models.
#[derive(Clone, Debug)]
pub struct Models {
    pub target: TargetConfig,
    pub draft: DraftConfig,
}

impl Models {
    /// Adds the models to the identity of a run.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn identity(&self, dir: &Path, init: Option<&Path>, identity: &mut Identity) -> io::Result<()> {
        if let Some(init) = init {
            identity.insert("drafter.init_from".into(), fingerprint::fingerprint(init)?);
        }
        let mut put = |name: &str, value: String| identity.insert(name.to_owned(), value);
        let t = &self.target;
        put("target shape", format!("{:?}, {} layers of {}", t.family, t.num_hidden_layers, t.hidden_size));
        put("target weights", fingerprint::fingerprint(dir)?);
        put("target.layer_ids", format!("{:?}", self.draft.target_layer_ids));
        put("drafter shape", {
            let d = &self.draft;
            format!(
                "{} layers, hidden {}, MLP {}, {}/{} heads of {}, block {}, mask token {}",
                d.num_hidden_layers,
                d.hidden_size,
                d.intermediate_size,
                d.num_attention_heads,
                d.num_key_value_heads,
                d.head_dim,
                d.block_size,
                d.mask_token_id
            )
        });
        if let Some(window) = self.draft.sliding_window {
            let block = if self.draft.sliding_causal { "" } else { ", bidirectional" };
            put("drafter.layer_types", format!("{:?}, window {window}{block}", self.draft.layer_types));
        }
        // Absent for DFlash, as in runs from before there were other heads.
        if self.draft.head != HeadConfig::Dflash {
            put("drafter.head", format!("{:?}", self.draft.head));
        }
        Ok(())
    }
}
