//! Leading correct run of a block: the number of its first predictions that are right without a gap.

use crate::model::drafter::anchors::BlockLayout;

/// Sums over blocks with a supervised slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    /// Tokens of all leading runs, without the target's own token after them.
    pub tokens: u64,
    pub blocks: u64,
}

/// Sums the leading runs. `indices` are the supervised slots in ascending order, slot `j` of block `n` as
/// `n * layout.size + j`; `correct` says for each if the prediction is the label.
///
/// A slot that is not supervised ends its block's run, as in speculators: nothing is known of the tokens after it. With
/// labels from the target's own greedy answers and without gaps, the run is the number of tokens that greedy verification
/// accepts.
pub fn leading_runs(indices: &[i64], correct: &[bool], layout: &BlockLayout) -> Runs {
    let size = layout.size as i64;
    let first = i64::from(!layout.from_anchor);
    let mut runs = Runs::default();
    let slots: Vec<(i64, bool)> = indices.iter().copied().zip(correct.iter().copied()).collect();
    for block in slots.chunk_by(|a, b| a.0 / size == b.0 / size) {
        let in_order = (first..).zip(block).take_while(|(slot, (index, right))| index % size == *slot && *right);
        runs.tokens += in_order.count() as u64;
        runs.blocks += 1;
    }
    runs
}
