//! Terms of the loss of a slot: distances between the teacher's distribution `p` and the drafter's `q`.

/// Weights of the terms. The loss is their sum, not normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossTerms {
    /// Cross-entropy of one token, `-ln q`.
    pub ce: f64,
    /// `KL(p || q)`.
    pub kl: f64,
    /// `KL(q || p)`, which needs a teacher with a probability for every token.
    pub reverse_kl: f64,
    /// Total variation `1 - alpha`, with the acceptance `alpha = sum min(p, q)`.
    pub tv: f64,
    /// `lambda KL(p || q) + (1 - lambda) TV` with the constant `lambda = exp(-lk_eta alpha)` (arXiv 2602.23881).
    pub lk: f64,
    /// Total variation from end to end, by block: one minus the mean of the products of `alpha` up to each slot.
    pub e2e_tv: f64,
    pub lk_eta: f64,
}

/// Token of the cross-entropy, of D-PACE and of accuracy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CeLabel {
    /// The first label: the data's token, or the target's most likely one with labels from the target.
    #[default]
    Label,
    /// The data's token.
    Data,
}

/// `lk_eta` of the paper.
pub const LK_ETA: f64 = 3.0;

impl LossTerms {
    const NONE: LossTerms =
        LossTerms { ce: 0.0, kl: 0.0, reverse_kl: 0.0, tv: 0.0, lk: 0.0, e2e_tv: 0.0, lk_eta: LK_ETA };

    /// `KL(p || q)` alone: with one label per slot, the cross-entropy.
    pub const KL: LossTerms = LossTerms { kl: 1.0, ..LossTerms::NONE };

    /// DSpark's recipe: 0.1 of the cross-entropy and 0.9 of `sum |p - q|`, which is twice the total variation.
    pub const DSPARK: LossTerms = LossTerms { ce: 0.1, tv: 1.8, ..LossTerms::NONE };

    /// One term alone.
    pub fn only(set: impl FnOnce(&mut LossTerms)) -> LossTerms {
        let mut terms = LossTerms::NONE;
        set(&mut terms);
        terms
    }

    /// True if the loss is a mean over blocks, not over slots.
    pub fn by_block(&self) -> bool {
        self.e2e_tv > 0.0 && !self.by_slot()
    }

    /// True if a term of single slots has a weight.
    pub fn by_slot(&self) -> bool {
        [self.ce, self.kl, self.reverse_kl, self.tv, self.lk].iter().any(|&weight| weight > 0.0)
    }

    /// True if a term needs the divergence of each slot.
    pub(super) fn needs_kl(&self) -> bool {
        self.kl > 0.0 || self.lk > 0.0
    }
}
