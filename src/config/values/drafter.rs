//! Words of the drafter's settings.

use super::*;

words! {
    /// Weights of a block's slots in the loss.
    SlotWeights {
        /// Exponential decay with the distance from the anchor.
        Decay = "decay",
        /// D-PACE: the slot's effect on the expected number of accepted tokens.
        DPace = "d-pace",
        /// Equal weights.
        None = "none",
    }
}
words! {
    /// Token of the cross-entropy, of D-PACE and of accuracy.
    #[derive(Default)]
    CeLabel {
        /// First label of `drafter.labels`: the data's token, or the target's most likely one.
        #[default]
        Labels = "labels",
        /// The data's token.
        Data = "data",
    }
}
words! {
    /// Attention of a drafter layer to the context.
    LayerAttention {
        /// The whole context before the anchor, and the whole block.
        Full = "full",
        /// The context within a window before each slot, and the slots up to it.
        Sliding = "sliding",
    }
}
words! {
    /// Start of a sliding layer's window in training.
    WindowStart {
        /// Each slot: the window ends with the slot, as in z-lab's package, SpecForge and engines.
        Slot = "slot",
        /// The anchor: all slots see the same positions before it, as in speculators.
        Anchor = "anchor",
    }
}
words! {
    /// Draft head.
    Head {
        /// DFlash: slots behind the anchor predict their own positions.
        Dflash = "dflash",
        /// DSpark: all slots predict the position after them, with a bias from the token before.
        Dspark = "dspark",
        /// DFlash 2: convolutions around each sublayer, and a selector among the most likely tokens.
        Dflash2 = "dflash2",
    }
}
words! {
    /// Form of DSpark's Markov head.
    MarkovHead {
        Vanilla = "vanilla",
        Gated = "gated",
        Rnn = "rnn",
    }
}
words! {
    /// Treatment of a slot whose label is not among the candidates of DFlash 2's selector.
    #[derive(Default)]
    MissingLabel {
        /// The selector does not train there, and its mean is over the other slots (Automodel).
        #[default]
        Skip = "skip",
        /// The label replaces the least likely candidate (speculators).
        Inject = "inject",
    }
}
words! {
    /// Input of DSpark's confidence head.
    ConfidenceHead {
        /// Hidden state and the Markov embedding of the token before.
        Markov = "markov",
        /// Hidden state alone.
        Hidden = "hidden",
        /// No confidence head.
        None = "none",
    }
}
