//! Rules for settings that hold for every model.

mod drafter;

use super::{
    load::Written,
    log_filter,
    problem::{Problem, Problems},
    values::{Auto, ByteSize, TimeSpan},
    wire::Wire,
};
use crate::common::text::grouped;
use std::time::Duration;

/// Maximum of simulate.jobs. With a few dozen samples per job a plan of this size takes a few gigabytes.
const MAX_SIMULATED_JOBS: u32 = 5_000_000;

/// Returns a problem for every broken rule.
pub fn broken_rules(written: &Written) -> Problems {
    let mut audit = Audit { written, problems: vec![] };
    audit.ranges();
    audit.data_and_plan();
    audit.pool();
    audit.drafter();
    audit.optimizer();
    audit.pauses();
    audit.rest();
    audit.simulate();
    Problems(audit.problems)
}

struct Audit<'a> {
    written: &'a Written,
    problems: Vec<Problem>,
}

impl Audit<'_> {
    fn require(&mut self, holds: bool, key: &str, message: impl Into<String>, remedy: impl Into<String>) {
        if !holds {
            self.problems.push(self.written.problem(key, message, remedy));
        }
    }

    /// Checks the range of single numbers.
    fn ranges(&mut self) {
        let w = &self.written.wire;
        let positive: [(&str, u64); 29] = [
            ("run.epochs", w.run.epochs.into()),
            ("run.threads", w.run.threads.or(|| 1).into()),
            ("data.max_length", w.data.max_length.into()),
            ("data.max_row_bytes", w.data.max_row_bytes.0),
            ("plan.job_tokens", w.plan.job_tokens.into()),
            ("plan.buckets", w.plan.buckets.into()),
            ("dispatch.queue_jobs", w.dispatch.queue_jobs.into()),
            ("dispatch.pad_ahead", w.dispatch.pad_ahead.into()),
            ("dispatch.max_attempts", w.dispatch.max_attempts.into()),
            ("pool.max_bytes", w.pool.max_bytes.0),
            ("pool.max_batches", w.pool.max_batches.into()),
            ("pool.min_ready", w.pool.min_ready.into()),
            ("pool.replay_window", w.pool.replay_window.or(|| 1).into()),
            ("eval.samples", w.eval.samples.into()),
            ("eval.prompts", w.eval.prompts.into()),
            ("eval.max_new_tokens", w.eval.max_new_tokens.into()),
            ("drafter.layers", w.drafter.layers.into()),
            ("drafter.anchors", w.drafter.anchors.into()),
            ("drafter.heads", w.drafter.heads.or(|| 1).into()),
            ("drafter.kv_heads", w.drafter.kv_heads.or(|| 1).into()),
            ("drafter.head_dim", w.drafter.head_dim.or(|| 1).into()),
            ("drafter.intermediate_size", w.drafter.intermediate_size.or(|| 1).into()),
            ("optimizer.accumulation", w.optimizer.accumulation.into()),
            ("checkpoint.every_steps", w.checkpoint.every_steps),
            ("checkpoint.keep_last", w.checkpoint.keep_last.into()),
            ("simulate.feature_bytes_per_token", w.simulate.feature_bytes_per_token.0),
            ("simulate.median_length", w.simulate.median_length.into()),
            ("simulate.min_length", w.simulate.min_length.into()),
            ("simulate.jobs", w.simulate.jobs.into()),
        ];
        for (key, value) in positive {
            self.require(value >= 1, key, "must be at least 1", "remove the key for the default");
        }
        // Above every machine and model, and low enough that no product overflows and no loop over layers hangs.
        let at_most = [
            ("run.threads", w.run.threads.or(|| 1), 1 << 10),
            ("pool.max_batches", w.pool.max_batches, 1 << 15),
            ("dispatch.queue_jobs", w.dispatch.queue_jobs, 100_000),
            ("dispatch.pad_ahead", w.dispatch.pad_ahead, 1 << 12),
            ("drafter.prefetch", w.drafter.prefetch, 1 << 10),
            ("drafter.layers", w.drafter.layers, 1 << 10),
            ("drafter.heads", w.drafter.heads.or(|| 1), 1 << 12),
            ("drafter.kv_heads", w.drafter.kv_heads.or(|| 1), 1 << 12),
            ("drafter.head_dim", w.drafter.head_dim.or(|| 1), 1 << 12),
            ("drafter.intermediate_size", w.drafter.intermediate_size.or(|| 1), 1 << 22),
        ];
        for (key, value, most) in at_most {
            self.require(value <= most, key, "exceeds every machine and model", format!("choose at most {most}"));
        }
        let fractions = [
            ("data.max_reject_fraction", w.data.max_reject_fraction),
            ("dispatch.max_skip_fraction", w.dispatch.max_skip_fraction),
            ("optimizer.warmup_fraction", w.optimizer.warmup_fraction),
        ];
        for (key, value) in fractions {
            self.require((0.0..=1.0).contains(&value), key, "is not a fraction", "choose a number from 0 to 1");
        }
        let below_one = [
            ("data.validation_fraction", w.data.validation_fraction),
            ("optimizer.beta1", w.optimizer.beta1),
            ("optimizer.beta2", w.optimizer.beta2),
            ("optimizer.muon_momentum", w.optimizer.muon_momentum),
            ("simulate.job_failures", w.simulate.job_failures),
            ("simulate.micro_batch_failures", w.simulate.micro_batch_failures),
        ];
        for (key, value) in below_one {
            self.require(
                (0.0..1.0).contains(&value),
                key,
                "is out of range",
                "choose a number of at least 0 and below 1",
            );
        }
    }

    fn data_and_plan(&mut self) {
        let Wire { data, plan, target, .. } = &self.written.wire;
        let (longest, budget) = (data.max_length, plan.job_tokens);
        self.require(
            longest <= budget,
            "plan.job_tokens",
            format!("a sample of data.max_length = {longest} tokens does not fit into a job of {budget} tokens"),
            format!("raise it to at least {longest}, or lower data.max_length"),
        );
        self.require(
            data.min_supervised <= longest,
            "data.min_supervised",
            format!("is more than data.max_length = {longest}, so no sample has enough supervised tokens"),
            format!("choose at most {longest}"),
        );
        if let Auto::Set(bounds) = &plan.bucket_bounds {
            let ascending = bounds.windows(2).all(|pair| pair[0] < pair[1]) && bounds.first() != Some(&0);
            self.require(
                ascending && !bounds.is_empty(),
                "plan.bucket_bounds",
                "must be an ascending list of lengths of at least 1",
                "sort it and remove duplicates, or write \"auto\"",
            );
            self.require(
                bounds.last().is_none_or(|&last| last >= longest),
                "plan.bucket_bounds",
                format!("samples above the last bound, up to data.max_length = {longest}, have no bucket"),
                format!("append {longest}, or lower data.max_length"),
            );
            self.require(
                bounds.len() <= usize::from(u16::MAX),
                "plan.bucket_bounds",
                format!("has {} buckets", bounds.len()),
                format!("choose at most {}", u16::MAX),
            );
        }
        if let Auto::Set(ids) = &target.layer_ids {
            self.require(
                !ids.is_empty() && ids.windows(2).all(|pair| pair[0] < pair[1]),
                "target.layer_ids",
                "must be an ascending list of layers",
                "sort it and remove duplicates, or write \"auto\"",
            );
        }
        self.require(
            !target.devices.is_empty(),
            "target.devices",
            "names no device, so there is no target",
            "name at least one device, for example [\"cpu\"]",
        );
    }

    fn pool(&mut self) {
        let pool = &self.written.wire.pool;
        let (ready, most) = (pool.min_ready, pool.max_batches);
        self.require(
            ready <= most,
            "pool.min_ready",
            format!(
                "the run would stop permanently: draws wait for {ready} ready batches, and the pool holds at most \
                 pool.max_batches = {most}"
            ),
            format!("lower it to at most {most}, or raise pool.max_batches to at least {ready}"),
        );
        let window = pool.replay_window.or(|| most);
        self.require(
            window <= most,
            "pool.replay_window",
            format!(
                "the run would stop permanently: the next batch to draw may be the last of {window} to arrive, and the \
                 pool holds at most pool.max_batches = {most}"
            ),
            format!("lower it to at most {most}, or raise pool.max_batches to at least {window}"),
        );
    }

    fn pauses(&mut self) {
        let Wire { target, drafter, .. } = &self.written.wire;
        for (section, devices, paused) in
            [("target", target.devices.len(), &target.paused), ("drafter", drafter.devices.len(), &drafter.paused)]
        {
            let key = format!("{section}.paused");
            let unknown = paused.iter().find(|&&index| index as usize >= devices);
            self.require(
                unknown.is_none(),
                &key,
                format!("there is no {section} {}: {section}.devices has {devices} entries", unknown.unwrap_or(&0)),
                format!("use indices into {section}.devices, counted from 0"),
            );
            let all = unknown.is_none() && devices > 0 && (0..devices as u32).all(|index| paused.contains(&index));
            self.require(
                !all,
                &key,
                format!("pauses every {section}, so the run would make no progress"),
                format!("keep one {section} active; a POST to /pause pauses the whole run"),
            );
        }
    }

    fn optimizer(&mut self) {
        let optimizer = &self.written.wire.optimizer;
        let positive = [
            ("optimizer.learning_rate", optimizer.learning_rate),
            ("optimizer.muon_rate_scale", optimizer.muon_rate_scale),
            ("optimizer.eps", optimizer.eps),
            ("optimizer.max_grad_norm", optimizer.max_grad_norm),
        ];
        for (key, value) in positive {
            self.require(value > 0.0 && value.is_finite(), key, "must be above 0", "remove the key for the default");
        }
        self.require(
            (1..=50).contains(&optimizer.muon_iterations),
            "optimizer.muon_iterations",
            "is out of range",
            "choose from 1 to 50",
        );
        self.require(
            optimizer.muon_weight_decay >= 0.0 && optimizer.muon_weight_decay.is_finite(),
            "optimizer.muon_weight_decay",
            "is out of range",
            "choose a number of at least 0",
        );
        self.require(
            optimizer.weight_decay >= 0.0 && optimizer.weight_decay.is_finite(),
            "optimizer.weight_decay",
            "must not be negative",
            "choose 0 for none",
        );
        let drafters = self.written.wire.drafter.devices.len().max(1);
        // Half of the planner's jobs in flight; the other half is for queued, extracted and drawn jobs.
        let most = draftmill_actors::planner::IN_FLIGHT / 2 / drafters;
        self.require(
            optimizer.accumulation as usize <= most,
            "optimizer.accumulation",
            format!("with {drafters} drafters a step would have more micro-batches than can be in flight"),
            format!("choose at most {most}"),
        );
        let (low, peak) = (optimizer.min_learning_rate, optimizer.learning_rate);
        self.require(
            (0.0..=peak.max(0.0)).contains(&low),
            "optimizer.min_learning_rate",
            format!("is not between 0 and the peak, optimizer.learning_rate = {peak}"),
            format!("choose a number from 0 to {peak}"),
        );
    }

    fn rest(&mut self) {
        let admin = &self.written.wire.admin;
        self.require(
            admin.listen.0.is_none_or(|address| address.ip().is_loopback()) || !admin.token_file.as_os_str().is_empty(),
            "admin.token_file",
            format!(
                "admin.listen = \"{}\" is reachable from other machines, and commands would need no token",
                admin.listen
            ),
            "name a file with a token, or listen on 127.0.0.1",
        );
        let Wire { run, data, target, drafter, eval, .. } = &self.written.wire;
        let paths = [
            ("run.dir", Some(&run.dir)),
            ("target.dir", Some(&target.dir)),
            ("data.store", data.store.given()),
            ("drafter.init_from", drafter.init_from.given()),
            ("eval.prompt_file", eval.prompt_file.given()),
        ];
        for (key, path) in paths {
            let named = path.is_none_or(|path| !path.as_os_str().is_empty());
            self.require(named, key, "is empty", "write a path, or remove the key");
        }
        let wrong = log_filter::problem(&self.written.wire.log.level);
        self.require(
            wrong.is_none(),
            "log.level",
            format!("is not a log filter: {}", wrong.unwrap_or_default()),
            "choose error, warn, info, debug or trace, or \"info,draftmill::data=debug\"",
        );
        let share = self.written.wire.eval.max_share;
        self.require(
            share > 0.0 && share <= 1.0,
            "eval.max_share",
            "is not a fraction of the run's time",
            "choose a number above 0 and at most 1; to disable evaluation, set eval.every_steps and \
             eval.decode_every_steps to 0",
        );
        let factor = self.written.wire.dispatch.straggler_factor;
        self.require(
            factor == 0.0 || (1.0..1e6).contains(&factor),
            "dispatch.straggler_factor",
            "is out of range: a straggler takes longer than other forwards of the same length",
            "choose a number of at least 1, or 0 for no straggler detection",
        );
        self.require(
            self.written.wire.log.progress_every > Default::default(),
            "log.progress_every",
            "must be above 0",
            "write for example \"5s\"",
        );
    }

    fn simulate(&mut self) {
        let Wire { simulate, plan, .. } = &self.written.wire;
        let largest = u64::from(plan.job_tokens).checked_mul(simulate.feature_bytes_per_token.0);
        self.require(
            largest.is_some_and(|bytes| bytes < 1 << 50),
            "simulate.feature_bytes_per_token",
            "the hidden states of one job would exceed every machine",
            format!("lower it, or plan.job_tokens; the default is {}", ByteSize(40 << 10)),
        );
        self.require(
            simulate.feature_bytes_per_token.0.is_multiple_of(2),
            "simulate.feature_bytes_per_token",
            "is odd, and each value has two bytes",
            "choose an even number",
        );
        for (key, speeds) in
            [("simulate.target_speeds", &simulate.target_speeds), ("simulate.drafter_speeds", &simulate.drafter_speeds)]
        {
            self.require(
                speeds.iter().all(|speed| (0.001..=1000.0).contains(speed)),
                key,
                "holds a speed that is out of range; 1 = the times of this section, 0.5 = half the speed",
                "choose numbers from 0.001 to 1000",
            );
        }
        self.require(
            (0.0..=0.3).contains(&simulate.jitter),
            "simulate.jitter",
            "is out of range for a relative standard deviation",
            "choose a number from 0 to 0.3",
        );
        self.require(
            (0.0..=3.0).contains(&simulate.length_sigma),
            "simulate.length_sigma",
            "is out of range for the standard deviation of a logarithm of lengths",
            "choose a number from 0 (all lengths equal the median) to 3",
        );
        self.require(
            simulate.jobs <= MAX_SIMULATED_JOBS,
            "simulate.jobs",
            "a plan of this size does not fit into memory",
            format!("choose at most {}", grouped(MAX_SIMULATED_JOBS.into())),
        );
        let hour = TimeSpan(Duration::from_secs(3600));
        for (key, time) in [
            ("simulate.target_per_token", simulate.target_per_token),
            ("simulate.target_attention", simulate.target_attention),
            ("simulate.micro_batch", simulate.micro_batch),
            ("simulate.per_context_token", simulate.per_context_token),
            ("simulate.reduce", simulate.reduce),
            ("simulate.step", simulate.step),
        ] {
            self.require(time <= hour, key, "is longer than one operation can take", format!("choose at most {hour}"));
        }
    }
}

#[cfg(test)]
mod tests;
