#!/usr/bin/env python3
"""Draftmill's protocol as a plain Python program: threads, one lock with condition variables, and a list.

`make bench` compares it with the real pipeline; engines cost nothing in both. It keeps this part of the protocol:

1. The planner draws sample lengths, groups the shuffled samples in length buckets, cuts jobs of one bucket each under a
   token budget, spreads the jobs of each bucket evenly over the epoch, and writes the plan to SQLite before the first
   job leaves. All jobs are in one list.
2. Each target thread pulls the next job, reserves its bytes under `max_bytes` and one batch under `max_batches`, runs the
   forward (here: nothing), and moves the batch into the pool. No target extracts without a reservation.
3. Each drafter thread takes one of the step's `accumulation x drafters` tickets, draws a batch, trains it (here: adds its
   tokens to its gradient), and releases the reservation. No draw is answered while fewer than `min_ready` batches wait,
   unless the plan has ended. A draw picks the bucket whose fraction of the drawn batches is furthest below its fraction
   of the plan, and a random batch of it.
4. When every ticket of a step is used, the gradients are added up, every drafter gets the new weights, and the outcomes
   of the step go to SQLite as one transaction (write-ahead log, synced as Draftmill syncs).
5. At the end each job of the plan was trained exactly once, or the program fails.

It is written for speed within that design. A thread that has finished one unit of work takes the next one under the
same acquisition of the lock. A condition is notified only if a waiting thread can continue, and only as many threads as
can continue. Nothing polls. A separate thread writes to the disk, outside the lock, in prepared batches.

It prints one JSON object and needs only the standard library.
"""

import argparse
import bisect
import collections
import ctypes
import json
import math
import os
import queue
import random
import sqlite3
import sys
import tempfile
import threading
import time

BYTES_PER_TOKEN = 2

Job = collections.namedtuple("Job", "index bucket samples tokens width")


# --- planner


def sample_lengths(count, longest, rng):
    """Returns log-normal lengths between 1 and `longest`: the median is an eighth of it, sigma is 0.9."""
    draw, mu = rng.lognormvariate, math.log(longest / 8)
    return [min(max(int(draw(mu, 0.9)), 1), longest) for _ in range(count)]


def quantile_bounds(lengths, buckets):
    """Returns the longest sample of each bucket; all buckets have equally many samples."""
    ordered = sorted(lengths)
    return sorted({ordered[(i + 1) * len(ordered) // buckets - 1] for i in range(buckets)})


def plan_epoch(lengths, bounds, job_tokens, rng):
    """Returns the epoch's jobs in the order in which they leave."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    finished = [[] for _ in bounds]  # of each bucket: (samples, tokens, width)
    samples, tokens, width = [[] for _ in bounds], [0] * len(bounds), [0] * len(bounds)
    for sample in order:
        length = lengths[sample]
        b = bisect.bisect_left(bounds, length)
        if samples[b] and (len(samples[b]) + 1) * max(width[b], length) > job_tokens:
            finished[b].append((samples[b], tokens[b], width[b]))
            samples[b], tokens[b], width[b] = [], 0, 0
        samples[b].append(sample)
        tokens[b] += length
        width[b] = max(width[b], length)
    placed = []
    for b in range(len(bounds)):
        if samples[b]:
            finished[b].append((samples[b], tokens[b], width[b]))
        rng.shuffle(finished[b])
        phase = rng.random()
        placed.extend(((k + phase) / len(finished[b]), b, job) for k, job in enumerate(finished[b]))
    placed.sort(key=lambda entry: entry[:2])
    return [Job(index, b, *job) for index, (_, b, job) in enumerate(placed)]


# --- ledger

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE jobs (idx INTEGER PRIMARY KEY, bucket INTEGER, tokens INTEGER, width INTEGER, samples TEXT);
CREATE TABLE outcomes (idx INTEGER PRIMARY KEY REFERENCES jobs, step INTEGER NOT NULL);
PRAGMA foreign_keys = ON;
"""


class Ledger:
    """Plan and outcomes on disk. Used by one thread at a time."""

    def __init__(self, path, jobs):
        self.db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.db.executescript(SCHEMA)
        self._write(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, ?)",
            ((j.index, j.bucket, j.tokens, j.width, json.dumps(j.samples, separators=(",", ":"))) for j in jobs),
        )
        self.db.execute("PRAGMA synchronous = NORMAL")

    def record(self, step, indices):
        self._write("INSERT INTO outcomes VALUES (?, ?)", [(index, step) for index in indices])

    def trained(self):
        """Returns the number of jobs with an outcome; the primary key admits one each."""
        return self.db.execute("SELECT count(*) FROM outcomes").fetchone()[0]

    def _write(self, statement, rows):
        self.db.execute("BEGIN IMMEDIATE")
        self.db.executemany(statement, rows)
        self.db.execute("COMMIT")


# --- queue, pool and step behind one lock


class Mill:
    def __init__(self, jobs, options, buckets, steps):
        self.jobs = collections.deque(jobs)
        self.options = options
        self.steps = steps  # to the thread that records: (step, indices of its jobs)
        self.micro_batches = options.accumulation * options.drafters
        lock = threading.Lock()
        self.lock = lock
        self.room, self.ready, self.stepped = (threading.Condition(lock) for _ in range(3))
        self.wait_room = self.wait_ready = 0  # threads that wait
        # The pool.
        self.max_bytes = options.max_batches * options.job_tokens * BYTES_PER_TOKEN
        self.bytes = 0  # reserved, waiting and held by drafters
        self.places = 0  # reserved and waiting
        self.waiting = 0
        self.pool = [[] for _ in range(buckets)]
        self.extracting = 0
        # Draws.
        self.share = [0] * buckets
        for job in jobs:
            self.share[job.bucket] += 1
        self.drawn = [0] * buckets
        self.draws = 0
        self.random = random.Random(options.seed)
        # The step.
        self.step = 1
        self.issued = self.reported = 0
        self.gradients = [0] * options.drafters
        self.weights = 0
        self.trained = []  # indices of the running step's jobs

    def target(self):
        jobs, pool, room, lock = self.jobs, self.pool, self.room, self.lock
        max_bytes, max_batches, min_ready = self.max_bytes, self.options.max_batches, self.options.min_ready
        lock.acquire()
        try:
            while jobs:
                job = jobs.popleft()
                size = job.tokens * BYTES_PER_TOKEN
                self.extracting += 1
                while self.bytes + size > max_bytes or self.places >= max_batches:
                    self.wait_room += 1
                    room.wait()
                    self.wait_room -= 1
                self.bytes += size
                self.places += 1
                lock.release()
                features = extract(job)
                lock.acquire()
                pool[job.bucket].append((job, features))
                self.waiting += 1
                self.extracting -= 1
                if self.wait_ready and self.waiting >= min_ready:
                    self.ready.notify()
            if not self.extracting:
                self.ready.notify_all()  # nothing more can come: the pool drains
        finally:
            lock.release()

    def drafter(self, index):
        pool, ready, room, lock = self.pool, self.ready, self.room, self.lock
        min_ready, micro_batches = self.options.min_ready, self.micro_batches
        lock.acquire()
        try:
            while True:
                # A ticket.
                while self.issued == micro_batches:
                    self.stepped.wait()
                # A batch.
                while self.waiting < min_ready and (self.jobs or self.extracting):
                    self.wait_ready += 1
                    ready.wait()
                    self.wait_ready -= 1
                if self.issued == micro_batches:
                    continue
                if not self.waiting:
                    self.finish()
                    return
                self.issued += 1
                bucket = self.lagging()
                batches = pool[bucket]
                at = int(self.random.random() * len(batches))
                batches[at], batches[-1] = batches[-1], batches[at]
                job, features = batches.pop()
                self.drawn[bucket] += 1
                self.draws += 1
                self.waiting -= 1
                self.places -= 1
                if self.wait_room:
                    room.notify()
                lock.release()
                gradient = train(features)
                lock.acquire()
                self.bytes -= job.tokens * BYTES_PER_TOKEN
                self.gradients[index] += gradient
                self.trained.append(job.index)
                self.reported += 1
                if self.reported == micro_batches:
                    self.reduce()
        finally:
            lock.release()

    def lagging(self):
        """Returns the bucket with a batch that is furthest below its fraction of the plan."""
        best, most = -1, None
        draws, plan = self.draws + 1, sum(self.share)
        for bucket, batches in enumerate(self.pool):
            if batches:
                lag = self.share[bucket] * draws - self.drawn[bucket] * plan
                if most is None or lag > most:
                    best, most = bucket, lag
        return best

    def reduce(self):
        self.weights += sum(self.gradients)
        self.gradients = [0] * len(self.gradients)
        self.steps.put((self.step, self.trained))
        self.trained = []
        self.step += 1
        self.issued = self.reported = 0
        self.stepped.notify_all()

    def finish(self):
        """The last step may be smaller than the others."""
        if self.reported == self.issued and self.reported:
            self.reduce()


def extract(job):
    return job.tokens


def train(features):
    return features


def leave_interpreter():
    """Makes each unit of work a call into C that releases the interpreter's lock, like every call into an engine."""
    global extract, train
    nothing = ctypes.CDLL(None).getppid

    def extract(job):
        nothing()
        return job.tokens

    def train(features):
        nothing()
        return features


def run(jobs, options, buckets, ledger):
    steps = queue.SimpleQueue()
    mill = Mill(jobs, options, buckets, steps)

    def record():
        while (item := steps.get()) is not None:
            ledger.record(*item)

    recorder = threading.Thread(target=record)
    workers = [threading.Thread(target=mill.target) for _ in range(options.targets)]
    workers += [threading.Thread(target=mill.drafter, args=(i,)) for i in range(options.drafters)]
    for thread in [recorder, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    steps.put(None)
    recorder.join()
    return mill


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=0, help="samples to plan; 0: as many as make about --jobs jobs")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--targets", type=int, default=5)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--job-tokens", type=int, default=2048)
    parser.add_argument("--max-batches", type=int, default=16)
    parser.add_argument("--min-ready", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where the ledger is written; default: a temporary folder")
    parser.add_argument("--leave-interpreter", action="store_true", help="each unit of work is a call into C")
    options = parser.parse_args()
    if options.leave_interpreter:
        leave_interpreter()

    rng = random.Random(options.seed)
    lengths = sample_lengths(options.samples or options.jobs * 4, options.job_tokens, rng)
    bounds = quantile_bounds(lengths, options.buckets)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        start = time.perf_counter()
        jobs = plan_epoch(lengths, bounds, options.job_tokens, rng)
        ledger = Ledger(os.path.join(folder, "state.db"), jobs)
        planned = time.perf_counter()
        mill = run(jobs, options, len(bounds), ledger)
        end = time.perf_counter()
        recorded = ledger.trained()
        ledger.db.close()

    exact = recorded == len(jobs) and mill.weights == sum(lengths) and mill.bytes == 0
    report = {
        "jobs": len(jobs),
        "steps": mill.step - 1,
        "seconds": end - start,
        "plan_seconds": planned - start,
        "jobs_per_second": len(jobs) / (end - start),
        "jobs_per_second_without_planning": len(jobs) / (end - planned),
        "each_job_trained_once": exact,
        "python": sys.version.split()[0],
    }
    print(json.dumps(report))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
