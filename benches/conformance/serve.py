#!/usr/bin/env python3
"""Serves Draftmill's exports with vLLM and compares what it accepts with `draftmill eval`, response by response.

    serve.py [--mill COMMAND] [--run DIR] [--prompts FILE] [--responses N] [--tokens N] [--threads N]

Exports a run in both layouts in f32 and decodes the first turn of N prompts, greedily: once with `draftmill eval`, and once
for each layout with vLLM 0.32.0 on the CPU, in float32. vLLM is installed once into Draftmill's cache (3 GB, see vllm/).
Prints a table in Markdown. Ends with 1 if a response differs in tokens or verifications.
"""
import argparse
import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE / "vllm"))
from install import environment  # noqa: E402

LAYOUTS = ("zlab", "speculators")
MODEL_LENGTH = 1024
START_SECONDS = 900


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--mill", default="cargo run --quiet --release --locked --", help="the command that is draftmill")
    args.add_argument("--run", type=pathlib.Path, default=ROOT / "runs/serve", help="folder of a run with a checkpoint")
    args.add_argument("--target", type=pathlib.Path, help="folder of its target (default: as in run.toml)")
    args.add_argument("--prompts", type=pathlib.Path, required=True, help="JSONL file of MT-Bench prompts")
    args.add_argument("--responses", type=int, default=8)
    args.add_argument("--tokens", type=int, default=64, help="longest response")
    args.add_argument("--threads", type=int, default=1, help="threads of vLLM; more than the free cores make it slower")
    args = args.parse_args()
    if not args.run.exists():
        sys.exit(f"draftmill: {args.run} does not exist; run `make test-serve`, or name a run with --run")
    home = environment()
    target = args.target or ROOT / tomllib.loads((args.run / "run.toml").read_text())["target"]["dir"]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        rows = [json.loads(line) for line in args.prompts.read_text().splitlines()[:: 80 // args.responses or 1]][: args.responses]
        prompts = [{"category": str(row["question_id"]), "messages": [{"role": "user", "content": row["turns"][0]}]} for row in rows]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        for layout in LAYOUTS:
            run(args.mill, "export", "--run", args.run, "--target", target, "--out", folder / layout, "--format", layout, "--dtype", "f32")
        config = json.loads((folder / "zlab" / "config.json").read_text())
        size, dspark = config["block_size"], config["architectures"] == ["Qwen3DSparkModel"]
        evaluated = run(args.mill, "eval", "--target", target, "--draft", folder / "zlab", "--prompts", folder / "prompts.jsonl",
                        "--max-new-tokens", args.tokens, "--json")
        ours = {one["category"]: (one["tokens"], one["steps"]) for one in json.loads(evaluated)["categories"]}
        theirs = {}
        for layout in LAYOUTS:
            speculative = {"method": "dspark" if dspark else "dflash", "num_speculative_tokens": size - (not dspark)}
            with served(home, target, folder / layout, speculative, args.threads) as url:
                theirs[layout] = {prompt["category"]: respond(url, prompt["messages"], args.tokens) for prompt in prompts}
    same = report(ours, theirs, size)
    sys.exit(0 if same else 1)


def run(command, *arguments):
    done = subprocess.run([*shlex.split(command), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"draftmill {arguments[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def served(home, target, draft, speculative, threads):
    """Serves a target with a drafter; gives the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [home / "bin" / "vllm", "serve", target.absolute(), "--served-model-name", "target", "--host", "127.0.0.1", "--port", port]
    command += ["--dtype", "float32", "--max-model-len", MODEL_LENGTH, "--enforce-eager", "--no-enable-prefix-caching"]
    command += ["--speculative-config", json.dumps({**speculative, "model": str(draft)})]
    env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # vLLM pins its threads to cores by default, which is 30 times slower if other processes use these.
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    log = draft.with_suffix(".log")
    with open(log, "wb") as out:
        server = subprocess.Popen([str(word) for word in command], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while not answers(url):
            if server.poll() is not None or time.monotonic() > until:
                sys.exit(f"vLLM did not start with {draft.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
            time.sleep(0.5)
        yield url
    finally:
        # The group, because engine and workers outlive the server's first process.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(15)


def answers(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=2) as answer:
        return answer.status == 200
    return False


def respond(url, messages, tokens):
    """Tokens after the first one, and verifications, of one greedy response."""
    before = verifications(url)
    body = {"model": "target", "messages": messages, "temperature": 0, "max_tokens": tokens, "chat_template_kwargs": {"enable_thinking": False}}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as answer:
        produced = json.load(answer)["usage"]["completion_tokens"]
    return produced - 1, verifications(url) - before


def verifications(url):
    # Counters are published with the engine's next report; none is pending once two readings agree.
    last = None
    while True:
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            found = re.findall(r"^vllm:spec_decode_num_drafts_total\S* (\S+)$", answer.read().decode(), re.M)
        if not found:
            sys.exit("vLLM does not speculate: /metrics has no vllm:spec_decode_num_drafts_total")
        now = sum(int(float(value)) for value in found)
        if now == last:
            return now
        last = now
        time.sleep(0.5)


def report(ours, theirs, size):
    """Prints the table. True if every response is equal."""
    columns = ["draftmill eval", *(f"vLLM, {layout}" for layout in LAYOUTS)]
    print(f"Blocks of {size}: tokens after the first one / verifications, and the acceptance that follows.\n")
    print(f"| question | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for category, own in ours.items():
        print(f"| {category} | " + " | ".join(cell([pair]) for pair in [own, *(theirs[layout][category] for layout in LAYOUTS)]) + " |")
    sets = [list(ours.values()), *(list(theirs[layout].values()) for layout in LAYOUTS)]
    print("| all | " + " | ".join(map(cell, sets)) + " |")
    differing = [f"{layout} {category}" for layout in LAYOUTS for category, own in ours.items() if theirs[layout][category] != own]
    print(f"\n{len(differing)} of {len(LAYOUTS) * len(ours)} responses differ" + "".join(f"\n  {one}" for one in differing))
    return not differing


def cell(pairs):
    tokens, steps = (sum(pair[at] for pair in pairs) for at in (0, 1))
    return f"{tokens} / {steps} = {tokens / max(steps, 1):.4f}"


if __name__ == "__main__":
    main()
