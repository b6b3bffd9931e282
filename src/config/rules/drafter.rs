//! Rules for section `[drafter]`.

use super::Audit;
use crate::config::{
    values::{Auto, ConfidenceHead, Dtype, Head, InitMethod, Labels, TopK},
    wire::Wire,
};

impl Audit<'_> {
    pub(super) fn drafter(&mut self) {
        let Wire { drafter, data, .. } = &self.written.wire;
        let block = drafter.block_size;
        self.require(
            (2..=data.max_length.max(2)).contains(&block),
            "drafter.block_size",
            "a block has one known and at least one predicted token, and must fit into a sample",
            format!("choose from 2 to data.max_length = {}", data.max_length),
        );
        self.require(
            !drafter.devices.is_empty(),
            "drafter.devices",
            "names no device, so there is no drafter",
            "name at least one device, for example [\"cpu\"]",
        );
        self.require(
            drafter.head_dim.given().is_none_or(|dim| dim.is_multiple_of(2)),
            "drafter.head_dim",
            "is odd, and rotary position embeddings need an even number",
            "choose an even number",
        );
        self.require(
            drafter.dtype != Auto::Set(Dtype::F16),
            "drafter.dtype",
            "f16 gradients overflow",
            "choose \"bf16\" or \"f32\"",
        );
        self.require(
            drafter.loss_decay_gamma.or(|| 0.0).is_finite() && drafter.loss_decay_gamma.or(|| 0.0) >= 0.0,
            "drafter.loss_decay_gamma",
            "is out of range",
            "choose a number of at least 0 (no decay), or \"auto\"",
        );
        self.require(
            drafter.d_pace_alpha > 0.0 && drafter.d_pace_alpha <= 1.0,
            "drafter.d_pace_alpha",
            "is out of range: at 0 an untrained drafter would have weights of almost 0 and learn nothing",
            "choose a number above 0 and at most 1",
        );
        self.require(
            drafter.lk_eta.is_finite() && drafter.lk_eta >= 0.0,
            "drafter.lk_eta",
            "is out of range",
            "choose a number of at least 0, such as 3",
        );
        self.require(
            drafter.confidence_loss_weight.is_finite() && drafter.confidence_loss_weight >= 0.0,
            "drafter.confidence_loss_weight",
            "is out of range",
            "choose a number of at least 0, such as 1",
        );
        self.require(
            drafter.selector_loss_weight.is_finite() && drafter.selector_loss_weight >= 0.0,
            "drafter.selector_loss_weight",
            "is out of range",
            "choose a number of at least 0, such as 1",
        );
        let kinds = drafter.layer_types.given().map_or(&[][..], Vec::as_slice);
        self.require(
            kinds.is_empty() || kinds.len() == drafter.layers as usize,
            "drafter.layer_types",
            format!("has {} entries for {} layers", kinds.len(), drafter.layers),
            "list one entry per layer, or choose \"auto\"",
        );
        self.require(
            drafter.sliding_window > 0,
            "drafter.sliding_window",
            "is 0, but a slot sees at least itself",
            "choose a number of at least 1",
        );
        let whole = drafter.labels == Labels::Target && drafter.label_top_k == TopK::All;
        self.require(
            whole || drafter.loss.given().is_none_or(|loss| loss.reverse_kl == 0.0),
            "drafter.loss",
            "has the reverse divergence, which needs a probability for every token",
            "set drafter.labels = \"target\" and drafter.label_top_k = \"all\", or choose \"kl\"",
        );
        let reads_markov = drafter.confidence_head == ConfidenceHead::Markov;
        self.require(
            drafter.head != Head::Dspark || drafter.markov_rank > 0 || !reads_markov,
            "drafter.markov_rank",
            "is 0, but the confidence head reads the Markov embedding",
            "choose a rank above 0, or set drafter.confidence_head = \"hidden\"",
        );
        for (key, value, most) in [
            ("drafter.markov_rank", drafter.markov_rank, 1 << 14),
            ("drafter.conv_taps", drafter.conv_taps, 64),
            ("drafter.conv_group", drafter.conv_group, 1 << 14),
            ("drafter.selector_rank", drafter.selector_rank, 1 << 14),
            ("drafter.selector_top_k", drafter.selector_top_k, 1024),
        ] {
            let least = u32::from(key != "drafter.markov_rank");
            self.require(
                (least..=most).contains(&value),
                key,
                "is out of range",
                format!("choose from {least} to {most}"),
            );
        }
        self.require(
            drafter.init_method == InitMethod::Random || drafter.layers >= 2,
            "drafter.init_method",
            "least-squares initialisation needs two layers: one for the anchor, one for the context",
            "choose \"random\", or set drafter.layers to at least 2",
        );
        self.require(
            drafter.init_method == InitMethod::Random || drafter.init_from == Auto::Auto,
            "drafter.init_method",
            "has no effect, because drafter.init_from provides the weights",
            "choose \"random\", or set drafter.init_from = \"auto\"",
        );
        self.require(
            !matches!(drafter.label_top_k, TopK::Tokens(0 | 1025..)),
            "drafter.label_top_k",
            "is out of range",
            "choose a number from 1 to 1024 (16 is usually enough), or \"all\"",
        );
        self.require(
            matches!(drafter.label_top_k, TopK::Tokens(0 | 1)) || drafter.labels == Labels::Target,
            "drafter.label_top_k",
            "labels from the data have no probabilities",
            "set drafter.labels = \"target\", or set this key to 1",
        );
    }
}
