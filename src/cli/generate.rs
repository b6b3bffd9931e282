//! `draftmill generate`.

use super::{
    GenerateArgs,
    interruptible::{Shown, stop_on_signal},
    output,
};
use crate::{
    common::{
        exit::{Exit, Failure},
        text::grouped,
    },
    config::{ByteSize, Log},
    generate::{GenerateOptions, Progress},
};
use std::ops::ControlFlow;

/// Answers the prompts and tells what became of them.
pub fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let options = GenerateOptions {
        target: args.target.clone(),
        prompts: args.prompts.clone(),
        out: args.out.clone(),
        limit: args.limit,
        max_new_tokens: args.max_new_tokens as usize,
        max_prompt_tokens: args.max_prompt_tokens.map(|most| most as usize),
        turns: args.turns.map(|most| most as usize),
        temperature: args.temperature,
        seed: args.seed,
        rows: args.rows as usize,
        workers: args.workers.map(|count| count as usize),
        device: args.device,
        dtype: args.dtype.clone(),
        force: args.force,
    };
    let (_runtime, stop) = stop_on_signal().map_err(Failure::of(Exit::Internal))?;
    let mut shown = Shown::new(Log::default().progress_every.0);
    let result = answered(&options, &mut |progress: &Progress| {
        let (done, total) = match progress.limit {
            Some(limit) => (progress.conversations, limit),
            None => (progress.bytes_read, progress.bytes_total),
        };
        let bytes = |bytes| ByteSize(bytes).rounded();
        let so_far = || match progress.limit {
            Some(limit) => format!("answered {} of {}", grouped(done), grouped(limit)),
            None => format!("read {} of {}", bytes(done), bytes(total)),
        };
        shown.update(done, total, || text(progress), so_far);
        if stop.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    shown.finish();
    let report = result?;
    if args.json { output::print_json(&report) } else { output::print(&report.to_string()) }?;
    if report.out.is_none() {
        let why = if report.rows == 0 { "there are none".into() } else { report.reasons() };
        return Err(Failure::new(
            Exit::Data,
            format!(
                "none of {} rows is a prompt that can be answered ({why}); see `draftmill generate --help`",
                report.rows
            ),
        ));
    }
    Ok(())
}

fn text(progress: &Progress) -> String {
    format!(
        "{} answers, {} tokens, {:.1} tokens/s, {} side by side, {} rows left out",
        grouped(progress.answers),
        grouped(progress.tokens),
        progress.tokens_per_second,
        progress.rows,
        grouped(progress.left_out)
    )
}

#[cfg(feature = "torch")]
use crate::generate::generate as answered;

/// What stands in for the answers in a build without libtorch: a sentence.
#[cfg(not(feature = "torch"))]
fn answered(
    _: &GenerateOptions,
    _: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<crate::generate::GenerateReport, Failure> {
    Err(Failure::new(
        Exit::Usage,
        "this draftmill was built without libtorch, which the target needs; build with the default features",
    ))
}
