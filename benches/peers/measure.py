"""One trainer's step, or one target's forward, alone in this process; prints one line of JSON like `dispatch --step` does.

    python measure.py specforge    --rows 2 --anchors 64 --layers 2 [--chunk-blocks 128] [--head dspark]
    python measure.py speculators  --rows 2 --anchors 64 --layers 2 [--head dspark]
    python measure.py prototype    --rows 2 --anchors 64 --layers 2 --module FILE.py
    python measure.py transformers --model DIR --lengths 256,230,... [--padded]

The shapes are those of `benches/step.rs`: SmolLM2's widths, five taps, blocks of 16, rows of 512 tokens whose first 64 are prompt, f32, two
threads, random data. The trainers run with the best settings on a CPU: with `sdpa`, since flex_attention has no backward there.
"""
import argparse
import importlib.util
import json
import resource
import time

import torch

# Published rank of Markov head and selector.
RANK = 256
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, BLOCK = 576, 9, 3, 64, 1536, 16
TAPS, TARGET_LAYERS, PROMPT, GAMMA = [1, 7, 14, 20, 27], 30, 64, 7.0


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory(name):
    """Resident memory in bytes: VmRSS now, VmHWM at its peak."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def median(values):
    return sorted(values)[(len(values) - 1) // 2]


def measured(steps, work):
    """Runs `work` once to warm up and then `steps` times."""
    base, seconds, cpu = memory("VmRSS"), [], []
    for step in range(steps + 1):
        born, began = time.monotonic(), cpu_seconds()
        work()
        if step:
            seconds.append(time.monotonic() - born)
            cpu.append(cpu_seconds() - began)
    peak = memory("VmHWM") - base
    print(json.dumps({"seconds": median(seconds), "cpu_seconds": median(cpu), "all": seconds, "peak_over_weights": peak}))


def qwen3(layers, vocab):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    config = Qwen3Config(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=vocab, rms_norm_eps=1e-6, max_position_embeddings=8192,
        layer_types=["full_attention"] * layers, tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    return config


def data(args):
    tokens = args.rows * args.length
    ids = (torch.arange(tokens) * 7919 % (args.vocab - 1)).view(args.rows, args.length)
    loss_mask = torch.ones(args.rows, args.length)
    loss_mask[:, :PROMPT] = 0
    return ids, torch.randn(args.rows, args.length, len(TAPS) * HIDDEN), loss_mask


def specforge(args):
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from specforge.optimizer import BF16Optimizer

    config = qwen3(args.layers, args.vocab)
    config.block_size, config.num_target_layers = BLOCK, TARGET_LAYERS
    config.dflash_config = {"target_layer_ids": TAPS, "mask_token_id": args.vocab - 1}
    draft_model, online_model = DFlashDraftModel, OnlineDFlashModel
    if args.head == "dspark":
        draft_model, online_model = DSparkDraftModel, OnlineDSparkModel
        config.dflash_config.update(
            markov_rank=RANK, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True
        )
    draft = draft_model(config).float().train()
    head, embedding = torch.nn.Linear(HIDDEN, args.vocab, bias=False), torch.nn.Embedding(args.vocab, HIDDEN)
    for frozen in (head, embedding):
        frozen.requires_grad_(False)
        torch.nn.init.normal_(frozen.weight, std=0.02)
    model = online_model(
        draft, head, embedding, args.vocab - 1, BLOCK, attention_backend="sdpa", num_anchors=args.anchors,
        loss_decay_gamma=GAMMA, objective_chunk_blocks=args.chunk_blocks,
    )
    optimizer = BF16Optimizer(draft, lr=1e-4, max_grad_norm=1.0, total_steps=1000)
    ids, hidden, loss_mask = data(args)

    states = (torch.randn(args.rows, args.length, HIDDEN),) if args.head == "dspark" else ()

    def step():
        loss, _, _ = model(ids, hidden, loss_mask, *states)
        loss.backward()
        optimizer.step()

    measured(args.steps, step)


def speculators(args):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models import dflash, dflash2, dspark
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config_of, draft_of, settings, losses = {
        "dflash": (dflash.DFlashSpeculatorConfig, dflash.DFlashDraftModel, {}, "ce"),
        "dspark": (dspark.DSparkSpeculatorConfig, dspark.DSparkDraftModel, {"markov_rank": RANK}, '{"ce": 0.1, "tv": 1.8}'),
        "dflash2": (dflash2.DFlash2SpeculatorConfig, dflash2.DFlash2DraftModel, {"selector_rank": RANK}, "kl_div"),
    }[args.head]
    config = config_of(
        **settings,
        transformer_layer_config=qwen3(args.layers, args.vocab), draft_vocab_size=args.vocab, block_size=BLOCK,
        aux_hidden_state_layer_ids=TAPS, mask_token_id=args.vocab - 1,
        speculators_config=SpeculatorsConfig(
            algorithm=args.head, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy", verifier=verifier,
        ),
    )
    model = draft_of(config=config).float().train()
    for frozen in (model.lm_head, model.verifier_lm_head, model.embed_tokens):
        torch.nn.init.normal_(frozen.weight, std=0.02)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids, hidden, loss_mask = data(args)
    flat = lambda x: x.reshape(1, args.rows * args.length, *x.shape[2:])
    documents = torch.arange(args.rows).repeat_interleave(args.length)[None]
    positions = torch.arange(args.length).repeat(args.rows)[None]
    last = torch.randn(1, args.rows * args.length, HIDDEN)
    loss_config = resolve_loss_config(losses, "eager")
    more = {} if args.head == "dflash" else {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}

    def step():
        _, loss, _ = model(
            flat(hidden), flat(ids), flat(loss_mask), last, documents, positions, loss_config=loss_config, gamma=GAMMA,
            max_anchors=args.rows * args.anchors, **more,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    measured(args.steps, step)


def prototype(args):
    """A step in plain torch operators that does only what the loss needs: `forward` of a module with SpecForge's names for its weights."""
    spec = importlib.util.spec_from_file_location("prototype", args.module)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    key_value = KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (key_value, HIDDEN), "self_attn.v_proj": (key_value, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {"fc": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    shapes.update({f"layers.{number}.{name}": shape for number in range(args.layers) for name, shape in layer.items()})
    start = lambda shape: torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)
    weights = {f"{name}.weight": start(shape).requires_grad_() for name, shape in shapes.items()}
    head, embedding = torch.randn(args.vocab, HIDDEN) * 0.02, torch.randn(args.vocab, HIDDEN) * 0.02
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-4, fused=True)
    ids, hidden, loss_mask = data(args)
    # The maximum of a row: an anchor is in the answer and has a token after it.
    places = args.length - PROMPT - 1
    count = min(args.anchors, places)

    def step():
        anchors = torch.stack([torch.randperm(places)[:count].sort().values + PROMPT for _ in range(args.rows)])
        kept = torch.ones(args.rows, count, dtype=torch.bool)
        loss, _ = module.forward(weights, head, embedding, ids, hidden, loss_mask, anchors, kept, args.layers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    measured(args.steps, step)


def transformers(args):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    lengths = [int(length) for length in args.lengths.split(",")]
    width = max(lengths)
    ids = (torch.arange(len(lengths) * width) * 7919 % (model.config.vocab_size - 1)).view(len(lengths), width)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()

    def forward():
        with torch.no_grad():
            model(ids, attention_mask=mask if args.padded else None, output_hidden_states=True, use_cache=False)

    measured(args.steps, forward)


def make_model(args):
    """A random model of SmolLM2's shape, in f32, for both sides to load."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=TARGET_LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=args.vocab, rms_norm_eps=1e-5,
        max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(args.model)
    print("{}")


def main():
    parser = argparse.ArgumentParser()
    kinds = {
        "specforge": specforge, "speculators": speculators, "prototype": prototype, "transformers": transformers, "make-model": make_model,
    }
    parser.add_argument("what", choices=kinds)
    for name, default in [("rows", 2), ("length", 512), ("anchors", 64), ("layers", 2), ("vocab", 49152), ("steps", 5),
                          ("chunk-blocks", 128)]:
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--head", choices=["dflash", "dspark", "dflash2"], default="dflash")
    parser.add_argument("--model")
    parser.add_argument("--module")
    parser.add_argument("--lengths")
    parser.add_argument("--padded", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    kinds[args.what](args)


if __name__ == "__main__":
    main()
