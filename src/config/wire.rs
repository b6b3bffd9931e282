//! The configuration as it is written: every section, key, default and comment, each declared once.
//!
//! `sections!` turns the declarations into one serde struct per section and into [`FIELDS`], the table from which the
//! annotated example, the unknown-key suggestions and the check "may this change while running?" are made.

use super::values::{
    Auto, ByteSize, Dtype, Ending, Engine, Collectives, Labels, Lengths, Listen, LogFormat, Overlong, Schedule,
    SlotWeights, InitMethod, TimeSpan, TopK, UnknownRole,
};
use crate::common::device::Device;
use draftmill_actors::{planner::plan::Order, pool::Draw};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// When a changed value takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apply {
    /// At once, in a running service.
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
    /// The comment, one line of text per line, each with its leading space.
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

        /// The whole file.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Wire { $( $(#[doc = $section_doc])* pub $section: $Section, )* }

        /// The sections and their comments, in the order of the file.
        pub const SECTIONS: &[(&str, &str)] =
            &[$( (stringify!($section), concat!($($section_doc, "\n"),*)), )*];

        /// Every key, in the order of the file.
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
        /// Folder of the run: resolved configuration, state.db, checkpoints, export. Relative paths start at the working
        /// directory.
        Restart dir: PathBuf = "runs/run".into();
        /// Root of all randomness: plan, anchors, initial weights.
        Restart seed: u64 = 42;
        /// Passes over the data (the paper's recipe: 6).
        Restart epochs: u32 = 6;
        /// Stop after this many optimizer steps; 0 = no limit but the epochs.
        Restart max_steps: u64 = 0;
        /// "torch", or "simulated": a cost model that sleeps instead of computing (section [simulate]).
        Restart engine: Engine = Engine::Torch;
        /// CPU threads of one libtorch operation; "auto" = an equal share of the cores for each CPU device in use, which is
        /// best where all are busy. Where one mostly waits for another, more threads use the cores that it leaves idle.
        Restart threads: Auto<u32> = Auto::Auto;
    }

    /// What `draftmill prepare` reads, and the store that it writes.
    data: Data {
        /// JSONL or JSON arrays of conversations or pre-tokenised rows, also gzipped: ["chats.jsonl", "more.json.gz"].
        Restart inputs: Vec<PathBuf> = vec![];
        /// The prepared store; "auto" = data.safetensors in run.dir.
        Restart store: Auto<PathBuf> = Auto::Auto;
        /// Longest sample, in tokens.
        Restart max_length: u32 = 3072;
        /// Longer samples: "cut" off the end, or "drop" them.
        Restart overlong: Overlong = Overlong::Cut;
        /// A turn whose role is not known: "reject" the row, or "skip" the turn.
        Restart unknown_role: UnknownRole = UnknownRole::Reject;
        /// Samples with fewer supervised tokens are left out (counted, not an error).
        Restart min_supervised: u32 = 32;
        /// Share of samples, chosen by a hash of their content, that is kept apart in the store and never trained, for a
        /// measure of your own.
        Restart validation_fraction: f64 = 0.01;
        /// More rejected rows than this share end `prepare` with an error.
        Restart max_reject_fraction: f64 = 0.05;
        /// Longest row of an input; longer ones are rejected. Bounds the memory of `prepare`.
        Restart max_row_bytes: ByteSize = ByteSize(16 << 20);
    }

    /// The frozen target model, whose hidden states are the drafter's input.
    target: Target {
        /// Hugging Face folder: config.json, *.safetensors, tokenizer.json, chat template.
        Restart dir: PathBuf = "models/target".into();
        /// One target per entry: "cpu" or "cuda:0"; "cpu" may be repeated.
        Restart devices: Vec<Device> = vec![Device::Cpu];
        /// Targets that get no jobs for now, by their place in devices from 0: [1]. Each finishes what it has; one has to stay.
        Live paused: Vec<u32> = vec![];
        /// Number type of the forward; "auto" = f32 on CPU, bf16 on CUDA.
        Restart dtype: Auto<Dtype> = Auto::Auto;
        /// Tapped layers, 0-based: id i is the residual stream after layer i. "auto" = one per drafter layer, spread
        /// from 1 to L-3.
        Restart layer_ids: Auto<Vec<u32>> = Auto::Auto;
        /// Number type of hidden states while they wait; "auto" = as target.dtype.
        Restart feature_dtype: Auto<Dtype> = Auto::Auto;
    }

    /// How an epoch is cut into jobs.
    plan: Plan {
        /// Most token slots of one job, padding included. A job is one forward of a target and one micro-batch.
        Restart job_tokens: u32 = 16384;
        /// Number of length buckets.
        Restart buckets: u16 = 8;
        /// Longest sample of each bucket, ascending: [512, 1024, 3072]. "auto" = the bounds that waste least padding.
        Restart bucket_bounds: Auto<Vec<u32>> = Auto::Auto;
        /// "spread" = each length evenly over the epoch; "shuffle" = uniformly at random.
        Restart order: Order = Order::Spread;
        /// Let every job of an epoch end before the next epoch begins. false keeps the pool full between epochs.
        Restart epoch_barrier: bool = false;
    }

    /// The central queue from which targets pull.
    dispatch: Dispatch {
        /// Jobs of the plan that wait in the queue: enough that the planner is never waited for.
        Live queue_jobs: u32 = 64;
        /// Jobs padded ahead on CPU threads.
        Live pad_ahead: u32 = 4;
        /// A job that failed this often is skipped, with its reason recorded.
        Live max_attempts: u32 = 3;
        /// A target that panics, is lost or keeps failing is taken out and restarted; after this many restarts in vain it is
        /// gone for good. When all targets are gone, the run ends.
        Live max_restarts: u32 = 5;
        /// Pause before the first restart of a target; each further one doubles it.
        Live restart_pause: TimeSpan = TimeSpan(Duration::from_secs(1));
        /// A forward that takes this many times longer than others of its length is reported as a straggler; 0 = never.
        Live straggler_factor: f64 = 5.0;
        /// Offer a straggler's job to another target; the first result counts, the other is dropped.
        Live offer_stragglers: bool = true;
        /// More skipped jobs than this share of the epoch end the run.
        Live max_skip_fraction: f64 = 0.01;
    }

    /// Where hidden states wait for a drafter.
    pool: Pool {
        /// Bytes held and reserved never exceed this.
        Live max_bytes: ByteSize = ByteSize(4 << 30);
        /// Batches held and reserved never exceed this.
        Live max_batches: u32 = 16;
        /// Draws wait until this many batches are ready, so that the micro-batches of a step differ in length.
        Live min_ready: u32 = 4;
        /// "proportional" = the bucket that lags its share most, random inside it; "uniform" = any batch; "replay" = an order
        /// that plan and seed fix, so that two runs train the same steps whatever the timing: it waits for the one batch
        /// that is next, whatever min_ready says. To "replay" and from it only at a start.
        Live draw_policy: Draw = Draw::Proportional;
        /// For draw_policy = "replay": jobs among which the order is shuffled. "auto" = as many of the largest job as the pool
        /// surely holds.
        Restart replay_window: Auto<u32> = Auto::Auto;
    }

    /// The drafter (DFlash). Everything that is "auto" follows the target.
    drafter: Drafter {
        /// One drafter per entry: "cpu" or "cuda:0"; "cpu" may be repeated.
        Restart devices: Vec<Device> = vec![Device::Cpu];
        /// Folder of a drafter to start from, as `draftmill import --draft` or an export writes it, in either layout; its sizes
        /// and taps must be those of this section. "auto" = new weights, which follow from run.seed.
        Restart init_from: Auto<PathBuf> = Auto::Auto;
        /// New weights are "random", or "least-squares": fitted to what the target says in 32 768 tokens of the data: a whole
        /// target is loaded for it, and the first thousand steps are saved. Needs two layers or more.
        Restart init_method: InitMethod = InitMethod::Random;
        /// Drafters that draw nothing for now, by their place in devices from 0: [1]. Each trains what it has in hand; one has to
        /// stay.
        Live paused: Vec<u32> = vec![];
        /// Decoder layers.
        Restart layers: u32 = 5;
        /// Tokens of a block: one that is known and block_size - 1 that are predicted.
        Restart block_size: u32 = 16;
        /// Blocks trained in each sample, drawn anew each time (the paper's recipe: 512).
        Live anchors: u32 = 512;
        /// Attention heads.
        Restart heads: Auto<u32> = Auto::Auto;
        /// Heads of keys and values; divides heads.
        Restart kv_heads: Auto<u32> = Auto::Auto;
        /// Values of one head; even.
        Restart head_dim: Auto<u32> = Auto::Auto;
        /// Width of the MLP.
        Restart intermediate_size: Auto<u32> = Auto::Auto;
        /// Token that stands for "to be predicted": a row of the target's embedding that text never uses. "auto" = a mask
        /// token of the tokenizer, else the first row that has no token, else a reserved or unused special token, else the
        /// last special token that the chat template does not use.
        Restart mask_token_id: Auto<u32> = Auto::Auto;
        /// Number type of forward and backward (weights and moments are always f32); "auto" = f32 on CPU, bf16 on CUDA.
        Restart dtype: Auto<Dtype> = Auto::Auto;
        /// "decay" = by distance from the anchor, see the next key; "d-pace" = by what a slot is worth to the tokens
        /// accepted, as the drafter stands (arXiv 2605.18810).
        Restart slot_weights: SlotWeights = SlotWeights::Decay;
        /// For slot_weights = "decay": slot k of a block weighs exp(-(k-1)/gamma); 0 = all the same. "auto" = the paper's
        /// 4, 5 or 7 for blocks of up to 8, up to 12, or more.
        Restart loss_decay_gamma: Auto<f64> = Auto::Auto;
        /// For slot_weights = "d-pace", above 0, up to 1: how little a slot's own chance counts; 1 = not at all.
        Restart d_pace_alpha: f64 = 0.5;
        /// Keep only each layer's input for the backward pass and compute the layer again there: less memory, more time.
        Restart recompute_layers: bool = false;
        /// "data" = learn the tokens of the data; "target" = learn what the target would say at each place, for data that the target
        /// did not write, whose tokens are the wrong teacher. Targets are then computed whole, head included.
        Restart labels: Labels = Labels::Data;
        /// For labels = "target": so many of its likeliest tokens are learned at each place, each with its share (their
        /// Kullback-Leibler divergence is the loss); 1 = the likeliest alone. Each takes 8 bytes of the pool. "all" = its
        /// whole distribution, which takes those of one more tapped layer, and the drafters make it again from that.
        Restart label_top_k: TopK = TopK::Likeliest(1);
        /// Batches that each drafter draws ahead while it computes. On a GPU their hidden states are copied to it meanwhile,
        /// and take room there.
        Live prefetch: u32 = 1;
        /// With several drafters, each on a GPU of its own: "copy" = a copy of each gradient and each set of weights; "nccl" =
        /// NCCL adds the gradients and brings the weights to all at once, where its library is there and passes a trial at
        /// the start; else copies do, and a warning says why. Sums of more than two drafters may differ in their last bits.
        Restart collectives: Collectives = Collectives::Copy;
        /// With several drafters: steps between comparisons of their weights with those that they were given, by checksum, which find
        /// a device or a copy between devices that brings wrong values; 0 = never.
        Live replica_check_every: u64 = 500;
    }

    /// AdamW on f32 weights, one update per step.
    optimizer: Optimizer {
        /// Peak learning rate (the paper's recipe: 6e-4).
        Live learning_rate: f64 = 6e-4;
        /// After the warm-up: "cosine" down to min_learning_rate at the last step, or "constant".
        Live schedule: Schedule = Schedule::Cosine;
        /// Share of all steps over which the learning rate rises linearly.
        Live warmup_fraction: f64 = 0.04;
        /// Learning rate at the end of the cosine.
        Live min_learning_rate: f64 = 0.0;
        /// Decoupled weight decay.
        Live weight_decay: f64 = 0.0;
        /// Decay of the first moment.
        Restart beta1: f64 = 0.9;
        /// Decay of the second moment.
        Restart beta2: f64 = 0.999;
        /// Added to the root of the second moment.
        Restart eps: f64 = 1e-8;
        /// Largest global L2 norm of the gradient; larger ones are scaled down to it.
        Live max_grad_norm: f64 = 1.0;
        /// Micro-batches per drafter in one step: a step has accumulation x drafters of them, those that are paused aside.
        Live accumulation: u32 = 1;
    }

    /// What is kept on disk.
    checkpoint: Checkpoint {
        /// Optimizer steps between checkpoints; one is always written at the end.
        Live every_steps: u64 = 500;
        /// Newest checkpoints that are kept when a run ends, and one more while it goes on; older ones are deleted.
        Live keep_last: u32 = 3;
        /// Checkpoints that are kept besides, for good: the first of every so many steps. 0 = none.
        Live keep_every: u64 = 0;
        /// Checkpoints that are kept besides: those whose drafter had the best measured acceptance (section [eval]).
        Live keep_best: u32 = 1;
        /// Number type of exported weights.
        Live export_dtype: Dtype = Dtype::Bf16;
    }

    /// What the drafter is worth while it trains, measured beside the steps with a whole target of its own: on held-out samples
    /// (data.validation_fraction), which are never trained, and by decoding. A measure that is due while another one is under way
    /// is left out. The weights of the beginning and of the end are always decoded with.
    eval: Eval {
        /// Optimizer steps between measures of loss, accuracy by position and the acceptance that these predict; 0 = never.
        Live every_steps: u64 = 250;
        /// Held-out samples of such a measure, the same ones each time.
        Restart samples: u32 = 32;
        /// Optimizer steps between measures of acceptance by real decoding; 0 = never. "auto" = those of
        /// checkpoint.every_steps, so that each checkpoint has its acceptance.
        Live decode_every_steps: Auto<u64> = Auto::Auto;
        /// Prompts that are decoded, the same ones each time.
        Restart prompts: u32 = 8;
        /// JSONL of prompts, as `draftmill eval` takes them; "auto" = the beginnings of held-out samples.
        Restart prompt_file: Auto<PathBuf> = Auto::Auto;
        /// Tokens of a decoded response at most.
        Restart max_new_tokens: u32 = 64;
        /// Where it computes; "auto" = beside the first target.
        Restart device: Auto<Device> = Auto::Auto;
        /// Most share of the run's time that is spent on it: after a measure it rests as long as that takes.
        Live max_share: f64 = 0.1;
    }

    /// The HTTP port: status page, /metrics (Prometheus), probes, and orders to the running service.
    admin: Admin {
        /// Address to listen on. Whoever reaches it may read; beyond loopback, orders need the token. "off" = no port.
        Restart listen: Listen = Listen(Some(([127, 0, 0, 1], 9464).into()));
        /// File with the token that orders (pause, resume, checkpoint, reload) must carry: at least 16 characters, for example from
        /// `openssl rand -hex 32`. "" = none, which is for loopback alone.
        Restart token_file: PathBuf = PathBuf::new();
    }

    /// Log lines, on stderr.
    log: Log {
        /// error, warn, info, debug or trace, also per module: "info,draftmill::data=debug".
        Live level: String = "info".into();
        /// "human" or "json"; "auto" = human on a terminal.
        Restart format: LogFormat = LogFormat::Auto;
        /// Time between progress lines where stderr is no terminal.
        Live progress_every: TimeSpan = TimeSpan(Duration::from_secs(5));
    }

    /// This file, while the service runs. Keys marked "live" take effect when it is saved: all of them or, where one cannot, none.
    /// What shapes a step does so at the next step border. SIGHUP has it read at once.
    reload: Reload {
        /// Time between looks at the file; "0s" = only on SIGHUP.
        Live poll: TimeSpan = TimeSpan(Duration::from_secs(1));
    }

    /// What happens on SIGINT and SIGTERM.
    shutdown: Shutdown {
        /// Time for running work and a last checkpoint; after it the process ends without.
        Live grace: TimeSpan = TimeSpan(Duration::from_secs(120));
        /// Batches that wait in the pool: "reopen" = another start extracts their jobs anew; "train" = targets finish the forward in
        /// hand, and what is in the pool is trained as far as it makes whole steps, for at most half of grace.
        Live pool: Ending = Ending::Reopen;
    }

    /// The cost model of `draftmill simulate`, and of run.engine = "simulated". Work takes whole milliseconds; what is rounded off
    /// is added to the work that follows.
    simulate: Simulate {
        /// Time of a target per token slot, padding included: "20us".
        Restart target_per_token: TimeSpan = TimeSpan(Duration::from_micros(20));
        /// Attention, quadratic in length: time of a target per token slot for every 1024 tokens of its row.
        Restart target_attention: TimeSpan = TimeSpan(Duration::from_nanos(500));
        /// Bytes of hidden states per token (Qwen3-8B, 5 taps, bf16: 40 KiB). Even: a value has two.
        Restart feature_bytes_per_token: ByteSize = ByteSize(40 << 10);
        /// Bytes per second at which a target moves its hidden states out; the target pays, it does nothing else meanwhile.
        /// 0 = in no time.
        Restart bandwidth: ByteSize = ByteSize(25_000_000_000);
        /// Time of a drafter per micro-batch, whatever its length.
        Restart micro_batch: TimeSpan = TimeSpan(Duration::from_millis(200));
        /// Time of a drafter per context token of its micro-batch, on top.
        Restart per_context_token: TimeSpan = TimeSpan(Duration::ZERO);
        /// Time in which the gradients of a step are added up; all drafters wait.
        Restart reduce: TimeSpan = TimeSpan(Duration::from_millis(10));
        /// Time of the optimizer per step; all drafters wait.
        Restart step: TimeSpan = TimeSpan(Duration::from_millis(20));
        /// Speed of each target, in the order of target.devices: [1.0, 0.5] = the second is half as fast. Those that the list
        /// leaves out have 1; with fewer targets only the first ones count.
        Restart target_speeds: Vec<f64> = vec![];
        /// Speed of each drafter, likewise.
        Restart drafter_speeds: Vec<f64> = vec![];
        /// Relative standard deviation of every unit of work, from 0 to 0.3.
        Restart jitter: f64 = 0.02;
        /// Share of extractions that fail, after they took their time.
        Restart job_failures: f64 = 0.0;
        /// Share of micro-batches that fail, after they took their time.
        Restart micro_batch_failures: f64 = 0.0;
        /// Lengths of the samples of `draftmill simulate`: "lognormal", or those of data.store.
        Restart lengths: Lengths = Lengths::Lognormal;
        /// Median of the lognormal lengths, in tokens.
        Restart median_length: u32 = 1000;
        /// Standard deviation of their logarithm: 0.8 = every sixth sample is longer than 2.2 times the median.
        Restart length_sigma: f64 = 0.8;
        /// Shorter ones are taken as this long, and those longer than data.max_length as long as that.
        Restart min_length: u32 = 32;
        /// Jobs of an epoch with lognormal lengths, give or take a hundredth: as many samples are made as fill them.
        Restart jobs: u32 = 2000;
    }
}
