//! `draftmill eval`.

use super::{EvalArgs, output};
use crate::{
    common::{
        exit::{Exit, Failure},
        guard::Protected,
        text::counted,
    },
    eval::{self, EvalOptions, Record},
};

/// Evaluates a drafter and prints the report.
pub fn run(args: &EvalArgs) -> Result<(), Failure> {
    if let Some(path) = &args.plot {
        let protected = Protected::default().inputs([&args.prompts]).folders([&args.target, &args.draft]);
        let refused = |why| Failure::new(Exit::Usage, format!("--plot: {why}"));
        protected.file(path, "a plot of draftmill eval", eval::is_plot).map_err(refused)?;
    }
    let prompts = eval::read(&args.prompts, args.limit).map_err(Failure::of(Exit::Data))?;
    let count = prompts.len();
    let options = EvalOptions {
        target: args.target.clone(),
        draft: args.draft.clone(),
        max_new_tokens: args.max_new_tokens as usize,
        temperature: args.temperature,
        seed: args.seed,
        device: args.device,
    };
    let mut done = 0;
    let report = evaluate(&options, prompts, &mut |record: &Record| {
        done += 1;
        let produced: usize = record.steps.iter().map(|step| step.produced).sum();
        output::note(&format!(
            "response {done} of {}: {} in {}",
            counted(count as u64, "prompt"),
            counted(produced as u64, "token"),
            counted(record.steps.len() as u64, "step")
        ));
    })?;
    if let Some(path) = &args.plot {
        let failed = |e| {
            Failure::new(
                Exit::Usage,
                format!("{} cannot be written ({e}); choose another path for --plot", path.display()),
            )
        };
        crate::common::fs::write_atomic(path, eval::svg(&report).as_bytes()).map_err(failed)?;
    }
    if args.json { output::print_json(&report) } else { output::print(&report.to_string()) }
}

#[cfg(feature = "torch")]
use crate::eval::evaluate;

/// Returns the error of a build without libtorch.
#[cfg(not(feature = "torch"))]
fn evaluate(_: &EvalOptions, _: Vec<eval::Prompt>, _: &mut dyn FnMut(&Record)) -> Result<eval::Report, Failure> {
    Err(Failure::new(
        Exit::Usage,
        "this draftmill was built without libtorch, which decoding needs; build with the default features",
    ))
}
