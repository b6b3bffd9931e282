//! Properties that any drafter must have (`docs/dflash.md#properties`), on random models, rows and anchors. Each case is a
//! function of one seed, which a failure prints.

use super::files::{close_to_largest, gap, largest};
use super::random::{Scene, scene};
use draftmill::hf::draft::LayerType;
use draftmill::model::batch::Packed;
use draftmill::model::drafter::anchors::Anchors;
use draftmill::model::drafter::head::layout;
use draftmill::model::drafter::reference::Dense;
use draftmill::model::drafter::{AttentionBackend, Drafter};
use draftmill::model::loss::head_loss::Tile;
use draftmill::model::loss::weighting::Weighting;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

/// Limit relative to a tensor's largest entry, in float32.
const LIMIT: f64 = 3e-5;

fn cases() -> ProptestConfig {
    ProptestConfig { cases: 40, ..ProptestConfig::default() }
}

pub fn any_way() -> impl Strategy<Value = AttentionBackend> {
    prop_oneof![Just(AttentionBackend::Plain), Just(AttentionBackend::Kernel)]
}

/// Limit for the counts of correct tokens: two logits that differ by a rounding may swap.
fn alike(one: f64, two: f64) -> bool {
    (one - two).abs() <= 1.0
}

/// Returns the slots of one block, `[block_size, hidden]`.
fn block(scene: &Scene, hidden: &Tensor, index: usize) -> Tensor {
    let size = scene.config.block_size as i64;
    hidden.narrow(0, index as i64 * size, size)
}

/// Returns row, start of the row and anchor of every block, in order.
fn blocks(scene: &Scene) -> Vec<(usize, usize, u32)> {
    let offsets = scene.packed().offsets();
    let rows = scene.anchors.rows.iter().enumerate();
    rows.flat_map(|(row, anchors)| anchors.iter().map(|&a| (row, offsets[row], a)).collect::<Vec<_>>()).collect()
}

proptest! {
    #![proptest_config(cases())]

    /// The training path computes no filler, cuts the context, groups blocks and has a hand-written gradient of the head;
    /// the dense reference implementation does none of it. Small groups share much context, which the kernel handles.
    #[test]
    fn the_path_that_trains_equals_the_dense_oracle(seed: u64, group_slots in 1usize..200, by in any_way()) {
        let scene = scene(seed);
        let drafter = scene.drafter_with(|options| (options.group_slots, options.attention) = (group_slots, by));
        let (report, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        let supervised = scene.anchors.slots(&scene.packed(), layout(&scene.config), scene.gamma).indices.len();
        prop_assert_eq!(gradient.is_some(), supervised > 0);
        let Some(gradient) = gradient else { return Ok(()) };
        let trace = drafter.trace(&Dense::pad(&scene.packed(), &scene.anchors).unwrap()).unwrap();
        prop_assert!((report.loss_numerator / trace.numerator - 1.0).abs() < 1e-5);
        prop_assert!((report.loss_denominator / trace.denominator - 1.0).abs() < 1e-5);
        prop_assert!(alike(report.correct, trace.correct));
        prop_assert_eq!(gradient.names(), trace.gradient.names());
        for ((name, got), want) in gradient.iter().zip(trace.gradient.tensors()) {
            // With every anchor at 0 the context has no effect: exactly zero on both sides.
            if largest(want) > 0.0 {
                close_to_largest(name, got, want, LIMIT);
            } else {
                prop_assert_eq!(largest(got), 0.0);
            }
        }
    }

    /// Many blocks at once equal the same blocks alone, each with only the inputs of a serving engine.
    #[test]
    fn blocks_at_once_equal_single_blocks_at_inference(seed: u64) {
        let scene = scene(seed);
        let drafter = scene.drafter();
        let hidden = drafter.hidden(&scene.packed(), &scene.anchors);
        if scene.anchors.count() == 0 {
            return Ok(());
        }
        let hidden = hidden.unwrap();
        for (index, (_, start, anchor)) in blocks(&scene).into_iter().enumerate() {
            let context = scene.hidden.narrow(0, start as i64, anchor.into());
            let alone = drafter.draft_block(&context, scene.ids[start + anchor as usize] as u32).unwrap();
            close_to_largest(&format!("block at {anchor}"), &block(&scene, &hidden, index), &alone, LIMIT);
        }
    }

    /// SpecForge#470: with overlapping blocks, visibility by block index let later context leak in. Changes of hidden
    /// states at or after an anchor have no effect on its block; changes before it have one.
    #[test]
    fn specforge_470_hidden_states_at_or_after_the_anchor_change_nothing(seed: u64) {
        let scene = scene(seed);
        let drafter = scene.drafter();
        let blocks = blocks(&scene);
        prop_assume!(!blocks.is_empty());
        let chosen = seed as usize % blocks.len();
        let (row, start, anchor) = blocks[chosen];
        let before = drafter.hidden(&scene.packed(), &scene.anchors).unwrap();
        let after_change = |from: usize, to: usize| {
            let other = scene.hidden.copy();
            let _ = other.narrow(0, from as i64, (to - from) as i64).fill_(9.0);
            let packed = Packed { hidden: &other, ..scene.packed() };
            drafter.hidden(&packed, &scene.anchors).unwrap()
        };
        let end = start + scene.lengths[row] as usize;
        let later = after_change(start + anchor as usize, end);
        prop_assert_eq!(gap("later", &block(&scene, &later, chosen), &block(&scene, &before, chosen)), 0.0);
        // With a window of one position a slot sees only itself.
        let config = &scene.config;
        let blind = config.sliding_window == Some(1) && !config.layer_types.contains(&LayerType::Full);
        if anchor > 0 && !blind {
            let earlier = after_change(start + anchor as usize - 1, start + anchor as usize);
            prop_assert!(gap("earlier", &block(&scene, &earlier, chosen), &block(&scene, &before, chosen)) > 1e-5);
        }
    }

    /// SpecForge#731: results depended on which rows shared a batch.
    #[test]
    fn specforge_731_a_batch_is_the_sum_of_its_rows(seed: u64) {
        let scene = scene(seed);
        whole_is_the_sum_of_its_rows(&scene, &scene.drafter());
    }

    /// Automodel#2572: D-PACE's scale depended on the distribution of rows to ranks.
    #[test]
    fn automodel_2572_d_pace_weighs_alike_however_rows_are_split(seed: u64, alpha in 0.0f64..1.0) {
        let scene = scene(seed);
        let drafter = scene.drafter_with(|options| options.weighting = Weighting::DPace(alpha));
        whole_is_the_sum_of_its_rows(&scene, &drafter);
    }

    /// SpecForge#501: blocks rounded up to a tile read missing anchors. The numbers do not depend on the groups of blocks
    /// or on the slots of a tile of the head.
    #[test]
    fn specforge_501_group_and_tile_sizes_change_nothing(
        seed: u64, group_slots in 1usize..200, slots in 0usize..50, tokens in 1usize..170, by in any_way(),
    ) {
        let scene = scene(seed);
        let (one, first) = scene.drafter().loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        let other = scene.drafter_with(|options| {
            options.group_slots = group_slots;
            options.attention = by;
            options.tile = Tile { slots, tokens };
            // A layer that is kept for the backward equals one that is recomputed.
            options.recompute = true;
        });
        let (two, second) = other.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        prop_assert!((one.loss_numerator - two.loss_numerator).abs() <= 1e-5 * one.loss_numerator);
        prop_assert!(alike(one.correct, two.correct));
        prop_assert_eq!(first.is_some(), second.is_some());
        for (first, second) in first.iter().zip(&second) {
            for ((name, first), second) in first.iter().zip(second.tensors()) {
                if largest(second) > 0.0 {
                    close_to_largest(name, first, second, LIMIT);
                }
            }
        }
    }
}

/// Returns losses, counts and gradients of all rows at once, and of each row alone.
fn whole_is_the_sum_of_its_rows(scene: &Scene, drafter: &Drafter) {
    let (whole, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
    let mut sum = draftmill_actors::messages::engine::MicroReport::default();
    let mut parts = drafter.params().zeros_like().unwrap();
    for (row, start) in scene.packed().offsets().into_iter().enumerate() {
        let tokens = start..start + scene.lengths[row] as usize;
        let hidden = scene.hidden.narrow(0, start as i64, tokens.len() as i64);
        let (ids, mask) = (&scene.ids[tokens.clone()], &scene.loss_mask[tokens]);
        let packed = Packed::of_ids(&hidden, ids, mask, &scene.lengths[row..=row]);
        let anchors = Anchors { rows: vec![scene.anchors.rows[row].clone()] };
        let (report, gradient) = drafter.loss_and_gradient(&packed, &anchors).unwrap();
        sum.add(&report);
        for (sum, part) in parts.tensors_mut().iter_mut().zip(gradient.iter().flat_map(|set| set.tensors())) {
            *sum += part;
        }
    }
    assert!((whole.loss_numerator - sum.loss_numerator).abs() <= 1e-5 * whole.loss_numerator);
    assert!((whole.loss_denominator - sum.loss_denominator).abs() <= 1e-9 * whole.loss_denominator);
    assert!(alike(whole.correct, sum.correct));
    assert_eq!((whole.supervised, whole.anchors, whole.tokens), (sum.supervised, sum.anchors, sum.tokens));
    for ((name, whole), parts) in gradient.iter().flat_map(|set| set.iter()).zip(parts.tensors()) {
        if largest(parts) > 0.0 {
            close_to_largest(name, whole, parts, LIMIT);
        }
    }
}

/// One block in training form, at any anchor, is the inference form.
#[test]
fn a_single_training_block_equals_the_inference_forward() {
    let mut scene = scene(3);
    let len = scene.lengths[0];
    assert!(len > 2);
    for anchor in [0, 1, len - 2, len - 1] {
        scene.anchors.rows.fill(Vec::new());
        scene.anchors.rows[0] = vec![anchor];
        let drafter = scene.drafter();
        let trained = drafter.hidden(&scene.packed(), &scene.anchors).unwrap();
        let context = scene.hidden.narrow(0, 0, anchor.into());
        let drafted = drafter.draft_block(&context, scene.ids[anchor as usize] as u32).unwrap();
        close_to_largest(&format!("anchor {anchor}"), &trained, &drafted, LIMIT);
    }
}

/// SpecForge#427: a causal mask inside the block made weak drafts. On full layers a slot attends to the slots after it,
/// so a longer block changes it; on sliding layers it does not.
#[test]
fn specforge_427_full_layers_look_both_ways_inside_the_block() {
    for (layer_type, window) in [(LayerType::Full, None), (LayerType::Sliding, Some(5))] {
        let mut scene = scene(8);
        scene.config.layer_types.fill(layer_type);
        scene.config.sliding_window = window;
        let first_slots = |size: usize| {
            let mut scene = scene.clone_with(|config| config.block_size = size);
            scene.anchors.rows[0] = vec![2];
            block(&scene, &scene.drafter().hidden(&scene.packed(), &scene.anchors).unwrap(), 0).narrow(0, 0, 3)
        };
        let moved = gap("slots", &first_slots(3), &first_slots(6));
        match layer_type {
            LayerType::Full => assert!(moved > 1e-4, "later slots are not seen"),
            LayerType::Sliding => assert!(moved < 1e-5, "later slots are seen: {moved}"),
        }
    }
}

/// SpecForge#500 and #604: the configured mask token was ignored. Its embedding row, and no other unused one, matters.
#[test]
fn specforge_500_every_slot_but_the_first_holds_the_configured_mask_token() {
    let scene = scene(21);
    let used: Vec<i64> = scene.ids.iter().map(|&id| i64::from(id)).collect();
    let mask = i64::from(scene.config.mask_token_id);
    let unused = (0..scene.config.vocab_size as i64).find(|id| *id != mask && !used.contains(id)).unwrap();
    let with_row_changed = |row: i64| {
        let drafter = scene.drafter();
        let _ = drafter.shared().embedding.get(row).fill_(0.5);
        drafter.hidden(&scene.packed(), &scene.anchors).unwrap()
    };
    let plain = scene.drafter().hidden(&scene.packed(), &scene.anchors).unwrap();
    assert_eq!(gap("another row", &with_row_changed(unused), &plain), 0.0);
    let size = scene.config.block_size as i64;
    let moved = (with_row_changed(mask) - &plain).abs().amax([1i64].as_slice(), false);
    for slot in 0..moved.size()[0] {
        assert!(slot % size == 0 || moved.double_value(&[slot]) > 1e-6, "slot {slot} holds another token");
    }
}

/// Automodel#2826: blocks without any context, and fillers in the dense form, must not become NaN.
#[test]
fn automodel_2826_blocks_without_context_and_fillers_stay_finite() {
    let mut scene = scene(5);
    scene.loss_mask.fill(1);
    scene.anchors.rows.fill(Vec::new());
    let longest = (0..scene.lengths.len()).max_by_key(|&row| scene.lengths[row]).unwrap();
    assert!(scene.lengths[longest] > 2 && scene.lengths.len() > 1, "another row is all fillers");
    scene.anchors.rows[longest] = vec![0, 1];
    let drafter = scene.drafter();
    let trace = drafter.trace(&Dense::pad(&scene.packed(), &scene.anchors).unwrap()).unwrap();
    let (_, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
    let sets = [trace.gradient, gradient.unwrap()];
    let all = sets.iter().flat_map(|set| set.tensors()).chain([&trace.hidden]);
    for x in all {
        assert_eq!(i64::try_from(x.isfinite().all()).unwrap(), 1);
    }
}

/// speculators#703: positions began at 1. Context counts from 0, and a block from its anchor's position.
#[test]
fn speculators_703_positions_begin_at_zero() {
    let scene = scene(5);
    let dense = Dense::pad(&scene.packed(), &scene.anchors).unwrap();
    let positions = scene.drafter().trace(&dense).unwrap().positions;
    let size = scene.config.block_size;
    for row in 0..dense.rows {
        let got = Vec::<i64>::try_from(positions.get(row as i64)).unwrap();
        let anchors = &dense.anchors[row * dense.blocks..(row + 1) * dense.blocks];
        let slots = anchors.iter().flat_map(|&anchor| anchor..anchor + size as i64);
        assert_eq!(got, (0..dense.width as i64).chain(slots).collect::<Vec<_>>());
    }
}

/// Automodel: a rank without an anchor left the others waiting. Here it is reported, and its sums are zero.
#[test]
fn automodel_a_batch_without_an_anchor_is_no_gradient_and_adds_nothing() {
    let mut scene = scene(5);
    scene.anchors.rows.fill(Vec::new());
    let (report, gradient) = scene.drafter().loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
    assert!(gradient.is_none());
    assert_eq!((report.loss_numerator, report.loss_denominator, report.supervised, report.anchors), (0.0, 0.0, 0.0, 0));
    assert!(report.tokens > 0);
}

/// The loss of initial weights is that of a uniform guess among the vocabulary.
#[test]
fn the_first_loss_is_near_the_logarithm_of_the_vocabulary() {
    for seed in 0..5 {
        let mut scene = scene(seed);
        scene.fresh(seed);
        let (report, _) = scene.drafter().loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        let guess = (scene.config.vocab_size as f64).ln();
        assert!(report.supervised > 0.0, "seed {seed} supervises nothing");
        assert!((report.loss() - guess).abs() < 0.05, "seed {seed}: {} against {guess}", report.loss());
    }
}

/// bf16 activations follow fp32 within their rounding; weights and gradients stay in fp32.
#[test]
fn bf16_compute_keeps_fp32_weights_and_gradients() {
    let scene = scene(34);
    let (want, exact) = scene.drafter().loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
    let exact = exact.unwrap();
    for (group_slots, attention) in
        [(256, AttentionBackend::Plain), (256, AttentionBackend::Kernel), (1, AttentionBackend::Kernel)]
    {
        let drafter = scene.drafter_with(|options| {
            (options.kind, options.group_slots, options.attention) = (Kind::BFloat16, group_slots, attention);
        });
        let (got, gradient) = drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
        assert!(drafter.params().tensors().iter().all(|x| x.kind() == Kind::Float && !x.requires_grad()));
        assert!((got.loss() / want.loss() - 1.0).abs() < 0.03, "{} against {}", got.loss(), want.loss());
        let gradient = gradient.unwrap();
        assert!(gradient.is_flat(), "what is converted anyway is converted into one buffer");
        for ((name, got), want) in gradient.iter().zip(exact.tensors()) {
            assert_eq!(got.kind(), Kind::Float, "{name}");
            let dot = got.flatten(0, -1).dot(&want.flatten(0, -1));
            let cosine = f64::try_from(dot / got.norm() / want.norm()).unwrap();
            assert!(cosine > 0.98, "{name} by {attention:?}: {cosine}");
        }
    }
}

/// The same batch gives the same bits, and a forward leaves no gradient on the leaves.
#[test]
fn a_step_is_repeatable_and_leaves_no_gradient_behind() {
    let scene = scene(13);
    for by in [AttentionBackend::Plain, AttentionBackend::Kernel] {
        repeatable(&scene, &scene.drafter_with(|options| options.attention = by));
    }
}

fn repeatable(scene: &Scene, drafter: &Drafter) {
    let run = || drafter.loss_and_gradient(&scene.packed(), &scene.anchors).unwrap();
    let ((one, first), (two, second)) = (run(), run());
    assert_eq!(one, two);
    for (first, second) in first.unwrap().tensors().iter().zip(second.unwrap().tensors()) {
        assert!(first.equal(second) && !first.requires_grad() && first.device() == Device::Cpu);
    }
    assert!(drafter.params().tensors().iter().all(|leaf| !leaf.grad().defined()));
}
