//! The arguments of every command, with the texts of `--help`.

use super::{doctor::DoctorArgs, simulate::PolicyName};
use crate::{
    common::exit,
    config::{Auto, Device, Dtype},
    hf::layout::Layout,
    simulate::Sweep,
};
use clap::{
    ArgAction, Args, Parser, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use draftmill_actors::messages::types::JobId;
use std::{path::PathBuf, str::FromStr};

/// Trains the draft model of a speculative decoder while the frozen target model produces its training signal.
///
/// In the usual order: `import` a GGUF file (not needed for a Hugging Face folder), `generate` answers to your prompts where the data come
/// from elsewhere, `prepare` the data, `check` the configuration, `train`, `export`, `eval`; `runs` and `ledger` look at runs,
/// `doctor` at the machine.
#[derive(Debug, Parser)]
#[command(version, after_help = exit::help(), disable_help_subcommand = true)]
pub struct Cli {
    #[command(flatten)]
    pub log: LogArgs,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Import(ImportArgs),
    Generate(GenerateArgs),
    Prepare(PrepareArgs),
    Check(CheckArgs),
    Doctor(DoctorArgs),
    Simulate(SimulateArgs),
    Train(TrainArgs),
    Runs(RunsArgs),
    Ledger(LedgerArgs),
    Export(ExportArgs),
    Eval(EvalArgs),
}

/// How much is logged.
#[derive(Args, Clone, Debug, Default)]
pub struct LogArgs {
    /// Log more: -v = debug, -vv = trace
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Log filter in the place of log.level: error, warn, info, debug, trace, or by module ("info,draftmill::data=debug")
    #[arg(long, global = true, value_name = "FILTER", conflicts_with = "verbose")]
    pub log_level: Option<String>,
}

/// Where the configuration comes from.
#[derive(Args, Clone, Debug, Default)]
pub struct ConfigArgs {
    /// Configuration; every key that is not in it has its default (configs/example.toml lists them all)
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Overrides one key; may be repeated. The value is TOML; a bare word is a string, and one value will do for a list
    #[arg(short, long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

/// Turns a GGUF file into a Hugging Face folder, or a drafter of any layout into one to start from
#[derive(Args, Debug)]
#[command(after_help = "\
A GGUF file becomes config.json, model.safetensors, tokenizer.json and a chat template. A drafter's folder, as z-lab, \
speculators or draftmill write it, is held to every name and shape and becomes a folder of z-lab's layout with the same bits; \
training starts from it with drafter.init_from.

Examples:
  draftmill import --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2
  draftmill import --draft downloads/Qwen3-8B-speculator --target models/qwen3-8b --out drafters/start
  draftmill train --config my.toml --set drafter.init_from=drafters/start")]
pub struct ImportArgs {
    /// The file to read; quantised weights are turned into numbers
    #[arg(long, value_name = "FILE", required_unless_present = "draft")]
    pub gguf: Option<PathBuf>,
    /// Folder of a drafter to read
    #[arg(long, value_name = "DIR", conflicts_with_all = ["gguf", "dtype"])]
    pub draft: Option<PathBuf>,
    /// Folder of the drafter's target, to compare it with; files of speculators do not say how many layers it has
    #[arg(long, value_name = "DIR", requires = "draft", conflicts_with = "gguf")]
    pub target: Option<PathBuf>,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Number type of the written weights
    #[arg(long, value_name = "DTYPE", default_value = "f32",
          value_parser = PossibleValuesParser::new(["f32", "bf16"]).try_map(|word| Dtype::from_str(&word)))]
    pub dtype: Dtype,
    /// Replace the folder if it exists
    #[arg(long)]
    pub force: bool,
}

/// Lets the target answer prompts: the data from which its drafter learns best
#[derive(Args, Debug)]
#[command(after_help = "\
Prompts are rows of OpenAI `messages`, ShareGPT `conversations`, MT-Bench `turns` or HumanEval `prompt` (JSONL or JSON arrays, also \
.gz). Answers that a row brings along are dropped; its questions are asked turn by turn, with the target's own answers in between, \
in the target's chat template with thinking off. A row that asks nothing, or more than fits, is left out and counted by reason. \
Each answer becomes a row of `input_ids` and `loss_mask`, the very tokens that were said: `prepare` takes the file as it is, and an \
answer that --max-new-tokens cut (`cut`) teaches no end.

The file grows as FILE.jsonl.part; the same command goes on where it was interrupted or killed. Answers do not depend on --rows \
and --workers, rounding aside.

Examples:
  draftmill generate --target models/target --prompts sharegpt.json --limit 5000 --out answers.jsonl
  draftmill generate --target models/target --prompts a.jsonl b.json.gz --turns 1 --temperature 0.7 --rows 64 --out answers.jsonl
  draftmill prepare --config my.toml --set data.inputs=answers.jsonl")]
pub struct GenerateArgs {
    /// Folder of the target, in Hugging Face's layout
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,
    /// Files of prompts
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub prompts: Vec<PathBuf>,
    /// The file to write
    #[arg(long, value_name = "FILE.jsonl")]
    pub out: PathBuf,
    /// Only so many conversations; rows that are left out do not count
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Tokens of an answer at most
    #[arg(long, value_name = "COUNT", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Leave out prompts with more tokens [default: what the target's positions leave beside --max-new-tokens]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_prompt_tokens: Option<u32>,
    /// Questions of a conversation that are asked at most [default: all]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: Option<u32>,
    /// 0 takes the most likely token; any other value samples
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature)]
    pub temperature: f64,
    /// Seed of the samples
    #[arg(long, value_name = "SEED", default_value = "0")]
    pub seed: u64,
    /// Answers that grow side by side
    #[arg(long, value_name = "COUNT", default_value = "32", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub rows: u32,
    /// Forwards at a time, each of its share of the rows [default: on CPU one for each core, else one]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub workers: Option<u32>,
    /// Where the target computes: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Number type of the forward: auto (f32 on CPU, bf16 on CUDA), f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "auto", hide_possible_values = true,
          value_parser = PossibleValuesParser::new(["auto", "f32", "bf16", "f16"]).try_map(|word| match word.as_str() {
              "auto" => Ok(Auto::Auto),
              word => Dtype::from_str(word).map(Auto::Set),
          }))]
    pub dtype: Auto<Dtype>,
    /// Replace the file if it exists, and throw away a part that was begun with other options
    #[arg(long)]
    pub force: bool,
    /// Write the closing table to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Turns conversations into the store of token ids that `train` reads
#[derive(Args, Debug)]
#[command(after_help = "\
Reads data.inputs (JSONL or JSON arrays, also .gz; OpenAI `messages`, ShareGPT `conversations`, or rows of `input_ids` \
and `loss_mask`), applies the target's chat template and tokenizer, supervises the assistant's turns, and writes \
data.store. Rejected rows are counted by reason in the closing table and kept with their line number in a rejects file.

Examples:
  draftmill prepare --config configs/demo.toml --set 'data.inputs=[\"chats.jsonl\", \"more.json.gz\"]'
  draftmill prepare --config my.toml --set data.inputs=rows.jsonl --json")]
pub struct PrepareArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Write the closing table to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Validates everything and runs nothing, then tells what a run would do
#[derive(Args, Debug)]
#[command(after_help = "\
Every problem is told at once, each with file, key, value and remedy. Then come samples, buckets and padding, jobs and \
steps, bytes of hidden states, the pool's arithmetic, memory of each device, and disk.

Examples:
  draftmill check --config configs/qwen3-8b-8gpu.toml
  draftmill check --config my.toml --set plan.buckets=12 --json | jq .plan.padding_share")]
pub struct CheckArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Write problems and table to stdout as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Tells how a node would do before it is rented: the real pipeline with engines that follow a cost model
#[derive(Args, Debug)]
#[command(after_help = "\
The numbers of targets and drafters, the pool and the plan come from the configuration, the costs from its section \
[simulate]; neither model nor data nor GPU is needed. The result is a function of the configuration and run.seed alone.

Examples:
  draftmill simulate --config configs/sim-8gpu.toml
  draftmill simulate --config configs/sim-8gpu.toml --sweep targets=1..7
  draftmill simulate --config configs/sim-8gpu.toml --policy round-robin --queue-depth 4
  draftmill simulate --config my.toml --set simulate.lengths=store --targets 6 --drafters 2 --json | jq .efficiency")]
pub struct SimulateArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Who gets the next job
    #[arg(long, value_enum, default_value = "pull")]
    pub policy: PolicyName,
    /// Jobs that wait for each target under round-robin
    #[arg(long, value_name = "JOBS", default_value = "4")]
    pub queue_depth: usize,
    /// Which batch answers a draw, in the place of pool.draw_policy: uniform, proportional or replay
    #[arg(long, value_name = "POLICY")]
    pub draw_policy: Option<String>,
    /// Number of targets, in the place of target.devices
    #[arg(long, value_name = "COUNT")]
    pub targets: Option<usize>,
    /// Number of drafters, in the place of drafter.devices
    #[arg(long, value_name = "COUNT")]
    pub drafters: Option<usize>,
    /// Jobs of an epoch, in the place of simulate.jobs
    #[arg(long, value_name = "COUNT")]
    pub jobs: Option<u32>,
    /// One run for each value: targets=1..7 (the other workers are drafters), or queue-depth=1,4,20 (round-robin)
    #[arg(long, value_name = "SETTING=VALUES")]
    pub sweep: Option<Sweep>,
    /// Write the figures to stdout as JSON; of a sweep, as an array
    #[arg(long)]
    pub json: bool,
}

/// Trains a drafter, or goes on with a run that was interrupted
#[derive(Args, Debug)]
#[command(after_help = "\
The run lives in run.dir. Started again with the same configuration, it goes on from its last checkpoint. SIGINT or \
SIGTERM finish the running work and write a checkpoint; a second one stops at once. After SIGTERM an orderly end is no \
failure: the exit code is 0.

Examples:
  draftmill train --config configs/demo.toml
  draftmill train --config my.toml --set run.dir=runs/second --set run.seed=7
  draftmill train --config my.toml --fresh --force      # throw the old run away")]
pub struct TrainArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Begin anew instead of going on; refused while run.dir holds a run, unless --force is given as well
    #[arg(long)]
    pub fresh: bool,
    /// With --fresh: delete the run that run.dir holds
    #[arg(long, requires = "fresh")]
    pub force: bool,
    /// Write the closing figures to stdout as JSON (they also lie in summary.json of the run)
    #[arg(long)]
    pub json: bool,
}

/// Lists runs: where each stands, and how its last start ended
#[derive(Args, Debug)]
#[command(after_help = "\
A run is running, finished, at its step-limit, stopped (by a signal), failed, or killed (it ended without a word). Reading \
never disturbs a run.

Examples:
  draftmill runs runs
  draftmill runs runs/demo --json")]
pub struct RunsArgs {
    /// A run folder, or a folder of run folders
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Write the list to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Tells what became of a run's jobs, or of one of them, or whether nothing was lost
#[derive(Args, Debug)]
#[command(after_help = "\
It reads state.db as it is at this moment, also while the run goes on, and never disturbs it.

Examples:
  draftmill ledger runs/demo
  draftmill ledger runs/demo --job 0/17      # plan, samples, and every outcome of job 17 of epoch 0
  draftmill ledger runs/demo --verify        # every sample in one job, every job one outcome, no step lost")]
pub struct LedgerArgs {
    /// Folder of the run (run.dir)
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// The history of one job, the first of the first epoch being 0/0
    #[arg(long, value_name = "EPOCH/INDEX", value_parser = job_id, conflicts_with = "verify")]
    pub job: Option<JobId>,
    /// Hold the whole file to the invariants P1, D1, T1 and R1; ends with 6 where one is broken
    #[arg(long)]
    pub verify: bool,
    /// Write the answer to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

fn job_id(text: &str) -> Result<JobId, String> {
    let parts = text.split_once('/').and_then(|(epoch, index)| Some((epoch.parse().ok()?, index.parse().ok()?)));
    let (epoch, index) = parts.ok_or("write epoch and place, for example 0/17")?;
    Ok(JobId { epoch, index })
}

/// Writes a trained drafter as a model folder that inference engines load, or checks such a folder
#[derive(Args, Debug)]
#[command(after_help = "\
Layouts: z-lab's DFlash format (config.json and model.safetensors), which SGLang, vLLM and transformers load, or that of \
speculators, which brings the target's embedding and head along. Before an export exists it is loaded anew and decodes a few \
prompts with its target: its logits and its acceptance must be those of the drafter that was trained.

Examples:
  draftmill export --run runs/demo --out drafters/demo
  draftmill export --run runs/demo --format speculators --out drafters/demo-speculators
  draftmill export --run runs/demo --checkpoint 500 --out drafters/demo-500 --dtype f32
  draftmill export --check drafters/demo --json")]
pub struct ExportArgs {
    /// Folder of the run (run.dir)
    #[arg(long, value_name = "DIR", required_unless_present = "check", requires = "out")]
    pub run: Option<PathBuf>,
    /// Checkpoint to export: "latest", "best" (by measured acceptance), or an optimizer step
    #[arg(long, value_name = "STEP", default_value = "latest", conflicts_with = "check")]
    pub checkpoint: WhichCheckpoint,
    /// The folder to write
    #[arg(long, value_name = "DIR", requires = "run")]
    pub out: Option<PathBuf>,
    /// Number type of the weights [default: checkpoint.export_dtype of the run]
    #[arg(long, value_name = "DTYPE", conflicts_with = "check",
          value_parser = PossibleValuesParser::new(["f32", "bf16", "f16"]).try_map(|word| Dtype::from_str(&word)))]
    pub dtype: Option<Dtype>,
    /// Layout of the folder: zlab or speculators
    #[arg(long, value_name = "LAYOUT", default_value = "zlab", conflicts_with = "check",
          value_parser = PossibleValuesParser::new(["zlab", "speculators"]).map(|word| match word.as_str() {
              "speculators" => Layout::Speculators,
              _ => Layout::Zlab,
          }))]
    pub format: Layout,
    /// Folder of the target [default: target.dir of the run]; with --check: the folder must be a drafter of it
    #[arg(long, value_name = "DIR")]
    pub target: Option<PathBuf>,
    /// Do not serve the export before it exists
    #[arg(long, conflicts_with = "check")]
    pub no_self_check: bool,
    /// Replace the folder if it exists
    #[arg(long, conflicts_with = "check")]
    pub force: bool,
    /// Check this folder instead: names, shapes and number types of all tensors, and the keys of config.json
    #[arg(long, value_name = "DIR", conflicts_with_all = ["run", "out"])]
    pub check: Option<PathBuf>,
    /// Write the result to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Measures what a drafter is worth: tokens per verification, and speed, in speculative decoding with its target
#[derive(Args, Debug)]
#[command(after_help = "\
Prompts are rows of OpenAI `messages`, MT-Bench `turns` or HumanEval `prompt`, also gzipped; the target's chat template is \
applied, with thinking off. Every response is decoded with the drafter and by the target alone, in f32, one at a time; at \
temperature 0 both must be the same tokens. Acceptance counts the target's own token, so it lies between 1 and the block \
size. It is told beside what training's accuracies would predict.

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
    /// Tokens of a response at most
    #[arg(long, value_name = "COUNT", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// 0 takes the most likely token; any other value samples
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature)]
    pub temperature: f64,
    /// Seed of the samples
    #[arg(long, value_name = "SEED", default_value = "0")]
    pub seed: u64,
    /// Only the first prompts of the file
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Where both models compute: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Write the figures to stdout as JSON
    #[arg(long)]
    pub json: bool,
    /// Draw acceptance by position and tokens per step
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

fn temperature(text: &str) -> Result<f64, String> {
    let value: Option<f64> = text.parse().ok();
    value
        .filter(|value| value.is_finite() && *value >= 0.0)
        .ok_or_else(|| "write a number from 0 on, such as 0.7".into())
}

/// Which checkpoint of a run is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichCheckpoint {
    Latest,
    Best,
    Step(u64),
}

impl FromStr for WhichCheckpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "latest" => Ok(WhichCheckpoint::Latest),
            "best" => Ok(WhichCheckpoint::Best),
            _ => text
                .parse()
                .map(WhichCheckpoint::Step)
                .map_err(|_| "write \"latest\", \"best\" or a step, for example 500".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn export_writes_or_checks_but_not_both() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        for good in ["draftmill export --run a --out b --checkpoint 5 --dtype f32", "draftmill export --check a --json"]
        {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in [
            "draftmill export",
            "draftmill export --run a",
            "draftmill export --out b",
            "draftmill export --check a --run b --out c",
            "draftmill export --check a --dtype f32",
            "draftmill export --run a --out b --checkpoint newest",
            "draftmill export --run a --out b --dtype f8",
            "draftmill train --force",
            "draftmill runs",
            "draftmill ledger runs/a --job 5",
            "draftmill ledger runs/a --job 0/5 --verify",
            "draftmill import --gguf a --out b --dtype f16",
            "draftmill import --out b",
            "draftmill import --gguf a --draft b --out c",
            "draftmill import --gguf a --target b --out c",
            "draftmill export --run a --out b --format gguf",
            "draftmill export --check a --no-self-check",
            "draftmill check -v --log-level debug",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
