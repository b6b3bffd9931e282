//! Batch source over a store: pads the samples of a job to the job's width.

use super::store::{Split, Store};
use draftmill_actors::messages::types::{BatchSource, JobSpec, PaddedBatch};
use std::sync::Arc;

/// Batch source of one split of a store. A sample id is an index in that split.
#[derive(Clone, Debug)]
pub struct StoreSource {
    store: Arc<Store>,
    split: Split,
    /// Rows of the target's embedding, if the store records them.
    vocab_size: Option<i64>,
}

impl StoreSource {
    pub fn new(store: Arc<Store>, split: Split) -> StoreSource {
        let vocab_size = store.metadata().get("vocab_size").and_then(|size| size.parse().ok());
        StoreSource { store, split, vocab_size }
    }
}

impl BatchSource for StoreSource {
    /// Pads the samples of `job` to its width.
    ///
    /// # Errors
    /// A sentence that names the sample, if the store does not match the plan or its content is damaged.
    fn pad(&self, job: &JobSpec) -> Result<PaddedBatch, String> {
        let (rows, width) = (job.samples.len(), job.width as usize);
        let mut batch = PaddedBatch {
            job: job.id,
            rows,
            width,
            lengths: Vec::with_capacity(rows),
            ids: vec![0; rows * width],
            loss_mask: vec![0; rows * width],
        };
        for (row, &sample) in job.samples.iter().enumerate() {
            let (file, samples) = (self.store.path().display(), self.store.len(self.split));
            if sample as usize >= samples {
                return Err(format!(
                    "{file} has {samples} samples of this split, but job {} names sample {sample}",
                    job.id
                ));
            }
            let (ids, mask) = self.store.sample(self.split, sample as usize);
            if ids.len() > width {
                return Err(format!(
                    "sample {sample} of {file} has {} tokens, but job {} is {width} wide; it belongs to another store",
                    ids.len(),
                    job.id
                ));
            }
            let most = self.vocab_size.unwrap_or(i64::MAX);
            if let Some(id) = ids.iter().find(|&&id| id < 0 || i64::from(id) >= most) {
                return Err(format!(
                    "sample {sample} of {file} holds the id {id}, which is not a token; the file is damaged"
                ));
            }
            if let Some(value) = mask.iter().find(|&&value| value > 1) {
                return Err(format!("sample {sample} of {file} has {value} in its loss mask; the file is damaged"));
            }
            let start = row * width;
            batch.ids[start..start + ids.len()].copy_from_slice(ids);
            batch.loss_mask[start..start + ids.len()].copy_from_slice(mask);
            batch.lengths.push(ids.len() as u32);
        }
        Ok(batch)
    }
}
