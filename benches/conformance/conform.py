#!/usr/bin/env python3
"""Compares draftmill's exports with other implementations: the logits of a drafted block, from the same files, by the packages
`dflash` (z-lab's own loader, DFlash and DFlash 2) and `speculators` (the vLLM project's, every head), in f32 on the CPU.

    conform.py [--mill COMMAND] [--run DIR ...]

Without --run it trains the tiny model of configs/smoke.toml with each head, which takes seconds. Packages are installed once, by name and
version, into a virtual environment under draftmill's cache (about 5 GB). Ends with 1 if a difference is above the limit.
"""
import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))
from packages import environment  # noqa: E402

LIMIT = 1e-4
# Writes the logits of one block: benches/conformance/dump_block.rs.
DUMP = "cargo run --quiet --release --locked --example dump_block --"
# Tokens before the block: fewer than it has slots, and more.
LENGTHS = (1, 5, 40)
# Settings of the tiny runs, by head.
HEADS = {
    "dflash": [],
    "dspark": ["drafter.markov_rank=16"],
    "dspark-gated": ["drafter.markov_head=gated", "drafter.markov_rank=16"],
    "dspark-rnn": ["drafter.markov_head=rnn", "drafter.markov_rank=16", "drafter.confidence_head=hidden"],
    "dflash2": ["drafter.selector_rank=16", "drafter.conv_group=8"],
}


def mill(command, *arguments):
    done = subprocess.run([*shlex.split(command), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"draftmill {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--mill", default="cargo run --quiet --release --locked --", help="the command that is draftmill")
    args.add_argument("--run", action="append", default=[], help="folder of a run to export; may be repeated")
    args.add_argument("--compare", nargs=4, metavar=("TARGET", "ZLAB", "SPECULATORS", "BLOCK"), help=argparse.SUPPRESS)
    args = args.parse_args()
    if args.compare:
        return compare(*map(pathlib.Path, args.compare))
    python = environment("conformance-1", HERE)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        runs = [pathlib.Path(run).absolute() for run in args.run]
        if not runs:
            smoke = ["--config", "configs/smoke.toml", "--set", f"data.store={folder}/data.safetensors"]
            mill(args.mill, "prepare", *smoke)
            for head, settings in HEADS.items():
                given = [f"drafter.head={head.split('-')[0]}", *settings, f"run.dir={folder}/{head}", "optimizer.learning_rate=0.01"]
                mill(args.mill, "train", *smoke, *(word for text in given for word in ("--set", text)))
                runs.append(folder / head)
        worst = max(one_run(args.mill, python, run, folder / f"run-{i}") for i, run in enumerate(runs))
    print(f"largest difference {worst:.1e}, the limit is {LIMIT:.0e}")
    sys.exit(0 if worst <= LIMIT else 1)


def one_run(command, python, run, folder):
    """Exports a run in both layouts and compares blocks; returns the largest difference."""
    import tomllib

    target = ROOT / tomllib.loads((run / "run.toml").read_text())["target"]["dir"]
    folder.mkdir()
    for layout in ("zlab", "speculators"):
        mill(command, "export", "--run", run, "--out", folder / layout, "--format", layout, "--dtype", "f32")
    print(f"{run.name}: drafter of {target.name}")
    worst = 0.0
    for length in LENGTHS:
        block = folder / f"block-{length}.safetensors"
        # Ids without a pattern, all of them low enough for any vocabulary.
        ids = ",".join(str((i * 73 + 11) % 300) for i in range(length))
        mill(DUMP, target, folder / "zlab", ids, block)
        done = subprocess.run(
            [python, __file__, "--compare", target, folder / "zlab", folder / "speculators", block],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        print(f"  {length} tokens before the block")
        for line in done.stdout.splitlines():
            name, difference = line.rsplit(" ", 1)
            print(f"    {name:<58} {float(difference):.1e}")
            worst = max(worst, float(difference))
    return worst


def compare(target, zlab, speculators, block):
    """Prints differences, each over the largest logit. Runs inside the virtual environment."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    ours = load_file(block)
    ids, anchor = ours["ids"].long(), ours["anchor"].long()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    seen = model(input_ids=ids[None], output_hidden_states=True)

    def tell(name, theirs, own):
        print(name, float((theirs - own).abs().max() / theirs.abs().max()))

    tell("transformers, the target's most likely next token differs", seen.logits[0, -1].argmax()[None].float(), ours["anchor"])

    own, tokens = ours["logits"], ours["tokens"].long()
    # The token before each drafted one.
    before = torch.cat([anchor, tokens[:-1]])
    contexts = (("our hidden states", ours["context"][None]), ("its own hidden states", None))
    kind = json.loads((speculators / "config.json").read_text())["speculators_model_type"]

    if kind != "dspark":
        from dflash import model as dflash

        loader = dflash.DFlash2DraftModel if kind == "dflash2" else dflash.DFlashDraftModel
        draft = loader.from_pretrained(zlab, dtype=torch.float32, attn_implementation="sdpa").eval()
        size = draft.block_size
        taps = torch.cat([seen.hidden_states[layer + 1] for layer in draft.target_layer_ids], dim=-1)
        tell("transformers, the target's hidden states", taps[0], ours["context"])
        slots = torch.cat([anchor, torch.full((size - 1,), draft.mask_token_id)])
        for name, context in contexts:
            hidden = draft(
                target_hidden=taps if context is None else context,
                noise_embedding=model.get_input_embeddings()(slots)[None],
                position_ids=torch.arange(len(ids) + size)[None],
            )[:, 1:]
            logits = draft.compute_logits(hidden, model.lm_head)
            if kind == "dflash2":
                path, *_ = draft.propose(hidden, anchor, model.lm_head, 0.0)
                tell(f"dflash 0.1.0, drafted tokens from {name}", path[0].float(), tokens.float())
                for slot in range(size - 1):
                    _, candidates, shares = draft.candidate_selector.select(
                        hidden[:, slot : slot + 1], logits[:, slot : slot + 1], before[slot : slot + 1], 1.0
                    )
                    tell(
                        f"dflash 0.1.0, shares of the candidates of slot {slot + 1} from {name}",
                        shares[0, 0], own[slot].softmax(-1)[candidates[0, 0]],
                    )
            else:
                tell(f"dflash 0.1.0, logits of the block from {name}", logits[0], own)

    from speculators.models import dflash, dflash2, dspark

    config_of, draft_of = {
        "dflash": (dflash.DFlashSpeculatorConfig, dflash.DFlashDraftModel),
        "dspark": (dspark.DSparkSpeculatorConfig, dspark.DSparkDraftModel),
        "dflash2": (dflash2.DFlash2SpeculatorConfig, dflash2.DFlash2DraftModel),
    }[kind]
    config = config_of.from_pretrained(speculators)
    config.transformer_layer_config._attn_implementation = "sdpa"
    draft = draft_of.from_pretrained(speculators, config=config, dtype=torch.float32).eval()
    size, first = draft.block_size, 0 if kind == "dspark" else 1
    # Its forward draws anchors from supervised positions, without the last block's: only the one behind the context is left.
    length = len(ids) + 1 + size
    row = torch.zeros(1, length, dtype=torch.long)
    row[0, : len(ids)], row[0, len(ids)] = ids, anchor[0]
    supervised = torch.zeros(1, length)
    supervised[0, len(ids)] = 1
    taps = torch.cat([seen.hidden_states[layer] for layer in draft.target_layer_ids], dim=-1)
    if kind == "dspark":
        tell("transformers, the target's hidden states", taps[0], ours["context"])
    for name, context in contexts:
        padded = torch.zeros(1, length, taps.shape[-1])
        padded[:, : len(ids)] = taps if context is None else context
        hidden, logits, *_ = draft._backbone_forward(
            padded, row, supervised, torch.zeros(1, length, model.config.hidden_size), torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
        hidden, logits = hidden[:, first:size], logits[:, first:size]
        if kind == "dspark":
            logits = logits + draft.markov_head.block_bias(prev_token_ids=before[None], hidden_states=hidden)
            known = draft.markov_head.prev_embeddings(before[None])
            features = torch.cat([hidden, known], dim=-1) if config.confidence_head_with_markov else hidden
            tell(
                f"speculators 0.9.0, confidence of the block from {name}",
                draft.confidence_head(features)[0].sigmoid(), ours["confidence"],
            )
        if kind == "dflash2":
            candidates, scores = draft.candidate_selector.select(logits, hidden, before[None])
            tell(f"speculators 0.9.0, scores of the candidates from {name}", scores[0], own.gather(-1, candidates[0]))
        else:
            tell(f"speculators 0.9.0, logits of the block from {name}", logits[0], own)


if __name__ == "__main__":
    main()
