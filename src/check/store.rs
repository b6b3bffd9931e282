//! Checks of the prepared store: its content, its origin, and its fit to the target. One pass over the store.

use super::Report;
use crate::{
    common::{
        exit::Exit,
        text::{counted, grouped, percent},
    },
    config::{Loaded, Written},
    data::{Contents, Difference, Split, Store, differences},
    hf::config::TargetConfig,
};

/// Fraction of tokens above which a mask token in the data is a problem. Below it, the text of a few rows spells the token.
const MAX_MASK_FRACTION: f64 = 1e-4;

/// Verifies the store and compares it with the target, the settings and the inputs. `report` has the models of the
/// configuration, if they are known.
pub fn examine_store(loaded: &Loaded, store: &Store, report: &mut Report) {
    let (config, written) = (&loaded.config, &loaded.written);
    let contents = match store.verify() {
        Ok(contents) => contents,
        Err(error) => return report.fail(Exit::Data, written.problem("data.store", error.to_string(), "")),
    };
    for Difference { key, message, remedy, refused } in differences(store, &config.target.dir, &config.data) {
        let problem = written.problem(&key, message, remedy);
        if refused { report.fail(Exit::Data, problem) } else { report.notes.push(problem) }
    }
    // Without labels every loss is 0, which looks like success.
    if contents.supervised[Split::Train as usize] == 0 {
        let problem = written.problem(
            "data.store",
            "no token of its training samples is supervised, so nothing would be trained",
            "correct the loss masks of the inputs and run draftmill prepare again",
        );
        report.fail(Exit::Data, problem);
    }
    if let Some((target, _)) = report.models.clone() {
        target_of(&target, store, &contents, written, report);
        mask_of(&contents, written, report);
    }
}

/// Checks that the target has an embedding row for each id and a position for each token.
fn target_of(target: &TargetConfig, store: &Store, contents: &Contents, written: &Written, report: &mut Report) {
    let remedy = "run draftmill prepare again, or name the target that the store was made for";
    if usize::try_from(contents.largest_id).is_ok_and(|id| id >= target.vocab_size) {
        let message = format!(
            "the store holds the token id {}, but the target's embedding has {} rows",
            contents.largest_id, target.vocab_size
        );
        report.fail(Exit::Data, written.problem("data.store", message, remedy));
    }
    let positions = target.max_position_embeddings;
    let lengths = [Split::Train, Split::Validation].map(|split| store.lengths(split));
    let beyond = lengths.iter().flatten().filter(|&&length| length as usize > positions).count();
    if beyond > 0 {
        let longest = lengths.iter().flatten().max().copied().unwrap_or(0);
        let message = format!(
            "{} of the store, the longest of {} tokens, exceed the target's {} positions (max_position_embeddings)",
            counted(beyond as u64, "sample"),
            grouped(u64::from(longest)),
            grouped(positions as u64)
        );
        let remedy = format!("write data.max_length = {positions} and run draftmill prepare again");
        report.fail(Exit::Data, written.problem("data.store", message, remedy));
    }
}

/// Counts the mask token over the store: a drafter takes each of its occurrences for a slot to predict (Automodel#2461).
fn mask_of(contents: &Contents, written: &Written, report: &mut Report) {
    let Some(mask) = report.mask_token.clone() else { return };
    let found = contents.count(mask.id);
    if found == 0 {
        return;
    }
    let fraction = found as f64 / contents.tokens.max(1) as f64;
    let problem = written.problem(
        "drafter.mask_token_id",
        format!(
            "the mask token {} ({}) is in the data: {} of {} tokens ({}) of the store",
            mask.id,
            mask.reason,
            grouped(found),
            grouped(contents.tokens),
            percent(fraction)
        ),
        "choose the id of a token that the data do not contain",
    );
    if fraction > MAX_MASK_FRACTION { report.fail(Exit::Config, problem) } else { report.notes.push(problem) }
}
