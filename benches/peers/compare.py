#!/usr/bin/env python3
"""`make bench-peers`: our training step and our extraction compared with those of others, in turns, on this machine.

Installs the pinned packages into a virtual environment in the cache, builds our bench, and runs each pair alternately, each run in a separate
process. A ratio is the median of the pairs: theirs over ours in seconds, ours over theirs in memory. Writes
`target/bench-peers.json` and prints the table of benches/README.md. Takes about an hour on two quiet cores; other load
disturbs it, so the load is part of the result.

    python3 benches/peers/compare.py [--pairs 3] [--steps 3] [--only NAME] [--prototype FILE.py]

`--prototype` also measures a training step in plain torch operators: `forward` of that module, which measure.py calls. The default
is that of the reference notes, if they are stored next to the repository.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))
from packages import cache_dir, environment  # noqa: E402

# Configurations of the reference numbers: rows, anchors of a row, layers, and the limit of each ratio.
STEPS = {
    "2x64x2": dict(rows=2, anchors=64, layers=2, default=1.7, best=1.4),
    "2x256x2": dict(rows=2, anchors=256, layers=2, default=2.0, best=1.7),
    "2x512x2": dict(rows=2, anchors=512, layers=2, default=2.0, best=None),
    "4x128x4": dict(rows=4, anchors=128, layers=4, default=2.5, best=None),
}
# Peers that train each of the other heads. Labels are the target's whole distribution, which their default losses need.
HEAD_PEERS = {"dspark": ["specforge", "speculators"], "dflash2": ["speculators"]}
HEAD_STEPS = ["2x64x2", "4x128x4"]
RAGGED, EQUAL = "256,230,198,160,121,90,64,37", ",".join(["256"] * 8)


def say(text):
    print(f"bench-peers: {text}", file=sys.stderr, flush=True)


def ours():
    """Path of our bench program."""
    say("building our bench")
    command = ["cargo", "bench", "--locked", "--bench", "dispatch", "--no-run"]
    built = subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.PIPE, text=True)
    return ROOT / re.search(r"\(([^)]*dispatch-[^)]*)\)", built.stderr).group(1)


def measure(command):
    """Returns the output of one process."""
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench-peers: {' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def median(values):
    return sorted(values)[(len(values) - 1) // 2]


def in_turns(pairs, sides):
    """Runs every side once per pair, in turns."""
    runs = {name: [] for name in sides}
    for turn in range(pairs):
        for name, command in sides.items():
            runs[name].append(measure(command))
            say(f"{name}, turn {turn + 1}: {runs[name][-1]['seconds']:.2f} s")
    return runs


def ratio(runs, theirs, key="seconds"):
    return median([b[key] / a[key] for a, b in zip(runs["ours"], runs[theirs])])


class Table:
    def __init__(self):
        self.rows, self.figures = [], {}

    def row(self, name, value, at_least=None, at_most=None, note=""):
        target = f"at least {at_least}" if at_least else f"at most {at_most}" if at_most else ""
        reached = not target or (value >= at_least if at_least else value <= at_most)
        verdict = "" if not target else "yes" if reached else "**no**"
        self.rows.append(f"| `{name}` | {value:.2f} | {target} | {verdict} | {note} |")
        say(f"{name} = {value:.2f} {target}")

    def text(self):
        head = "| figure | measured | target | reached | note |\n| --- | ---: | --- | --- | --- |\n"
        return head + "\n".join(self.rows)


def steps(args, python, program, table, details):
    """Compares our training step with SpecForge's, at its defaults and at its fastest setting, and speculators'."""
    speed, best, memory, outside = {}, {}, {}, {}
    for name, shape in STEPS.items():
        options = [f"--{key}={shape[key]}" for key in ("rows", "anchors", "layers")] + [f"--steps={args.steps}"]
        split = [word for option in options for word in option.split("=")]
        peer = [python, HERE / "measure.py"]
        sides = {"ours": [program, "--step", *split], "specforge": [*peer, "specforge", *options]}
        if shape["best"]:
            sides["specforge_chunk_0"] = [*peer, "specforge", "--chunk-blocks=0", *options]
        if name == "2x64x2":
            sides["speculators"] = [*peer, "speculators", *options]
        if args.prototype:
            sides["prototype"] = [*peer, "prototype", "--module", args.prototype, *options]
        say(f"training step {name}")
        runs = in_turns(args.pairs, sides)
        # In separate turns: a step's time outside its products is a small difference of large times, and machines vary.
        alone = in_turns(max(args.pairs, 3), {"ours": sides["ours"], "products": [program, "--products", *split]})
        details[name], details[f"{name} outside products"] = runs, alone
        seconds = {side: median([run["seconds"] for run in runs[side]]) for side in runs}
        note = ", ".join(f"{side} {value:.2f} s" for side, value in seconds.items())
        speed[name], memory[name] = ratio(runs, "specforge"), 1 / ratio(runs, "specforge", "peak_over_weights")
        table.row(f"drafter_vs_specforge {name}", speed[name], at_least=shape["default"], note=note)
        if shape["best"]:
            best[name] = ratio(runs, "specforge_chunk_0")
            table.row(f"drafter_vs_specforge_chunk_0 {name}", best[name], at_least=shape["best"], note="its fastest setting")
        if "speculators" in runs:
            table.row(f"drafter_vs_speculators {name}", ratio(runs, "speculators"))
        if "prototype" in runs:
            table.row(f"drafter_vs_prototype {name}", ratio(runs, "prototype"), at_least=1.0)
        table.row(f"drafter_memory_vs_specforge {name}", memory[name], at_most=0.45, note="peak over the weights, ours to theirs")
        outside[name] = 1 - ratio(alone, "products")
        flops = median([run["flops"] / 1e9 / run["seconds"] for run in alone["products"]])
        table.row(f"drafter_outside_products {name}", outside[name], at_most=0.2, note=f"the products alone run at {flops:.0f} GFLOP/s")
    table.figures.update(
        drafter_vs_specforge=speed, drafter_vs_specforge_chunk_0=best, drafter_memory_vs_specforge=memory,
        drafter_outside_products=outside,
    )


def heads(args, python, program, table, details):
    """Compares our training step of DSpark and DFlash 2 with SpecForge's and speculators', and with our own of DFlash."""
    for head, peers in HEAD_PEERS.items():
        for name in HEAD_STEPS:
            shape = STEPS[name]
            options = [f"--{key}={shape[key]}" for key in ("rows", "anchors", "layers")] + [f"--steps={args.steps}"]
            split = [word for option in options for word in option.split("=")]
            step = lambda head: [program, "--step", "--labels", "all", "--head", head, *split]
            sides = {"ours": step(head), "dflash": step("dflash")}
            sides.update({peer: [python, HERE / "measure.py", peer, "--head", head, *options] for peer in peers})
            say(f"training step of {head} {name}")
            details[f"{head} {name}"] = runs = in_turns(args.pairs, sides)
            note = ", ".join(f"{side} {median([run['seconds'] for run in runs[side]]):.2f} s" for side in runs)
            for peer in peers:
                table.row(f"{head}_vs_{peer} {name}", ratio(runs, peer), at_least=2.0, note=note)
                memory = 1 / ratio(runs, peer, "peak_over_weights")
                table.row(f"{head}_memory_vs_{peer} {name}", memory, at_most=0.5, note="peak over the weights, ours to theirs")
            table.row(f"{head}_vs_our_dflash {name}", 1 / ratio(runs, "dflash"), at_most=1.15)


def extraction(args, python, program, table, details):
    """Compares our extraction with transformers' forward with all hidden states and logits."""
    model = cache_dir() / "peers-1" / "target"
    if not (model / "config.json").exists():
        measure([python, HERE / "measure.py", "make-model", "--model", model])
    for name, lengths, buckets, extra, least in [
        ("target_vs_transformers_padded", RAGGED, 4, ["--padded"], 1.9),
        ("target_vs_transformers_equal", EQUAL, 1, [], 1.2),
    ]:
        peer = [python, HERE / "measure.py", "transformers", "--model", model, "--lengths", lengths, *extra]
        sides = {
            "ours": [program, "--extract", "--model", model, "--lengths", lengths, "--buckets", buckets, "--steps", args.steps],
            "transformers": [*peer, "--steps", args.steps],
        }
        say(name)
        details[name] = runs = in_turns(args.pairs, sides)
        table.figures[name] = ratio(runs, "transformers")
        table.row(name, table.figures[name], at_least=least, note=f"8 rows in {buckets} bucket{'s' * (buckets > 1)}")


def pipeline(args, table, details):
    """Compares tokens per second of a whole run of the demo's configuration with a run whose drafter does almost nothing: the speed of
    the slower stage, the target, alone. Each stage has one thread, since both share two cores."""
    say("preparing the demo's data")
    subprocess.run(["make", "--silent", "runs/demo-data.safetensors"], cwd=ROOT, check=True, stdout=sys.stderr)
    runs = {"whole": [], "target": []}
    settings = ["run.threads=1", "run.max_steps=30", "eval.every_steps=0", "eval.decode_every_steps=0", 'admin.listen="off"']
    for turn in range(args.pairs):
        for name, anchors in ("whole", 32), ("target", 1):
            folder = ROOT / "target" / f"bench-pipeline-{name}"
            shutil.rmtree(folder, ignore_errors=True)
            given = [word for text in [*settings, f"drafter.anchors={anchors}", f'run.dir="{folder}"'] for word in ("--set", text)]
            command = [ROOT / "target/release/draftmill", "train", "--config", "configs/demo.toml", *given]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"bench-peers: {name} failed:\n{done.stderr[-2000:]}")
            # The first steps wait for the pool to fill.
            steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()][5:]
            tokens = sum(step["tokens"] for step in steps[1:])
            runs[name].append({"seconds": (steps[-1]["seconds"] - steps[0]["seconds"]) / tokens})
            say(f"{name}, turn {turn + 1}: {1 / runs[name][-1]['seconds']:.0f} tokens/s")
    details["pipeline"] = runs
    share = median([alone["seconds"] / whole["seconds"] for whole, alone in zip(runs["whole"], runs["target"])])
    table.figures["pipeline_vs_slower_stage"] = share
    table.row("pipeline_vs_slower_stage", share, at_least=0.95, note="tokens/s, the demo's configuration, a thread for each stage")


def growth(args, program, table, details):
    """Measures seconds and memory of our step over anchors and over length; linear growth is a flat cost per anchor and per token."""
    for name, base, sizes in [
        ("anchors", ["--rows", 2, "--layers", 2, "--length", 1024], [64, 128, 256, 512]),
        ("length", ["--rows", 2, "--layers", 2, "--anchors", 64], [512, 1024, 2048, 4096]),
        ("vocab", ["--rows", 2, "--layers", 2, "--anchors", 64], [12288, 24576, 49152, 98304]),
    ]:
        say(f"growth with {name}")
        runs = {size: measure([program, "--step", *base, f"--{name}", size, "--steps", args.steps]) for size in sizes}
        details[f"growth_{name}"] = runs
        for size, run in runs.items():
            note = f"s a step, {run['peak_over_weights'] / 1e6:.0f} MB over the weights"
            table.row(f"step {name} {size}", run["seconds"], note=note)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=["steps", "heads", "extraction", "pipeline", "growth"])
    beside = ROOT.parent / "shared" / "reference" / "prototype.py"
    parser.add_argument("--prototype", default=beside if beside.exists() else None)
    args = parser.parse_args()
    python, program = environment("peers-1", HERE), ours()
    before, table, details = os.getloadavg()[0], Table(), {}
    wanted = lambda name: args.only in (None, name)
    if wanted("steps"):
        steps(args, python, program, table, details)
    if wanted("heads"):
        heads(args, python, program, table, details)
    if wanted("extraction"):
        extraction(args, python, program, table, details)
    if wanted("pipeline"):
        pipeline(args, table, details)
    if wanted("growth"):
        growth(args, program, table, details)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = {"cores": os.cpu_count(), "cpu": cpu and cpu.group(1), "load_before": before, "load_after": os.getloadavg()[0]}
    result = {**table.figures, "machine": machine, "details": details}
    (ROOT / "target" / "bench-peers.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"machine: {json.dumps(machine)}\n\n{table.text()}")


if __name__ == "__main__":
    main()
