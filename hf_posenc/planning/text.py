"""A plan in words and a table."""

from __future__ import annotations

from hf_posenc.dtypes import dtype_name
from hf_posenc.planning.levers import RESERVE, Lever
from hf_posenc.planning.planner import Plan
from hf_posenc.planning.training_memory import TrainingMemory
from hf_posenc.units import duration_name, length_name

_HEADS = {
    "weights": "weights",
    "optimizer": "AdamW",
    "gradients": "gradients",
    "half_weights": "bf16 copies",
    "activations": "activations",
    "attention_matrices": "masks",
    "logits": "logits",
}


def plan_text(plan: Plan) -> str:
    """Return the plan as it is printed."""
    return "\n".join([*_model(plan), "", *_advice(plan), "", *_inference(plan), "", *_training(plan), *_work(plan)])


def _model(plan: Plan) -> list[str]:
    facts = plan.model
    dtype = facts.dtype
    if plan.dtype.reason and plan.dtype.checkpoint is not None:
        dtype += f" here, the checkpoint is in {dtype_name(plan.dtype.checkpoint)}"
    windows = sorted({window for window in facts.windows if window is not None})
    scaled = "" if facts.method == "none" else f", scaled already: {facts.method}, factor {facts.factor:g}"
    lines = [
        f"{facts.name}: {facts.model_type}, {_count(facts.parameters)} parameters ({dtype}), "
        f"{facts.num_layers} layers of {facts.hidden_size}, {facts.num_heads} heads of {facts.head_dim}, "
        f"{facts.num_kv_heads} of keys and values",
        f"trained on {length_name(facts.original or 0)} tokens{scaled}, reads {length_name(facts.reads)}; asked for: "
        f"{length_name(plan.target)}, factor {plan.factor:g}",
    ]
    if windows:
        few = sum(window is not None for window in facts.windows)
        lines.append(f"sliding windows: {', '.join(map(length_name, windows))} on {few} of {len(facts.windows)} layers")
    return lines


def _advice(plan: Plan) -> list[str]:
    advice = plan.advice
    recipe = "no training" if advice.recipe is None else f"recipe {advice.recipe}"
    return [f"method {advice.method}, {recipe}", *(f"  {reason}" for reason in advice.reasons)]


def _inference(plan: Plan) -> list[str]:
    return [
        f"reading {length_name(plan.target)} tokens: KV cache {_size(plan.kv_cache)} a sequence, with the weights "
        f"{_size(plan.inference)}"
    ]


def _training(plan: Plan) -> list[str]:
    """Return the table of ways to train: bytes by part at the peak of a step."""
    parts = TrainingMemory.PARTS
    heads = ["GB on one device", "block", "peak", *(_HEADS[part] for part in parts), ""]
    rows = [heads, *(_row(plan, lever) for lever in plan.levers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
    lines.insert(0, f"training memory, each row with the levers above it (PoSE without LoRA+), by {_settings(plan)}:")
    return [*lines, *_verdict(plan)]


def _settings(plan: Plan) -> str:
    run = plan.lever.run
    blocks = f"{run.micro_batch_size} block" + "s" * (run.micro_batch_size > 1)
    return f"{blocks} a forward, loss in chunks of {run.logits_chunk} rows"


def _row(plan: Plan, lever: Lever) -> list[str]:
    sizes = [lever.memory.peak, *(getattr(lever.memory, part) for part in TrainingMemory.PARTS)]
    fits = "" if plan.gpu_memory is None else "fits" if lever.fits(plan.gpu_memory) else "too much"
    return [lever.name, length_name(lever.seq_len), *(f"{size / 1e9:.2f}" for size in sizes), fits]


def _verdict(plan: Plan) -> list[str]:
    lines = []
    if plan.gpu_memory is not None:
        room = f"{_size(plan.gpu_memory)}, of which {_size(RESERVE)} are left for the device's own use"
        words = f"the first lever that makes it fit: {plan.lever.name}" if plan.fits else "nothing here fits"
        lines.append(f"{words} ({room})")
    weights = plan.all_weights.memory.weights
    if plan.gpu_memory is not None and weights > plan.gpu_memory - RESERVE:
        lines.append(
            f"more devices do not help to train all weights: before they are shared out each holds them whole, "
            f"{_size(weights)}"
        )
    if plan.sharding is not None:
        how = "FSDP2 or ZeRO-3" + (" with context parallel" if plan.sharding.context_parallel else "")
        lines.append(
            f"all weights at the full length: {plan.sharding.num_devices} devices with {how}, about "
            f"{_size(plan.sharding.per_device)} on each (estimated)"
        )
    if any(lever.name == "no mask" for lever in plan.levers):
        lines.append(
            "no mask: blocks of one document each, or attn_implementation flash_attention_2, which needs none to keep "
            "documents apart"
        )
    return lines


def _work(plan: Plan) -> list[str]:
    total = plan.flops.total
    lines = [
        "",
        f"{_count(plan.token_budget)} tokens, {plan.lever.name}, blocks of {length_name(plan.lever.seq_len)}: "
        f"{total:.2e} operations, "
        f"{100 * plan.flops.attention / total:.0f} % of them attention",
    ]
    hours = plan.hours
    if hours is None or plan.tokens_per_second is None:
        return [*lines, f"time: {plan.rate}"]
    lines.append(f"time: {duration_name(hours * 3600)} at {plan.tokens_per_second:,.4g} tokens a second ({plan.rate})")
    return lines


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"
