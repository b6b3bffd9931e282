//! The target and the drafter that fits it, as far as their folders tell without libtorch.

use crate::{
    hf::{config::TargetConfig, draft::DraftConfig},
    state::Identity,
};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// Shapes of both models.
#[derive(Clone, Debug)]
pub struct Models {
    pub target: TargetConfig,
    pub draft: DraftConfig,
}

impl Models {
    /// What must not change while a run goes on.
    pub fn identity(&self, dir: &Path, init: Option<&Path>, identity: &mut Identity) -> io::Result<()> {
        if let Some(init) = init {
            identity.insert("drafter.init".into(), fingerprint(init)?);
        }
        let mut put = |name: &str, value: String| identity.insert(name.to_owned(), value);
        let t = &self.target;
        put("target shape", format!("{:?}, {} layers of {}", t.family, t.num_hidden_layers, t.hidden_size));
        put("target weights", fingerprint(dir)?);
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
        Ok(())
    }
}

/// Chunks of a weight file that enter its fingerprint, and their size: a whole file of many gigabytes would take minutes.
const CHUNKS: u64 = 64;
const CHUNK: usize = 64 << 10;

/// A fingerprint of a model folder: config.json whole, and of each weight file its length and evenly spaced parts.
pub fn fingerprint(dir: &Path) -> io::Result<String> {
    let mut files: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    files.retain(|f| f.path().extension().is_some_and(|e| e == "safetensors"));
    files.sort_by_key(fs::DirEntry::file_name);
    let mut hash = Sha256::new();
    hash.update(fs::read(dir.join("config.json"))?);
    let mut buffer = vec![0; CHUNK];
    for entry in files {
        let mut file = File::open(entry.path())?;
        let length = file.metadata()?.len();
        hash.update(entry.file_name().as_encoded_bytes());
        hash.update(length.to_le_bytes());
        for i in 0..CHUNKS {
            file.seek(SeekFrom::Start(length / CHUNKS * i))?;
            let n = file.read(&mut buffer)?;
            hash.update(&buffer[..n]);
        }
    }
    Ok(hash.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect())
}
