//! Leading correct run of each block, in both definitions of the public implementations.

use super::case::*;
use draftmill::model::drafter::anchors::BlockLayout;
use draftmill::model::drafter::head::runs::{Runs, leading_runs};

/// Compares the runs of blocks `[blocks, slots]`, and returns (sum with gaps as ends, sum over gaps, blocks).
fn check(predicted: &[i64], labels: &[i64], mask: &[i64], ends: &[i64], skips: &[i64]) -> (u64, u64, u64) {
    let size = labels.len() / ends.len();
    let layout = BlockLayout::dflash(size);
    let mut sums = (0, 0, 0);
    for block in 0..ends.len() {
        let slots = (1..size).filter(|slot| mask[block * size + slot] != 0);
        let indices: Vec<i64> = slots.map(|slot| slot as i64).collect();
        let at = |slot: &i64| block * size + *slot as usize;
        let correct: Vec<bool> = indices.iter().map(|slot| predicted[at(slot)] == labels[at(slot)]).collect();
        let (run, over) =
            (leading_runs(&indices, &correct, &layout), leading_runs_over_gaps(&indices, &correct, &layout));
        assert_eq!((run.tokens as i64, over.tokens as i64), (ends[block], skips[block]), "block {block}");
        sums = (sums.0 + run.tokens, sums.1 + over.tokens, sums.2 + run.blocks);
    }
    sums
}

#[test]
fn runs_of_random_blocks_with_gaps_match() {
    let (json, files) = (json("eal_case.json"), open("eal_case.safetensors"));
    let of = |name: &str| ints(&files, &format!("random.{name}"));
    let (ends, skips) = (of("run_invalid_slot_ends_it"), of("run_invalid_slot_skipped"));
    let (run, over, blocks) = check(&of("predicted_ids"), &of("label_ids"), &of("mask"), &ends, &skips);
    let want = &json["random"];
    assert_eq!(blocks as f64, number(&want["speculators_blocks"]));
    assert_eq!((run + blocks) as f64, number(&want["speculators_sum_with_bonus"]));
    assert_eq!((over + blocks) as f64, number(&want["automodel_sum_with_bonus"]));
}

#[test]
fn runs_of_the_model_match_for_both_kinds_of_labels() {
    let (json, files) = (json("eal_case.json"), open("eal_case.safetensors"));
    let keep = tensor(&files, "block_keep").flatten(0, -1).nonzero().flatten(0, -1);
    let kept = |name: &str| {
        let x = tensor(&files, name).to_kind(tch::Kind::Int64).flatten(0, 1).index_select(0, &keep);
        Vec::<i64>::try_from(x.flatten(0, -1)).unwrap()
    };
    for (kind, labels) in [("data", "label_ids"), ("teacher", "teacher_argmax")] {
        let runs = |how: &str| kept(&format!("{kind}.run_invalid_slot_{how}"));
        let (run, over, blocks) =
            check(&kept("predicted_ids"), &kept(labels), &kept("mask"), &runs("ends_it"), &runs("skipped"));
        let want = &json[kind];
        assert_eq!(blocks as f64, number(&want["speculators_blocks"]));
        assert_eq!((run + blocks) as f64, number(&want["speculators_sum_with_bonus"]));
        assert_eq!((over + blocks) as f64, number(&want["automodel_sum_with_bonus"]));
    }
}

/// Automodel's definition: a slot that is not supervised neither ends a run nor counts.
fn leading_runs_over_gaps(indices: &[i64], correct: &[bool], layout: &BlockLayout) -> Runs {
    let size = layout.size as i64;
    let mut runs = Runs::default();
    let slots: Vec<(i64, bool)> = indices.iter().copied().zip(correct.iter().copied()).collect();
    for block in slots.chunk_by(|a, b| a.0 / size == b.0 / size) {
        runs.tokens += block.iter().take_while(|(_, right)| *right).count() as u64;
        runs.blocks += 1;
    }
    runs
}
