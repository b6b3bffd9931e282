//! `draftmill eval`.

use super::{
    numbers::{probability, temperature},
    output,
};
use crate::{
    common::{
        exit::{Exit, Failure},
        guard::Protected,
        text::counted,
    },
    config::Device,
    eval::{self, EvalOptions, Marks, Record},
};
use clap::Args;
use std::{
    io::{IsTerminal, stdout},
    path::PathBuf,
};

/// Measures acceptance (tokens per verification) and speed of a drafter in speculative decoding with its target
#[derive(Args, Debug)]
#[command(after_help = "\
Prompts are rows of OpenAI `messages`, MT-Bench `turns` or HumanEval `prompt`, also gzipped, in the target's chat template with \
thinking off. Each response is decoded twice in f32, one prompt at a time: with the drafter, and by the target alone. At \
temperature 0 both must have the same tokens. Acceptance includes the target's token, so it is between 1 and the block size. \
The report compares it with the acceptance that the accuracies by position predict.

Examples:
  draftmill eval --target models/target --draft runs/mine/export --prompts question.jsonl --limit 20
  draftmill eval --target models/target --draft drafters/demo --prompts HumanEval.jsonl.gz --json --plot acceptance.svg")]
pub struct EvalArgs {
    /// Folder of the target, in Hugging Face's layout
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,
    /// Folder of the drafter, as `draftmill export` writes it
    #[arg(long, value_name = "DIR")]
    pub draft: PathBuf,
    /// JSONL file of prompts
    #[arg(long, value_name = "FILE")]
    pub prompts: PathBuf,
    /// Maximum tokens of a response
    #[arg(long, value_name = "COUNT", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Sampling temperature; 0 = the most likely token
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature)]
    pub temperature: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "SEED", default_value = "0")]
    pub seed: u64,
    /// Least predicted survival of a drafted token that is verified, for a drafter with a confidence head; 0 = verify all
    #[arg(long, value_name = "P", default_value = "0", value_parser = probability)]
    pub min_survival: f64,
    /// Number of prompts, from the start of the file [default: all]
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Show the text of the first responses, with the accepted drafted tokens in green, or in brackets without a terminal
    #[arg(long, value_name = "COUNT", conflicts_with = "json")]
    pub show: Option<u32>,
    /// Device of both models: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Write the report to stdout as JSON
    #[arg(long)]
    pub json: bool,
    /// Write an SVG plot of acceptance by position and tokens per step
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

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
        min_survival: args.min_survival,
        show: args.show.map_or(0, |count| count as usize),
        device: args.device,
    };
    let (mut done, mut shown) = (0, Vec::new());
    let report = evaluate(&options, prompts, &mut |record: &Record| {
        done += 1;
        shown.extend(record.shown.clone());
        let produced: usize = record.steps.iter().map(|step| step.produced).sum();
        output::note(&format!(
            "response {done} to {}: {} in {}",
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
    if args.json {
        return output::print_json(&report);
    }
    output::print(&report.to_string())?;
    let plain = !stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some();
    let marks = if plain { Marks::Brackets } else { Marks::Colour };
    for one in shown {
        output::print(&format!("\n{}", one.text(marks)))?;
    }
    Ok(())
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
