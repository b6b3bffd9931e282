//! Arguments of every command, with the texts of `--help`.

use super::{doctor::DoctorArgs, eval::EvalArgs, numbers::temperature, simulate::PolicyName};
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

/// Trains draft models for speculative decoding, while the frozen target model produces the training signal.
///
/// Usual order: `import` a GGUF file (not needed for a Hugging Face folder), `generate` answers if another model or a person
/// wrote the data, `prepare` the data, `check` the configuration, `train`, `export`, `eval`. `runs` and `ledger` show runs,
/// `doctor` checks the machine, `simulate` predicts throughput.
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

/// Log level.
#[derive(Args, Clone, Debug, Default)]
pub struct LogArgs {
    /// Set the log level: -v = debug, -vv = trace
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Log filter instead of log.level: error, warn, info, debug, trace, or by module ("info,draftmill::data=debug")
    #[arg(long, global = true, value_name = "FILTER", conflicts_with = "verbose")]
    pub log_level: Option<String>,
}

/// Source of the configuration.
#[derive(Args, Clone, Debug, Default)]
pub struct ConfigArgs {
    /// Configuration file. Missing keys have their default; configs/example.toml lists all keys
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override one key; may be repeated. The value is TOML, a bare word is a string, a single value is a list of one
    #[arg(short, long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

/// Converts a GGUF file to a Hugging Face folder, or a drafter of either layout to the z-lab layout
#[derive(Args, Debug)]
#[command(after_help = "\
--gguf writes config.json, model.safetensors, tokenizer.json and a chat template. --draft reads a drafter of z-lab, \
speculators or draftmill, checks every tensor name and shape, and writes the same bits in the z-lab layout. To train from \
the result, set drafter.init_from.

Examples:
  draftmill import --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2
  draftmill import --draft downloads/Qwen3-8B-speculator --target models/qwen3-8b --out drafters/start
  draftmill train --config my.toml --set drafter.init_from=drafters/start")]
pub struct ImportArgs {
    /// GGUF file to read; quantised weights are dequantised
    #[arg(long, value_name = "FILE", required_unless_present = "draft")]
    pub gguf: Option<PathBuf>,
    /// Folder of the drafter to read
    #[arg(long, value_name = "DIR", conflicts_with_all = ["gguf", "dtype"])]
    pub draft: Option<PathBuf>,
    /// Folder of the drafter's target, for a check of the sizes; speculators files do not contain its number of layers
    #[arg(long, value_name = "DIR", requires = "draft", conflicts_with = "gguf")]
    pub target: Option<PathBuf>,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Dtype of the written weights
    #[arg(long, value_name = "DTYPE", default_value = "f32",
          value_parser = PossibleValuesParser::new(["f32", "bf16"]).try_map(|word| Dtype::from_str(&word)))]
    pub dtype: Dtype,
    /// Replace the folder if it exists
    #[arg(long)]
    pub force: bool,
}

/// Generates answers to prompts with the target: the best training data for its drafter
#[derive(Args, Debug)]
#[command(after_help = "\
Prompts are rows of OpenAI `messages`, ShareGPT `conversations`, MT-Bench `turns` or HumanEval `prompt` (JSONL or JSON arrays, \
also .gz). The target answers the questions of a row turn by turn, in its chat template with thinking off. Existing answers of \
a row are not used. A row without a question, or with a prompt above the limit, is skipped and counted by reason. Each answer \
is one row of `input_ids` and `loss_mask`, which `prepare` reads without changes. An answer that reached --max-new-tokens is \
marked `cut` and has no end token.

The output grows as FILE.jsonl.part. After an interrupt or a kill, the same command resumes. Answers do not depend on --rows \
and --workers, except for rounding.

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
    /// JSONL file to write
    #[arg(long, value_name = "FILE.jsonl")]
    pub out: PathBuf,
    /// Maximum number of conversations; skipped rows do not count
    #[arg(long, value_name = "COUNT")]
    pub limit: Option<usize>,
    /// Maximum tokens of an answer
    #[arg(long, value_name = "COUNT", default_value = "256", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Skip prompts with more tokens [default: the target's positions minus --max-new-tokens]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_prompt_tokens: Option<u32>,
    /// Maximum questions of a conversation [default: all]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub turns: Option<u32>,
    /// Sampling temperature; 0 = the most likely token
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature)]
    pub temperature: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "SEED", default_value = "0")]
    pub seed: u64,
    /// Answers that are generated at the same time
    #[arg(long, value_name = "COUNT", default_value = "32", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub rows: u32,
    /// Parallel forwards; each has an equal part of the rows [default: on CPU one per core, else 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub workers: Option<u32>,
    /// Device of the target: cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Dtype of the forward: auto (f32 on CPU, bf16 on CUDA), f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "auto", hide_possible_values = true,
          value_parser = PossibleValuesParser::new(["auto", "f32", "bf16", "f16"]).try_map(|word| match word.as_str() {
              "auto" => Ok(Auto::Auto),
              word => Dtype::from_str(word).map(Auto::Set),
          }))]
    pub dtype: Auto<Dtype>,
    /// Replace the file if it exists, and discard a partial file of other options
    #[arg(long)]
    pub force: bool,
    /// Write the summary table to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Converts conversations to the store of token ids that `train` reads
#[derive(Args, Debug)]
#[command(after_help = "\
Reads data.inputs (JSONL or JSON arrays, also .gz; OpenAI `messages`, ShareGPT `conversations`, or rows of `input_ids` \
and `loss_mask`), applies the target's chat template and tokenizer, supervises the assistant's turns, and writes \
data.store. The summary table counts rejected rows by reason; a rejects file contains them with their line numbers.

Examples:
  draftmill prepare --config configs/demo.toml --set 'data.inputs=[\"chats.jsonl\", \"more.json.gz\"]'
  draftmill prepare --config my.toml --set data.inputs=rows.jsonl --json")]
pub struct PrepareArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Write the summary table to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Validates configuration, models, data and machine, and forecasts the run
#[derive(Args, Debug)]
#[command(after_help = "\
Reports all problems at once, each with file, line, key, value and remedy. The forecast lists samples, buckets and padding, \
jobs and steps, bytes of hidden states, the pool's capacity, memory of each device, and disk. Nothing is trained or written.

Examples:
  draftmill check --config configs/qwen3-8b-8gpu.toml
  draftmill check --config my.toml --set plan.buckets=12 --json | jq .plan.padding_share")]
pub struct CheckArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Write problems and forecast to stdout as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Predicts the throughput of a node: the real pipeline with engines that follow a cost model
#[derive(Args, Debug)]
#[command(after_help = "\
The numbers of targets and drafters, the pool and the plan come from the configuration, the costs from its section \
[simulate]. No model, data or GPU is needed. The result depends on the configuration and run.seed only.

Examples:
  draftmill simulate --config configs/sim-8gpu.toml
  draftmill simulate --config configs/sim-8gpu.toml --sweep targets=1..7
  draftmill simulate --config configs/sim-8gpu.toml --policy round-robin --queue-depth 4
  draftmill simulate --config my.toml --set simulate.lengths=store --targets 6 --drafters 2 --json | jq .efficiency")]
pub struct SimulateArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Dispatch policy of jobs to targets
    #[arg(long, value_enum, default_value = "pull")]
    pub policy: PolicyName,
    /// Queue of each target with --policy round-robin, in jobs
    #[arg(long, value_name = "JOBS", default_value = "4")]
    pub queue_depth: usize,
    /// Draw policy instead of pool.draw_policy: uniform, proportional or replay
    #[arg(long, value_name = "POLICY")]
    pub draw_policy: Option<String>,
    /// Number of targets instead of that of target.devices
    #[arg(long, value_name = "COUNT")]
    pub targets: Option<usize>,
    /// Number of drafters instead of that of drafter.devices
    #[arg(long, value_name = "COUNT")]
    pub drafters: Option<usize>,
    /// Jobs per epoch instead of simulate.jobs
    #[arg(long, value_name = "COUNT")]
    pub jobs: Option<u32>,
    /// One run for each value: targets=1..7 (the other workers are drafters), or queue-depth=1,4,20 (round-robin)
    #[arg(long, value_name = "SETTING=VALUES")]
    pub sweep: Option<Sweep>,
    /// Write the report to stdout as JSON; a sweep is an array of reports
    #[arg(long)]
    pub json: bool,
}

/// Trains a drafter, or resumes an interrupted run
#[derive(Args, Debug)]
#[command(after_help = "\
The run is stored in run.dir. A new start with the same configuration resumes from the last checkpoint. On SIGINT or SIGTERM \
the run finishes its current work and writes a checkpoint; a second signal stops it at once. After SIGTERM with a checkpoint \
the exit code is 0.

Examples:
  draftmill train --config configs/demo.toml
  draftmill train --config my.toml --set run.dir=runs/second --set run.seed=7
  draftmill train --config my.toml --fresh --force      # delete the old run")]
pub struct TrainArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Start a new run instead of resuming; if run.dir holds a run, --force is needed as well
    #[arg(long)]
    pub fresh: bool,
    /// With --fresh: delete the run in run.dir
    #[arg(long, requires = "fresh")]
    pub force: bool,
    /// Resume from this checkpoint instead of the newest, for example step-500; later steps are given up
    #[arg(long, value_name = "STEP", value_parser = checkpoint_step, conflicts_with = "fresh")]
    pub from_checkpoint: Option<u64>,
    /// Write the summary to stdout as JSON; summary.json in run.dir has the same content
    #[arg(long)]
    pub json: bool,
}

/// Lists runs with their state, progress and last end
#[derive(Args, Debug)]
#[command(after_help = "\
States: running, finished, step-limit (run.max_steps), stopped (by a signal), failed, or killed (no end recorded). The \
command only reads, also from a running run.

Examples:
  draftmill runs runs
  draftmill runs runs/demo --json")]
pub struct RunsArgs {
    /// Run folder, or a folder of run folders
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Write the list to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Shows the outcomes of a run's jobs or the history of one job, or verifies the ledger
#[derive(Args, Debug)]
#[command(after_help = "\
The command reads the current state.db, also of a running run, and changes nothing.

Examples:
  draftmill ledger runs/demo
  draftmill ledger runs/demo --job 0/17      # plan, samples, and every outcome of job 17 of epoch 0
  draftmill ledger runs/demo --verify        # every sample in one job, every job one outcome, no step lost")]
pub struct LedgerArgs {
    /// Folder of the run (run.dir)
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Show the history of one job; the first job of the first epoch is 0/0
    #[arg(long, value_name = "EPOCH/INDEX", value_parser = job_id, conflicts_with = "verify")]
    pub job: Option<JobId>,
    /// Check the invariants P1, D1, T1 and R1 of the whole ledger; the exit code is 6 if one is violated
    #[arg(long)]
    pub verify: bool,
    /// Write the result to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

fn job_id(text: &str) -> Result<JobId, String> {
    let parts = text.split_once('/').and_then(|(epoch, index)| Some((epoch.parse().ok()?, index.parse().ok()?)));
    let (epoch, index) = parts.ok_or("write epoch and index, for example 0/17")?;
    Ok(JobId { epoch, index })
}

/// Writes a trained drafter as a model folder that inference engines load, or checks such a folder
#[derive(Args, Debug)]
#[command(after_help = "\
Layouts: zlab = z-lab's DFlash format (config.json and model.safetensors), which SGLang, vLLM and transformers load. \
speculators = the format of speculators, which also contains the target's embedding and head. The self-check loads the export \
and decodes a few prompts with the target before the folder gets its name. Its logits and acceptance must equal those of the \
trained drafter.

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
    /// Folder to write
    #[arg(long, value_name = "DIR", requires = "run")]
    pub out: Option<PathBuf>,
    /// Dtype of the weights [default: checkpoint.export_dtype of the run]
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
    /// Folder of the target [default: target.dir of the run]; with --check: target that the drafter must match
    #[arg(long, value_name = "DIR")]
    pub target: Option<PathBuf>,
    /// Skip the self-check
    #[arg(long, conflicts_with = "check")]
    pub no_self_check: bool,
    /// Replace the folder if it exists
    #[arg(long, conflicts_with = "check")]
    pub force: bool,
    /// Check this folder instead: names, shapes and dtypes of all tensors, and the keys of config.json
    #[arg(long, value_name = "DIR", conflicts_with_all = ["run", "out"])]
    pub check: Option<PathBuf>,
    /// Write the result to stdout as JSON
    #[arg(long)]
    pub json: bool,
}

/// Reads `step-500` or `500`.
fn checkpoint_step(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("step-").unwrap_or(text);
    digits.parse().map_err(|_| "not a step; write step-500 or 500".to_owned())
}

/// Checkpoint to export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichCheckpoint {
    Latest,
    Best,
    Step(u64),
    /// Whole checkpoint that state.db does not list, `step-N.later`.
    Later(u64),
}

impl FromStr for WhichCheckpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "latest" => Ok(WhichCheckpoint::Latest),
            "best" => Ok(WhichCheckpoint::Best),
            _ => {
                let step = text.strip_prefix("step-").unwrap_or(text);
                let (step, which): (_, fn(u64) -> Self) = match step.strip_suffix(".later") {
                    Some(step) => (step, WhichCheckpoint::Later),
                    None => (step, WhichCheckpoint::Step),
                };
                step.parse().map(which).map_err(|_| "write \"latest\", \"best\" or a step, for example 500".into())
            }
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
