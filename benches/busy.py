#!/usr/bin/env python3
"""Measures the processor time of decoding alongside busy processes: `draftmill eval` alone and with others, in turns.

    busy.py --target DIR --draft DIR --prompts FILE [--mill COMMAND] [--limit N] [--tokens N] [--pairs N] [--busy N]

Each pair is one run alone and one alongside N processes that compute without a pause. Processor time is user and system
time of the whole command, start included. The second table is the same with libgomp's own waiting (OMP_WAIT_POLICY unset,
GOMP_SPINCOUNT=300000, its default). Ends with 1 if the median ratio is above 1.3. Load at the start is printed: with other work
on the machine, "alone" is not alone.
"""
import argparse
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import time

LIMIT = 1.3
WAITS = {"passive, as Draftmill sets it": {}, "spinning, libgomp's default": {"GOMP_SPINCOUNT": "300000"}}


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--target", required=True)
    args.add_argument("--draft", required=True)
    args.add_argument("--prompts", required=True)
    args.add_argument("--mill", default="target/release/draftmill", help="the command that is draftmill")
    args.add_argument("--limit", type=int, default=1, help="prompts")
    args.add_argument("--tokens", type=int, default=32, help="longest response")
    args.add_argument("--pairs", type=int, default=3)
    args.add_argument("--busy", type=int, default=2, help="processes that compute alongside")
    args.add_argument("--only-passive", action="store_true", help="without the second table")
    args = args.parse_args()
    command = [*shlex.split(args.mill), "eval", "--target", args.target, "--draft", args.draft, "--prompts", args.prompts]
    command += ["--limit", str(args.limit), "--max-new-tokens", str(args.tokens), "--json"]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, {args.busy} busy processes\n")
    print("| waiting | pair | alone: processor / wall s | busy: processor / wall s | ratio of processor time |\n| --- | ---: | ---: | ---: | ---: |")
    medians = []
    for name, environment in list(WAITS.items())[: 1 if args.only_passive else None]:
        ratios = []
        for pair in range(args.pairs):
            alone, busy = decode(command, environment, 0), decode(command, environment, args.busy)
            ratios.append(busy[0] / alone[0])
            print(f"| {name} | {pair + 1} | {alone[0]:.1f} / {alone[1]:.1f} | {busy[0]:.1f} / {busy[1]:.1f} | {ratios[-1]:.2f} |", flush=True)
        medians.append(statistics.median(ratios))
        print(f"| {name} | median | | | {medians[-1]:.2f} |", flush=True)
    print(f"\nThe limit of the first is {LIMIT}: {'reached' if medians[0] <= LIMIT else '**not reached**'}")
    sys.exit(0 if medians[0] <= LIMIT else 1)


def decode(command, environment, busy):
    """Processor time and wall time of the command, in seconds."""
    others = [multiprocessing.Process(target=compute, daemon=True) for _ in range(busy)]
    for other in others:
        other.start()
    env = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    began = time.monotonic()
    running = subprocess.Popen(command, env={**env, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = running.stderr.read()
    _, status, used = os.wait4(running.pid, 0)
    wall = time.monotonic() - began
    for other in others:
        other.terminate()
        other.join()
    if status != 0:
        sys.exit(errors.decode(errors="replace"))
    return used.ru_utime + used.ru_stime, wall


def compute():
    while True:
        pass


if __name__ == "__main__":
    main()
