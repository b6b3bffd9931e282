//! Selection of block anchors and trained slots: pure functions of masks, lengths and a seed.

use crate::model::ModelError;
use crate::model::batch::{Packed, TargetLabels, TopKLabels};
use draftmill_actors::{messages::types::JobId, runtime::random::stream_seed};
use rand::seq::index;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// Sorted anchors of each row of a micro-batch; a row may have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Anchors {
    pub rows: Vec<Vec<u32>>,
}

/// Trained slots of all blocks in row order: slot `j` of block `n` has the index `n * block_size + j`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slots {
    pub indices: Vec<i64>,
    /// Packed index of the token before each slot's label; the target's prediction there is the label.
    pub previous_tokens: Vec<i64>,
    /// Data's token at each slot's label.
    pub tokens: Vec<i64>,
    /// Labels per slot; 0 if they come from target states.
    pub labels_per_slot: usize,
    /// Labels of each slot's own position, `[slots, labels_per_slot]`: labels are not shifted.
    pub labels: Vec<i64>,
    /// Probabilities of the labels, `[slots, labels_per_slot]`, with sum 1 per slot.
    pub probabilities: Vec<f32>,
    /// Decay weight of each slot; 1 without decay.
    pub weights: Vec<f32>,
}

/// Positions that the slots of a block predict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    pub size: usize,
    /// True if slot `k` predicts the token at `anchor + k + 1` (DSpark): then all slots predict, and the first one that
    /// is not supervised ends its block. Otherwise slot `k > 0` predicts the token at `anchor + k`.
    pub from_anchor: bool,
}

impl BlockLayout {
    /// Layout of DFlash, whose anchor's slot predicts nothing.
    pub fn dflash(size: usize) -> BlockLayout {
        BlockLayout { size, from_anchor: false }
    }

    /// Distance from the anchor to the label of slot `slot`; `None` if the slot predicts nothing.
    pub fn distance(&self, slot: usize) -> Option<usize> {
        if self.from_anchor { Some(slot + 1) } else { (slot > 0).then_some(slot) }
    }
}

/// Random stream of one job, independent of drafter and time.
pub fn job_rng(seed: u64, job: JobId) -> ChaCha8Rng {
    ChaCha8Rng::from_seed(stream_seed(seed, "anchors", &[job.epoch.into(), job.index.into()]))
}

/// Positions of one row where a block may start: the token and the next one are supervised. The block need not fit into
/// the row, as slots past the end are not trained.
pub fn candidates(loss_mask: &[u8]) -> Vec<u32> {
    (0u32..).zip(loss_mask.windows(2)).filter(|(_, pair)| pair[0] > 0 && pair[1] > 0).map(|(p, _)| p).collect()
}

impl Anchors {
    /// Samples at most `limit` anchors per row, uniformly without replacement.
    ///
    /// # Errors
    /// `ModelError::Input` if the mask and the lengths differ in size.
    pub fn sample(
        loss_mask: &[u8],
        lengths: &[u32],
        limit: usize,
        rng: &mut ChaCha8Rng,
    ) -> Result<Anchors, ModelError> {
        let total: usize = lengths.iter().map(|&len| len as usize).sum();
        if total != loss_mask.len() {
            let have = loss_mask.len();
            return Err(ModelError::Input(format!("a loss mask of {have} entries does not cover {total} tokens")));
        }
        let mut rest = loss_mask;
        let rows = lengths.iter().map(|&len| {
            let (row, after) = rest.split_at(len as usize);
            rest = after;
            let candidates = candidates(row);
            let chosen = index::sample(rng, candidates.len(), limit.min(candidates.len()));
            let mut anchors: Vec<u32> = chosen.into_iter().map(|index| candidates[index]).collect();
            anchors.sort_unstable();
            anchors
        });
        Ok(Anchors { rows: rows.collect() })
    }

    /// Number of blocks of all rows.
    pub fn count(&self) -> usize {
        self.rows.iter().map(Vec::len).sum()
    }

    /// Largest anchor of each row, which is the length of the context that its blocks see; 0 without anchors.
    pub fn context_lengths(&self) -> Vec<i64> {
        self.rows.iter().map(|row| row.last().copied().unwrap_or(0).into()).collect()
    }

    /// Returns chunk `number` of `count` chunks of about equal size, for the same rows. No chunk is empty if there are
    /// at least `count` blocks.
    pub fn chunk(&self, number: usize, count: usize) -> Anchors {
        let all = self.count();
        let (from, to) = (all * number / count, all * (number + 1) / count);
        let mut seen = 0;
        let rows = self.rows.iter().map(|row| {
            let offset = |block: usize| block.saturating_sub(seen).min(row.len());
            let chunk = row[offset(from)..offset(to)].to_vec();
            seen += row.len();
            chunk
        });
        Anchors { rows: rows.collect() }
    }

    /// Checks that anchors are sorted, inside their rows, and given for every row.
    ///
    /// # Errors
    /// `ModelError::Input` if they are not.
    pub fn check(&self, lengths: &[u32]) -> Result<(), ModelError> {
        let fits = |(anchors, &len): (&Vec<u32>, &u32)| {
            anchors.windows(2).all(|pair| pair[0] <= pair[1]) && anchors.last().is_none_or(|&last| last < len)
        };
        if self.rows.len() != lengths.len() || !self.rows.iter().zip(lengths).all(fits) {
            return Err(ModelError::Input(format!(
                "anchors must be sorted positions inside their rows: {:?} for rows of {lengths:?} tokens",
                self.rows
            )));
        }
        Ok(())
    }

    /// Token ids of the anchors, which fill slot 0 of each block.
    pub fn ids(&self, batch: &Packed<'_>) -> Vec<i64> {
        let rows = self.rows.iter().zip(batch.offsets());
        rows.flat_map(|(anchors, start)| anchors.iter().map(move |&a| i64::from(batch.ids[start + a as usize])))
            .collect()
    }

    /// Trained slots of each block: those whose label is in the row and supervised. A gap in the loss mask excludes its
    /// own slot, or with `from_anchor` the rest of the block.
    pub fn slots(&self, batch: &Packed<'_>, layout: BlockLayout, gamma: Option<f64>) -> Slots {
        // The first label of a block has the weight 1 in either layout.
        let decay = decay(layout.size + 1, gamma);
        let mut slots = Slots {
            labels_per_slot: match batch.target_labels {
                None => 1,
                Some(TargetLabels::TopK(labels)) => labels.k,
                Some(TargetLabels::States(_)) => 0,
            },
            ..Slots::default()
        };
        let rows = self.rows.iter().zip(batch.offsets()).zip(batch.lengths);
        let blocks = rows.flat_map(|((anchors, start), &len)| anchors.iter().map(move |&a| (start, a as usize, len)));
        for (block, (start, anchor, len)) in blocks.enumerate() {
            for slot in 0..layout.size {
                let Some(distance) = layout.distance(slot) else { continue };
                let position = anchor + distance;
                if position >= len as usize || batch.loss_mask[start + position] == 0 {
                    if layout.from_anchor { break } else { continue }
                }
                slots.indices.push((block * layout.size + slot) as i64);
                slots.previous_tokens.push((start + position) as i64 - 1);
                slots.tokens.push(batch.ids[start + position].into());
                slots.weights.push(decay[distance] as f32);
                match batch.target_labels {
                    None => {
                        slots.labels.push(batch.ids[start + position].into());
                        slots.probabilities.push(1.0);
                    }
                    Some(TargetLabels::States(_)) => {}
                    Some(TargetLabels::TopK(TopKLabels { k, ids, probabilities })) => {
                        let at = (start + position) * k..(start + position + 1) * k;
                        slots.labels.extend(ids[at.clone()].iter().map(|&id| i64::from(id)));
                        slots.probabilities.extend(&probabilities[at]);
                    }
                }
            }
        }
        slots
    }
}

/// Decay weight of each slot by distance from the anchor: `exp(-max(j - 1, 0) / gamma)`. `None` or 0 gives equal
/// weights.
pub fn decay(block_size: usize, gamma: Option<f64>) -> Vec<f64> {
    let gamma = gamma.filter(|&gamma| gamma > 0.0);
    (0..block_size).map(|j| gamma.map_or(1.0, |gamma| (-(j.saturating_sub(1) as f64) / gamma).exp())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::{Device, Kind, Tensor};

    fn rows() -> impl Strategy<Value = (Vec<u8>, Vec<u32>)> {
        prop::collection::vec(prop::collection::vec(0u8..2, 0..40), 1..5).prop_map(|rows| {
            let lengths = rows.iter().map(|row| row.len() as u32).collect();
            (rows.concat(), lengths)
        })
    }

    proptest! {
        /// Automodel#3673: the number of blocks of a batch was known only after it had run out of memory.
        #[test]
        fn automodel_3673_anchors_are_sorted_supervised_and_limited(
            (mask, lengths) in rows(), limit in 0usize..30, seed: u64,
        ) {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let anchors = Anchors::sample(&mask, &lengths, limit, &mut rng).unwrap();
            anchors.check(&lengths).unwrap();
            let mut start = 0;
            for (row, &len) in anchors.rows.iter().zip(&lengths) {
                let mask = &mask[start..start + len as usize];
                prop_assert!(row.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(row.iter().all(|&a| mask[a as usize] == 1 && mask[a as usize + 1] == 1));
                prop_assert_eq!(row.len(), limit.min(candidates(mask).len()));
                start += len as usize;
            }
        }
    }

    #[test]
    fn candidates_are_drawn_uniformly() {
        let mask = [1u8; 9];
        let mut seen = [0u32; 9];
        for index in 0..4000 {
            let mut rng = job_rng(11, JobId { epoch: 0, index });
            for &a in &Anchors::sample(&mask, &[9], 3, &mut rng).unwrap().rows[0] {
                seen[a as usize] += 1;
            }
        }
        // Three of eight candidates; a fair draw deviates from 1500 by more than 150 once in 10^6 runs.
        assert!(seen[..8].iter().all(|&n| n.abs_diff(1500) < 150) && seen[8] == 0, "{seen:?}");
    }

    #[test]
    fn each_job_has_its_own_random_stream() {
        let draw = |seed, epoch, index| {
            Anchors::sample(&[1; 200], &[200], 5, &mut job_rng(seed, JobId { epoch, index })).unwrap()
        };
        assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
        for other in [draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4)] {
            assert_ne!(draw(1, 2, 3), other);
        }
    }

    fn packed<'a>(hidden: &'a Tensor, ids: &'a [i32], loss_mask: &'a [u8], lengths: &'a [u32]) -> Packed<'a> {
        Packed::of_ids(hidden, ids, loss_mask, lengths)
    }

    /// SpecForge#455: labels shifted by one gave a good loss and an acceptance of 1.29.
    #[test]
    fn specforge_455_labels_are_not_shifted() {
        let hidden = Tensor::zeros([7, 1], (Kind::Float, Device::Cpu));
        let (ids, mask, lengths) = ([10, 11, 12, 13, 20, 21, 22], [1; 7], [4, 3]);
        let batch = packed(&hidden, &ids, &mask, &lengths);
        let anchors = Anchors { rows: vec![vec![1], vec![0]] };
        assert_eq!(anchors.ids(&batch), [11, 20]);
        let slots = anchors.slots(&batch, BlockLayout::dflash(4), None);
        // Slot j holds the token at anchor + j; slot 0 is given; no block continues into the next row.
        assert_eq!(slots.indices, [1, 2, 5, 6]);
        assert_eq!(slots.labels, [12, 13, 21, 22]);
        assert_eq!(slots.previous_tokens, [1, 2, 4, 5]);
    }

    /// A gap in the loss mask excludes its own slot and does not end the block.
    #[test]
    fn gap_in_the_loss_mask_does_not_end_the_block() {
        let hidden = Tensor::zeros([6, 1], (Kind::Float, Device::Cpu));
        let batch = packed(&hidden, &[1, 2, 3, 4, 5, 6], &[1, 1, 0, 1, 0, 1], &[6]);
        let slots = Anchors { rows: vec![vec![0]] }.slots(&batch, BlockLayout::dflash(6), Some(2.0));
        assert_eq!(slots.indices, [1, 3, 5]);
        let want = [1.0, (-1.0f64).exp() as f32, (-2.0f64).exp() as f32];
        assert_eq!(slots.weights, want);
    }

    /// DSpark's slot `k` predicts the token after it, and the first slot that is not supervised ends the block.
    #[test]
    fn all_slots_predict_from_the_anchor_until_the_first_gap() {
        let hidden = Tensor::zeros([7, 1], (Kind::Float, Device::Cpu));
        let batch = packed(&hidden, &[1, 2, 3, 4, 5, 6, 7], &[1, 1, 1, 0, 1, 1, 1], &[7]);
        let layout = BlockLayout { size: 3, from_anchor: true };
        let slots = Anchors { rows: vec![vec![0, 4]] }.slots(&batch, layout, Some(2.0));
        assert_eq!((slots.indices, slots.tokens), (vec![0, 1, 3, 4], vec![2, 3, 6, 7]));
        let second = (-0.5f64).exp() as f32;
        assert_eq!((slots.previous_tokens, slots.weights), (vec![0, 1, 4, 5], vec![1.0, second, 1.0, second]));
    }

    /// SpecForge#463: the trainer had no decay, so late slots weighed as much as the first.
    #[test]
    fn specforge_463_weights_decay_from_the_first_trained_slot() {
        assert_eq!(decay(4, None), [1.0; 4]);
        assert_eq!(decay(4, Some(0.0)), [1.0; 4]);
        assert_eq!(decay(5, Some(2.0)), [1.0, 1.0, (-0.5f64).exp(), (-1.0f64).exp(), (-1.5f64).exp()]);
    }

    /// ModelOpt#1211: one anchor fewer than the number of candidates was drawn.
    #[test]
    fn modelopt_1211_all_candidates_can_be_drawn() {
        let anchors = Anchors::sample(&[1; 5], &[5], 99, &mut ChaCha8Rng::seed_from_u64(0)).unwrap();
        assert_eq!(anchors.rows, [[0, 1, 2, 3]]);
    }
}
