//! Wire types of the configuration: every section, key, default and comment is declared once, here.
//!
//! `sections!` generates one serde struct per section, and the table [`FIELDS`]. The annotated example, the suggestions
//! for unknown keys and the reload check use the table.

use super::loss::{LK_ETA, LossTerms};
use super::values::{
    Auto, ByteSize, CeLabel, Collectives, ConfidenceHead, Dtype, Engine, Head, HiddenFields, InitMethod, Labels,
    LayerAttention, LeadingAssistant, Lengths, Listen, LogFormat, MarkovHead, MissingLabel, MuonScale, OptimizerKind,
    Overlong, PoolAtShutdown, Schedule, SlotWeights, TimeSpan, TopK, UnknownRole, WindowStart,
};
use crate::common::device::Device;
use draftmill_actors::{planner::plan::JobOrder, pool::DrawPolicy};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Time at which a changed value takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apply {
    /// On reload, in a running service.
    Live,
    /// At the next start.
    Restart,
}

impl std::fmt::Display for Apply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Apply::Live => "live",
            Apply::Restart => "restart",
        })
    }
}

/// One key of the configuration.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub section: &'static str,
    pub key: &'static str,
    /// Comment of the key. Each line keeps its leading space.
    pub doc: &'static str,
    pub apply: Apply,
}

macro_rules! sections {
    ($(
        $(#[doc = $section_doc:literal])*
        $section:ident: $Section:ident {
            $( $(#[doc = $doc:literal])* $apply:ident $key:ident: $type:ty = $default:expr; )*
        }
    )*) => {
        $(
            $(#[doc = $section_doc])*
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $Section { $( $(#[doc = $doc])* pub $key: $type, )* }

            impl Default for $Section {
                fn default() -> Self {
                    $Section { $( $key: $default, )* }
                }
            }
        )*

        /// Configuration file.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Wire { $( $(#[doc = $section_doc])* pub $section: $Section, )* }

        /// Sections with their comments, in file order.
        pub const SECTIONS: &[(&str, &str)] =
            &[$( (stringify!($section), concat!($($section_doc, "\n"),*)), )*];

        /// All keys, in file order.
        pub const FIELDS: &[Field] = &[$( $( Field {
            section: stringify!($section),
            key: stringify!($key),
            doc: concat!($($doc, "\n"),*),
            apply: Apply::$apply,
        }, )* )*];
    };
}

sections! {
    /// The run as a whole.
    run: Run {
        /// Folder of the run: resolved configuration, state.db, logs, checkpoints, export. A relative path starts at the
        /// working directory.
        Restart dir: PathBuf = "runs/run".into();
        /// Seed of all random numbers: plan, anchors, initial weights.
        Restart seed: u64 = 42;
        /// Passes over the training samples. 6 is the value of the DFlash paper.
        Restart epochs: u32 = 6;
        /// Limit of optimizer steps. 0 = no limit: the run ends with the last epoch.
        Restart max_steps: u64 = 0;
        /// "torch" computes with libtorch. "simulated" sleeps by the cost model of section [simulate] and trains no drafter.
        Restart engine: Engine = Engine::Torch;
        /// CPU threads of one libtorch operation. "auto" = the cores, divided by the number of CPU entries in
        /// target.devices and drafter.devices. Raise it if one stage mostly waits for the other.
        Restart threads: Auto<u32> = Auto::Auto;
    }

    /// Input of `draftmill prepare`, and the store that it writes.
    data: Data {
        /// Conversations or pre-tokenised rows, as JSONL or JSON arrays, also gzipped: ["chats.jsonl", "more.json.gz"].
        Restart inputs: Vec<PathBuf> = vec![];
        /// File of prepared samples. "auto" = data.safetensors in run.dir.
        Restart store: Auto<PathBuf> = Auto::Auto;
        /// Maximum length of a sample, in tokens. 3072 is the value of the DFlash paper.
        Restart max_length: u32 = 3072;
        /// Samples above max_length: "cut" removes the end, "drop" removes the sample.
        Restart overlong: Overlong = Overlong::Cut;
        /// A turn with an unknown role: "reject" rejects the row, "skip" removes the turn.
        Restart unknown_role: UnknownRole = UnknownRole::Reject;
        /// A field of a turn that the chat template does not show, such as tool calls or reasoning: "reject" rejects the row,
        /// "keep" keeps it without the field and counts it. Metadata such as `id` or `name` never reject a row.
        Restart hidden_fields: HiddenFields = HiddenFields::Reject;
        /// Assistant turns before the first user turn: "drop" removes them and counts the row, "reject" rejects the row.
        Restart leading_assistant: LeadingAssistant = LeadingAssistant::Drop;
        /// false = an input file that is known to be cut is an error: gzip data without their end, an array without `]`, half
        /// a last line. true = its whole rows are read, and the lost row is counted.
        Restart allow_truncated: bool = false;
        /// Minimum number of supervised tokens of a sample. `prepare` counts and removes shorter ones; this is no error.
        Restart min_supervised: u32 = 32;
        /// Fraction of samples that is held out of training and used by section [eval]. A hash of the content selects them,
        /// so a sample keeps its side when rows are added.
        Restart validation_fraction: f64 = 0.01;
        /// `prepare` fails if more than this fraction of the rows is rejected.
        Restart max_reject_fraction: f64 = 0.05;
        /// Maximum length of one input row. It limits the memory of `prepare`; longer rows are rejected.
        Restart max_row_bytes: ByteSize = ByteSize(16 << 20);
    }

    /// The frozen target model. Its hidden states are the input of the drafter.
    target: Target {
        /// Hugging Face folder: config.json, *.safetensors, tokenizer.json, chat template.
        Restart dir: PathBuf = "models/target".into();
        /// One target per entry: "cpu", "cuda" or "cuda:N". "cpu" may be repeated.
        Restart devices: Vec<Device> = vec![Device::Cpu];
        /// Targets that get no new jobs, as indices into devices from 0: [1]. Each finishes its current job. At least one
        /// target stays active.
        Live paused: Vec<u32> = vec![];
        /// Dtype of the forward. "auto" = f32 if any entry of devices is a CPU, else bf16.
        Restart dtype: Auto<Dtype> = Auto::Auto;
        /// Tapped layers, counted from 0: layer i gives the residual stream after layer i. "auto" = one per drafter layer,
        /// evenly spaced from layer 1 to layer L-3 of L.
        Restart layer_ids: Auto<Vec<u32>> = Auto::Auto;
        /// Dtype of the hidden states in the pool. "auto" = target.dtype.
        Restart feature_dtype: Auto<Dtype> = Auto::Auto;
    }

    /// Plan of an epoch: the planner splits the samples into jobs. A job is one target forward and one micro-batch of a drafter.
    plan: Plan {
        /// Maximum token slots of a job, padding included.
        Restart job_tokens: u32 = 16384;
        /// Number of length buckets. A job takes its samples from one bucket.
        Restart buckets: u16 = 8;
        /// Maximum sample length of each bucket, ascending: [512, 1024, 3072]. "auto" = the bounds with the least padding.
        Restart bucket_bounds: Auto<Vec<u32>> = Auto::Auto;
        /// Order of the jobs: "spread" distributes each length evenly over the epoch, "shuffle" is uniformly random.
        Restart order: JobOrder = JobOrder::Spread;
        /// true = an epoch starts after all jobs of the previous one have ended. false keeps the pool full between epochs.
        Restart epoch_barrier: bool = false;
    }

    /// The central job queue from which targets pull, and the handling of failed and slow forwards.
    dispatch: Dispatch {
        /// Planned jobs in the queue. 64 is enough that no target waits for the planner.
        Live queue_jobs: u32 = 64;
        /// Jobs that CPU threads pad ahead of the targets.
        Live pad_ahead: u32 = 4;
        /// Attempts per job. After that many failures the job is skipped, and the reason is recorded.
        Live max_attempts: u32 = 3;
        /// Restarts of a target that panics, is lost or keeps failing. After that many failed restarts it stays down. The
        /// run ends when all targets are down.
        Live max_restarts: u32 = 5;
        /// Pause before the first restart of a target. Every further restart doubles it.
        Live restart_pause: TimeSpan = TimeSpan(Duration::from_secs(1));
        /// A forward that takes more than this multiple of the time for its length is logged as a straggler. 0 = never.
        Live straggler_factor: f64 = 5.0;
        /// true = another target may repeat the job of a straggler. The first result counts, the second is dropped.
        Live offer_stragglers: bool = true;
        /// The run fails if more than this fraction of an epoch's jobs is skipped.
        Live max_skip_fraction: f64 = 0.01;
    }

    /// The pool: host memory that holds extracted hidden states until a drafter draws them.
    pool: Pool {
        /// Limit of the pool's memory: reserved, waiting and checked-out batches together.
        Live max_bytes: ByteSize = ByteSize(4 << 30);
        /// Limit of the number of reserved and waiting batches. Checked-out batches do not count.
        Live max_batches: u32 = 16;
        /// Number of ready batches that a draw waits for. More ready batches mix more lengths into a step.
        Live min_ready: u32 = 4;
        /// Order in which batches leave the pool. "proportional" = the bucket that is furthest behind its fraction of the
        /// plan, a random batch in it. "uniform" = any batch. "replay" = an order fixed by plan and seed, so two runs train
        /// the same steps; a draw waits for one exact batch and ignores min_ready. A change to or from "replay" needs a
        /// restart.
        Live draw_policy: DrawPolicy = DrawPolicy::Proportional;
        /// For draw_policy = "replay": size of the window in which jobs are shuffled. "auto" = the number of largest jobs
        /// that fit into max_bytes, at most max_batches.
        Restart replay_window: Auto<u32> = Auto::Auto;
    }

    /// The drafter. Keys that are "auto" take their value from the target.
    drafter: Drafter {
        /// One drafter per entry: "cpu", "cuda" or "cuda:N". "cpu" may be repeated.
        Restart devices: Vec<Device> = vec![Device::Cpu];
        /// Folder of a drafter to start from, in the z-lab or speculators layout, as `draftmill import --draft` and
        /// `draftmill export` write it. Sizes and tapped layers must match this section. "auto" = new weights.
        Restart init_from: Auto<PathBuf> = Auto::Auto;
        /// New weights: "random" from run.seed, or "least-squares" = a linear fit to the target's hidden states on 32,768
        /// tokens of the data. The fit loads the whole target once, needs two layers, and saves about 1000 steps.
        Restart init_method: InitMethod = InitMethod::Random;
        /// Drafters that draw no batches, as indices into devices from 0: [1]. Each trains the batches that it has. At least
        /// one drafter stays active.
        Live paused: Vec<u32> = vec![];
        /// Number of decoder layers. 5 is the value of the DFlash paper.
        Restart layers: u32 = 5;
        /// Draft head: "dflash"; "dspark" = each token of a block is drafted with a bias from the token before it;
        /// "dflash2" = convolutions within a block, and a selector among the most likely tokens.
        Restart head: Head = Head::Dflash;
        /// For head = "dspark": form of the bias, "vanilla", "gated" or "rnn". vLLM serves "vanilla" only.
        Restart markov_head: MarkovHead = MarkovHead::Vanilla;
        /// For head = "dspark": rank of the bias. 0 = no bias.
        Restart markov_rank: u32 = 256;
        /// For head = "dspark": head that predicts the acceptance of each slot, from the hidden state and the embedding of
        /// the token before ("markov"), from the hidden state ("hidden"), or "none".
        Restart confidence_head: ConfidenceHead = ConfidenceHead::Markov;
        /// For head = "dspark": weight of the confidence head's loss.
        Restart confidence_loss_weight: f64 = 1.0;
        /// For head = "dflash2": positions that a convolution mixes.
        Restart conv_taps: u32 = 2;
        /// For head = "dflash2": channels with a common dynamic kernel. Must divide the target's width.
        Restart conv_group: u32 = 16;
        /// For head = "dflash2": rank of the selector.
        Restart selector_rank: u32 = 256;
        /// For head = "dflash2": number of most likely tokens from which the selector chooses.
        Restart selector_top_k: u32 = 16;
        /// For head = "dflash2": weight of the selector's loss.
        Restart selector_loss_weight: f64 = 1.0;
        /// For head = "dflash2": a slot whose label is not among the candidates. "skip" = the selector does not train there,
        /// "inject" = the label replaces the least likely candidate.
        Restart selector_missing_label: MissingLabel = MissingLabel::Skip;
        /// Attention of each layer: "full" or "sliding", one entry per layer. z-lab's drafters for long contexts have sliding
        /// layers. "auto" = "full" in all layers.
        Restart layer_types: Auto<Vec<LayerAttention>> = Auto::Auto;
        /// For sliding layers: positions that a slot sees, its own included.
        Restart sliding_window: u32 = 2048;
        /// For sliding layers: true = a slot sees the slots before it only, false = all slots of its block.
        Restart sliding_causal: bool = true;
        /// For sliding layers in training: "slot" = each slot counts the window from its own position, as engines do, "anchor" =
        /// all slots see sliding_window positions before the anchor, as speculators trains.
        Restart sliding_start: WindowStart = WindowStart::Slot;
        /// Slots of a block. With head = "dspark" each predicts a token; otherwise the first one is given.
        Restart block_size: u32 = 16;
        /// Blocks per sample, at random positions that change with every pass. 512 is the value of the DFlash paper.
        Live anchors: u32 = 512;
        /// Attention heads. "auto" = those of the target, as for the next three keys.
        Restart heads: Auto<u32> = Auto::Auto;
        /// Heads of keys and values. Must divide heads.
        Restart kv_heads: Auto<u32> = Auto::Auto;
        /// Values per head. Must be even.
        Restart head_dim: Auto<u32> = Auto::Auto;
        /// Width of the MLP.
        Restart intermediate_size: Auto<u32> = Auto::Auto;
        /// Token that marks a slot to predict: a row of the target's embedding that text never uses. "auto" = the first that
        /// exists of: a mask token of the tokenizer, a row without a token, a reserved or unused special token, the last
        /// special token that the chat template does not use.
        Restart mask_token_id: Auto<u32> = Auto::Auto;
        /// Dtype of forward and backward. Weights and moments are always f32. "auto" = f32 if any entry of devices is a
        /// CPU, else bf16.
        Restart dtype: Auto<Dtype> = Auto::Auto;
        /// Loss of a slot, by the target's probabilities p and the drafter's q: "ce" = cross-entropy of one token, "kl" =
        /// KL(p, q), "reverse-kl" = KL(q, p), "tv" = total variation, which is one minus the acceptance, "lk" = from kl to tv
        /// as acceptance grows, "e2e-tv" = expected accepted tokens of a block; or weights, as { ce = 0.1, tv = 1.8 }. With
        /// one label, kl is the cross-entropy. "auto" = { ce = 0.1, tv = 1.8 } for head = "dspark", else "kl".
        Restart loss: Auto<LossTerms> = Auto::Auto;
        /// For loss = "lk": decay of kl's weight exp(-lk_eta x acceptance).
        Restart lk_eta: f64 = LK_ETA;
        /// Token of "ce", of accuracy and of "d-pace": "data" = the data's token, "labels" = the first label. "auto" = "data"
        /// for head = "dspark", else "labels".
        Restart ce_label: Auto<CeLabel> = Auto::Auto;
        /// Weight of a slot in the loss: "decay" = by the distance from the anchor, "d-pace" = by the slot's effect on the
        /// expected number of accepted tokens (arXiv 2605.18810), "none" = equal weights.
        Restart slot_weights: SlotWeights = SlotWeights::Decay;
        /// For slot_weights = "decay": slot k of a block has weight exp(-(k-1)/gamma). 0 = equal weights. "auto" = 4 for
        /// blocks of up to 8, 5 for up to 12, 7 for longer ones.
        Restart loss_decay_gamma: Auto<f64> = Auto::Auto;
        /// For slot_weights = "d-pace": smoothing alpha, above 0 and at most 1. 1 = the drafter's probabilities have no
        /// effect.
        Restart d_pace_alpha: f64 = 0.5;
        /// true = store only the input of each layer for the backward pass and recompute the rest. Saves memory, costs time.
        Restart recompute_layers: bool = false;
        /// "data" = the labels are the tokens of the data. "target" = the labels are the target's own predictions, for data
        /// that another model or a person wrote. "target" runs all layers of the target and its head.
        Restart labels: Labels = Labels::Data;
        /// For labels = "target": number of the target's most likely tokens that are labels at each position, with their
        /// probabilities (Kullback-Leibler loss). 1 = the most likely token alone. Each takes 8 bytes of the pool per
        /// position. "all" = the whole distribution: the pool stores one more hidden state, and drafters apply the head.
        Restart label_top_k: TopK = TopK::Tokens(1);
        /// Batches that each drafter draws ahead. A drafter on a GPU copies them to its memory during the current batch.
        Live prefetch: u32 = 1;
        /// For several drafters on one GPU each: "copy" copies each gradient and each set of weights. "nccl" uses reduce and
        /// broadcast of NCCL if the library exists and passes its self-test; else it logs a warning and uses copies. With
        /// more than two drafters the sums of "copy" and "nccl" may differ in their last bits.
        Restart collectives: Collectives = Collectives::Copy;
        /// For several drafters: steps between checksum comparisons of their weights with the published ones. A difference
        /// shows a faulty device or a faulty copy between devices. 0 = never.
        Live replica_check_every: u64 = 500;
    }

    /// Optimizer on f32 weights, one update per step.
    optimizer: Optimizer {
        /// "adamw", or "muon" = Muon for the matrices of the drafter and AdamW for the rest.
        Restart kind: OptimizerKind = OptimizerKind::Adamw;
        /// Peak learning rate. 6e-4 is the value of the DFlash paper.
        Live learning_rate: f64 = 6e-4;
        /// Learning rate after the warm-up: "cosine" falls to min_learning_rate at the last step, "constant" stays.
        Live schedule: Schedule = Schedule::Cosine;
        /// Fraction of all steps in which the learning rate rises linearly from 0.
        Live warmup_fraction: f64 = 0.04;
        /// Learning rate at the end of the cosine.
        Live min_learning_rate: f64 = 0.0;
        /// Decoupled weight decay.
        Live weight_decay: f64 = 0.0;
        /// Decay rate of the first moment.
        Restart beta1: f64 = 0.9;
        /// Decay rate of the second moment.
        Restart beta2: f64 = 0.999;
        /// Constant that is added to the square root of the second moment.
        Restart eps: f64 = 1e-8;
        /// For kind = "muon": learning rate of matrices as a multiple of learning_rate.
        Restart muon_rate_scale: f64 = 1.0;
        /// For kind = "muon": decay rate of the momentum.
        Restart muon_momentum: f64 = 0.95;
        /// For kind = "muon": decoupled weight decay of matrices.
        Restart muon_weight_decay: f64 = 0.1;
        /// For kind = "muon": iterations of Newton-Schulz.
        Restart muon_iterations: u32 = 5;
        /// For kind = "muon": size of an update, "match-rms-adamw" or "original" = sqrt(max(1, rows / columns)).
        Restart muon_scale: MuonScale = MuonScale::MatchRmsAdamw;
        /// Maximum global L2 norm of the gradient. A longer gradient is scaled down to it.
        Live max_grad_norm: f64 = 1.0;
        /// Micro-batches per active drafter in one step.
        Live accumulation: u32 = 1;
    }

    /// Checkpoints and the exported drafter.
    checkpoint: Checkpoint {
        /// Optimizer steps between checkpoints. The end of a run always writes one.
        Live every_steps: u64 = 500;
        /// Number of newest checkpoints to keep. A running run keeps one more.
        Live keep_last: u32 = 3;
        /// In addition, the first checkpoint of each interval of this many steps is kept permanently. 0 = none.
        Live keep_every: u64 = 0;
        /// In addition, this many checkpoints with the best measured acceptance (section [eval]) are kept.
        Live keep_best: u32 = 1;
        /// Dtype of the exported weights.
        Live export_dtype: Dtype = Dtype::Bf16;
    }

    /// Evaluation during training, with a separate copy of the whole target: loss and accuracy on held-out samples
    /// (data.validation_fraction), and acceptance in real decoding. An evaluation that is due during another one is skipped.
    /// The first and the last weights are always decoded with.
    eval: Eval {
        /// Optimizer steps between evaluations of loss, accuracy by position and predicted acceptance. 0 = never.
        Live every_steps: u64 = 250;
        /// Number of held-out samples per evaluation. All evaluations use the same ones.
        Restart samples: u32 = 32;
        /// Optimizer steps between evaluations of acceptance by decoding. 0 = never. "auto" = checkpoint.every_steps, so
        /// each checkpoint has a measured acceptance.
        Live decode_every_steps: Auto<u64> = Auto::Auto;
        /// Number of prompts to decode. All evaluations use the same ones.
        Restart prompts: u32 = 8;
        /// JSONL file of prompts, in the formats of `draftmill eval`. "auto" = the beginnings of held-out samples.
        Restart prompt_file: Auto<PathBuf> = Auto::Auto;
        /// Maximum number of tokens of a decoded response.
        Restart max_new_tokens: u32 = 64;
        /// Device of the evaluation. "auto" = the device of the first target.
        Restart device: Auto<Device> = Auto::Auto;
        /// Maximum fraction of the run's time for evaluation. A pause after each evaluation enforces it.
        Live max_share: f64 = 0.1;
    }

    /// The HTTP port: status page, metrics for Prometheus, health probes, and commands to the running service.
    admin: Admin {
        /// Address to listen on, or "off". Every client that reaches it may read. If the address is not loopback, commands
        /// need the token.
        Restart listen: Listen = Listen(Some(([127, 0, 0, 1], 9464).into()));
        /// File with the token for commands (pause, resume, checkpoint, reload), at least 16 characters, for example from
        /// `openssl rand -hex 32`. "" = no token, allowed on loopback only.
        Restart token_file: PathBuf = PathBuf::new();
    }

    /// Log lines on stderr.
    log: Log {
        /// error, warn, info, debug or trace, also by module: "info,draftmill::data=debug".
        Live level: String = "info".into();
        /// "human" or "json". "auto" = human on a terminal, json otherwise.
        Restart format: LogFormat = LogFormat::Auto;
        /// Time between progress lines if stderr is no terminal.
        Live progress_every: TimeSpan = TimeSpan(Duration::from_secs(5));
    }

    /// Reload of this file by a running service. A reload applies all changed "live" keys, or none if one change is refused.
    /// Changes that affect a step apply at the next step boundary. SIGHUP reloads at once.
    reload: Reload {
        /// Time between checks of the file for a change. "0s" = reload on SIGHUP only.
        Live poll: TimeSpan = TimeSpan(Duration::from_secs(1));
    }

    /// Behaviour on SIGINT and SIGTERM.
    shutdown: Shutdown {
        /// Time limit for running work and a last checkpoint. After it the process ends without a checkpoint.
        Live grace: TimeSpan = TimeSpan(Duration::from_secs(120));
        /// Batches in the pool: "reopen" = the next start extracts their jobs again. "train" = targets finish their current
        /// forward, and drafters train the pool's batches as far as they fill whole steps, within half of grace.
        Live pool: PoolAtShutdown = PoolAtShutdown::Reopen;
    }

    /// Cost model of `draftmill simulate` and of run.engine = "simulated". Durations are rounded to whole milliseconds; the
    /// remainder is added to the next operation.
    simulate: Simulate {
        /// Target time per token slot, padding included.
        Restart target_per_token: TimeSpan = TimeSpan(Duration::from_micros(20));
        /// Target time of attention: per token slot and per 1024 tokens of row length.
        Restart target_attention: TimeSpan = TimeSpan(Duration::from_nanos(500));
        /// Bytes of hidden states per token; even, because a value has two bytes. 40 KiB = Qwen3-8B with 5 taps in bf16.
        Restart feature_bytes_per_token: ByteSize = ByteSize(40 << 10);
        /// Bytes per second from a target to the pool. A target computes nothing during a copy. 0 = copies take no time.
        Restart bandwidth: ByteSize = ByteSize(25_000_000_000);
        /// Drafter time per micro-batch, independent of its length.
        Restart micro_batch: TimeSpan = TimeSpan(Duration::from_millis(200));
        /// Drafter time per context token of a micro-batch, added to micro_batch.
        Restart per_context_token: TimeSpan = TimeSpan(Duration::ZERO);
        /// Time to sum the gradients of a step. All drafters wait.
        Restart reduce: TimeSpan = TimeSpan(Duration::from_millis(10));
        /// Time of the optimizer per step. All drafters wait.
        Restart step: TimeSpan = TimeSpan(Duration::from_millis(20));
        /// Speed factors of the targets, in the order of target.devices: [1.0, 0.5] = the second has half the speed. Missing
        /// entries are 1; surplus entries have no effect.
        Restart target_speeds: Vec<f64> = vec![];
        /// Speed factors of the drafters, in the order of drafter.devices.
        Restart drafter_speeds: Vec<f64> = vec![];
        /// Relative standard deviation of every duration, from 0 to 0.3.
        Restart jitter: f64 = 0.02;
        /// Fraction of extractions that fail. A failed extraction takes its full time.
        Restart job_failures: f64 = 0.0;
        /// Fraction of micro-batches that fail. A failed micro-batch takes its full time.
        Restart micro_batch_failures: f64 = 0.0;
        /// Sample lengths of `draftmill simulate`: "lognormal" = random, "store" = those of data.store.
        Restart lengths: Lengths = Lengths::Lognormal;
        /// Median of the lognormal lengths, in tokens.
        Restart median_length: u32 = 1000;
        /// Standard deviation of the logarithm of the lengths. 0.8 = one sample in six is longer than 2.2 medians.
        Restart length_sigma: f64 = 0.8;
        /// Minimum of the lognormal lengths, in tokens. The maximum is data.max_length.
        Restart min_length: u32 = 32;
        /// Jobs per epoch with lognormal lengths, within 1 %. The number of samples follows from it.
        Restart jobs: u32 = 2000;
    }
}
