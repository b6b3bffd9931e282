//! Decisions of the trainer, without waiting: tickets, complete steps, and the end of the run.

use super::messages::Ticket;
use crate::{
    invariant,
    messages::{engine::MicroReport, types::BucketId},
    runtime::{invariants::t1, trace::lifecycle},
};
use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
};

/// Action for the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Issue {
        drafter: usize,
        step: u64,
    },
    /// Refuses a ticket: no step needs this drafter's batch.
    Refuse {
        drafter: usize,
    },
    /// Extends the step: batches below this position of the draw order belong to it or to earlier steps.
    Collect {
        step: u64,
        below: u64,
    },
    /// Requests the gradients: every micro-batch is reported.
    Reduce {
        step: u64,
    },
    /// Updates the weights, then calls `State::on_stepped`: every gradient is in.
    Step,
    /// Ends the run.
    End,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Collect,
    /// Waits for the gradients of these drafters.
    Reduce(BTreeSet<usize>),
    Over,
}

/// Every decision of the trainer.
#[derive(Debug)]
pub struct State {
    drafters: usize,
    micro_batches_per_step: u64,
    /// Micro-batches of the following steps.
    next_per_step: u64,
    /// Drafters that draw nothing: they do not report that they are finished.
    paused: BTreeSet<usize>,
    max_steps: u64,
    step: u64,
    issued: u64,
    reported: u64,
    sum: MicroReport,
    buckets: BTreeSet<BucketId>,
    /// Positions of this step in the draw order, including those of skipped jobs, which the next ones replace.
    positions: Range<u64>,
    waiting: VecDeque<usize>,
    finished: BTreeSet<usize>,
    phase: Phase,
    closing: bool,
    stopping: bool,
}

impl State {
    /// Creates the state. `start_step` steps are already in the weights. `max_steps` 0 sets no limit.
    pub fn new(drafters: usize, accumulation: usize, start_step: u64, max_steps: u64) -> Self {
        Self {
            drafters,
            micro_batches_per_step: (drafters * accumulation) as u64,
            next_per_step: (drafters * accumulation) as u64,
            paused: BTreeSet::new(),
            max_steps,
            step: start_step + 1,
            issued: 0,
            reported: 0,
            sum: MicroReport::default(),
            buckets: BTreeSet::new(),
            positions: 0..(drafters * accumulation) as u64,
            waiting: VecDeque::new(),
            finished: BTreeSet::new(),
            phase: Phase::Collect,
            closing: false,
            stopping: false,
        }
    }

    /// Applies changed settings from the next step boundary on. A step then has `accumulation` micro-batches for each
    /// drafter that is not `paused`. A paused drafter trains the batches that it holds, and the end of the run no
    /// longer waits for it.
    pub fn reconfigure(&mut self, accumulation: usize, paused: &[usize]) -> Vec<Action> {
        self.paused = paused.iter().copied().filter(|&drafter| drafter < self.drafters).collect();
        self.next_per_step = ((self.drafters - self.paused.len()).max(1) * accumulation.max(1)) as u64;
        let mut actions = Vec::new();
        if self.at_boundary() && self.next_per_step != self.micro_batches_per_step {
            self.micro_batches_per_step = self.next_per_step;
            self.positions.end = self.positions.start + self.next_per_step;
            actions.push(Action::Collect { step: self.step, below: self.positions.end });
        }
        actions.extend(self.decide());
        actions
    }

    /// Returns true if no ticket of the running step is issued yet.
    pub fn at_boundary(&self) -> bool {
        self.phase == Phase::Collect && self.issued == 0
    }

    /// Returns the micro-batches of the running step.
    pub fn per_step(&self) -> u64 {
        self.micro_batches_per_step
    }

    pub fn on_ticket(&mut self, drafter: usize) -> Vec<Action> {
        self.waiting.push_back(drafter);
        self.decide()
    }

    /// A micro-batch was trained. `position` is its position in the draw order, if there is one.
    pub fn on_report(
        &mut self,
        ticket: &Ticket,
        position: Option<u64>,
        bucket: BucketId,
        report: &MicroReport,
    ) -> Vec<Action> {
        invariant!("T1", ticket.step == self.step, "a report of step {} arrived in step {}", ticket.step, self.step);
        invariant!(
            "T1",
            position.is_none_or(|position| self.positions.contains(&position)),
            "the batch at {position:?} was trained in step {} of {:?}",
            self.step,
            self.positions
        );
        self.reported += 1;
        self.sum.add(report);
        self.buckets.insert(bucket);
        self.decide()
    }

    /// A ticket came back unused. If the job was skipped, the next batch of the draw order replaces it.
    pub fn on_ticket_returned(&mut self, ticket: &Ticket, skipped: bool) -> Vec<Action> {
        invariant!("T1", ticket.step == self.step && self.issued > self.reported, "an unknown ticket was returned");
        self.issued = self.issued.saturating_sub(1);
        let mut actions = Vec::new();
        if skipped {
            self.positions.end += 1;
            actions.push(Action::Collect { step: self.step, below: self.positions.end });
        }
        actions.extend(self.decide());
        actions
    }

    pub fn on_gradient(&mut self, drafter: usize, step: u64) -> Vec<Action> {
        invariant!("T1", step == self.step, "a gradient of step {step} arrived in step {}", self.step);
        match &mut self.phase {
            Phase::Reduce(missing) => {
                missing.remove(&drafter);
                if missing.is_empty() { vec![Action::Step] } else { Vec::new() }
            }
            _ => Vec::new(),
        }
    }

    pub fn on_finished(&mut self, drafter: usize) -> Vec<Action> {
        self.finished.insert(drafter);
        self.decide()
    }

    /// The update of the step is in the weights.
    pub fn on_stepped(&mut self) -> Vec<Action> {
        self.phase = Phase::Collect;
        (self.issued, self.reported) = (0, 0);
        self.sum = MicroReport::default();
        self.buckets.clear();
        self.step += 1;
        self.micro_batches_per_step = self.next_per_step;
        self.positions = self.positions.end..self.positions.end + self.micro_batches_per_step;
        let mut actions = vec![Action::Collect { step: self.step, below: self.positions.end }];
        actions.extend(self.decide());
        actions
    }

    /// The plan was cut short: the last micro-batches form no step if they are too few.
    pub fn on_close(&mut self) -> Vec<Action> {
        self.closing = true;
        self.decide()
    }

    /// Begins no further step, and abandons a step that lacks micro-batches.
    pub fn on_stop(&mut self) -> Vec<Action> {
        self.stopping = true;
        self.decide()
    }

    /// Returns the step that is collected or reduced.
    pub fn step(&self) -> u64 {
        self.step
    }

    pub fn sum(&self) -> &MicroReport {
        &self.sum
    }

    pub fn micro_batches(&self) -> u64 {
        self.reported
    }

    pub fn distinct_buckets(&self) -> u64 {
        self.buckets.len() as u64
    }

    fn decide(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.phase == Phase::Collect {
            self.collect(&mut actions);
        }
        if self.phase == Phase::Over {
            actions.extend(self.waiting.drain(..).map(|drafter| Action::Refuse { drafter }));
        }
        actions
    }

    fn collect(&mut self, actions: &mut Vec<Action>) {
        let wanted = !self.stopping && (self.max_steps == 0 || self.step <= self.max_steps);
        while wanted && self.issued < self.micro_batches_per_step {
            let Some(drafter) = self.waiting.pop_front() else { break };
            self.issued += 1;
            actions.push(Action::Issue { drafter, step: self.step });
        }
        if self.reported < self.issued {
            return;
        }
        let mut drafters = 0..self.drafters;
        let all_finished = drafters.all(|d| self.finished.contains(&d) || self.paused.contains(&d));
        // A later start continues with the rest of the plan: only the last step of the whole run may be smaller.
        let last = wanted && all_finished && !self.closing;
        if self.reported == self.micro_batches_per_step || (last && self.reported > 0) {
            invariant!(
                "T1",
                t1(self.reported, self.micro_batches_per_step, all_finished),
                "step {} has {} micro-batches",
                self.step,
                self.reported
            );
            lifecycle!("reduced", step = self.step, micro_batches = self.reported);
            self.phase = Phase::Reduce((0..self.drafters).collect());
            actions.push(Action::Reduce { step: self.step });
        } else if !wanted || all_finished {
            // The micro-batches of an unfinished step are discarded: their jobs stay open.
            self.phase = Phase::Over;
            actions.extend(self.waiting.drain(..).map(|drafter| Action::Refuse { drafter }));
            actions.push(Action::End);
        }
    }
}
