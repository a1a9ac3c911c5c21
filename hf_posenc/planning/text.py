"""A plan in words and a table."""

from __future__ import annotations

import dataclasses
import shlex

from hf_posenc.planning.finetune_command import finetune_words, flags_of
from hf_posenc.planning.gpus import RENTED, RESERVE, smallest_gpu, usable
from hf_posenc.planning.levers import SHARED_OVER, Lever, Sharding, spread
from hf_posenc.planning.planner import Plan
from hf_posenc.planning.reading import READ_CHUNK
from hf_posenc.planning.training_memory import TrainingMemory
from hf_posenc.utils.dtypes import dtype_name
from hf_posenc.utils.units import duration_name, length_name

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
    """Return the plan as it is printed: the answer, reading, and training where it was asked for."""
    parts = [[*_answer(plan), *_advice(plan)], _model(plan), _reading(plan)]
    if plan.levers:
        parts += [_training(plan), _work(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _answer(plan: Plan) -> list[str]:
    words = {row.weights_in: f"{row.weights_in} weights ({_size(row.per_device(plan.gpus))})" for row in plan.reading}
    text = f"Reading {plan.target:,} tokens"
    if plan.gpu_memory is None:
        needs = ", ".join(words.values())
        lines = [f"{text} takes {needs}{' on each GPU' if plan.gpus > 1 else ''}."]
    else:
        fitting = [words[row.weights_in] for row in plan.reading if row.fits(plan.gpu_memory, plan.gpus)]
        rest = [words[row.weights_in] for row in plan.reading if not row.fits(plan.gpu_memory, plan.gpus)]
        not_with = f"not with {_or(rest)}"
        fits = f"fits with {_or(fitting)}{f', {not_with}' if rest else ''}" if fitting else f"does not fit: {not_with}"
        lines = [f"{text} in {_devices(plan)} {fits}."]
    if not plan.levers:
        return [*lines, "Training: --training says what fits, with the command for each way."]
    if plan.gpu_memory is None:
        return lines
    block = f"{plan.lever.seq_len:,} tokens"
    if plan.fits:
        size = _size(plan.lever.per_device)
        return [*lines, f"Training in blocks of {block} fits {_devices(plan)}: {plan.lever.label} ({size})."]
    return [*lines, f"Training: nothing fits {_devices(plan)}. {_rent(plan)}"]


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _devices(plan: Plan) -> str:
    return f"{plan.gpus} x {_size(plan.gpu_memory or 0)}" if plan.gpus > 1 else _size(plan.gpu_memory or 0)


def _rent(plan: Plan) -> str:
    """Return the smallest of the rented GPUs on which some way fits, and at the full length, of one and of several."""
    known = [lever for lever in plan.levers if not lever.at_least]
    best = min(known, key=lambda lever: lever.needed)
    at_length = [lever for lever in known if lever.seq_len == plan.target and lever.sharding is None]
    found = [_smallest(best.smallest_gpu, 1, best)]
    full = min(at_length, key=lambda lever: lever.needed, default=best)
    if full is not best:
        found.append(_smallest(full.smallest_gpu, 1, full))
    for devices in SHARED_OVER:
        ways = [next(iter(_over(lever, plan, devices)), None) for lever in at_length if lever.can_be_shared]
        way = min((one for one in ways if one is not None), key=lambda lever: lever.needed, default=None)
        if way is not None and way.smallest_gpu is not None:
            found.append(_smallest(way.smallest_gpu, devices, way))
            break
    return f"To rent: {'; '.join(filter(None, found))}." if any(found) else "Nor does it fit one rented GPU."


def _over(lever: Lever, plan: Plan, devices: int) -> list[Lever]:
    """Return a way with weights and blocks shared out to several devices."""
    if lever.packed:
        return []
    over = Sharding(devices, True, spread(lever.memory, plan.model.num_layers, devices, True))
    return [dataclasses.replace(lever, sharding=over)]


def _smallest(size: int | None, devices: int, lever: Lever) -> str:
    if size is None:
        return ""
    many = "one" if devices == 1 else f"{devices} x"
    return f"{many} {size} GB for {lever.name} in blocks of {length_name(lever.seq_len)}"


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


def _reading(plan: Plan) -> list[str]:
    """Return the table of ways to read: bytes by part, on which GPU, and how long a text at most."""
    rule = any(row.rule for row in plan.reading)
    heads = ["GB, weights in", "weights", "KV cache", *(["rotated keys"] if rule else [])]
    heads += ["working", "in all", "smallest GPU"]
    if plan.gpu_memory is not None:
        heads += [f"of {_devices(plan)}" if plan.gpus > 1 else _devices(plan), "longest that fits"]
    rows = [heads]
    for index, row in enumerate(plan.reading):
        sizes = [row.weights, row.kv_cache, *([row.rule] if rule else []), row.working, row.total]
        cells = [row.weights_in, *(f"{size / 1e9:.2f}" for size in sizes), _gpu(smallest_gpu(row.total))]
        if plan.gpu_memory is not None:
            each = f"{row.per_device(plan.gpus) / 1e9:.2f} each, " if plan.gpus > 1 else ""
            fits = "fits" if row.fits(plan.gpu_memory, plan.gpus) else "too much"
            cells += [each + fits, plan.longest_text(index)]
        rows.append(cells)
    lines = [f"reading {length_name(plan.target)} tokens, {READ_CHUNK} at a time:", *_table(rows)]
    lines.append("8 and 4 bits: bitsandbytes' int8 and nested NF4, of all linear layers but the head")
    if rule:
        lines.append(f"a static rule, such as yarn, keeps no rotated keys: {_size(plan.reading[0].rule)} less")
    return lines


def _gpu(size: int | None) -> str:
    return f"{size} GB" if size is not None else f"over {RENTED[-1]} GB"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


def _training(plan: Plan) -> list[str]:
    """Return the table of ways to train: bytes by part at the peak of a step."""
    parts = TrainingMemory.PARTS
    heads = ["GB on each device", "block", "peak", *(_HEADS[part] for part in parts), "smallest GPU", ""]
    lines = [
        f"Training, each row with what those above it change (PoSE and 4-bit rows without LoRA+), {_settings(plan)}:",
        *_table([heads, *(_row(plan, lever) for lever in plan.levers)]),
    ]
    return [*lines, *_verdict(plan), *_commands(plan)]


def _commands(plan: Plan) -> list[str]:
    """Return the command of the way that was chosen, and what the others have in the place of its last flags."""
    scaled = plan.model.method != "none" and plan.target > plan.model.reads
    begin = shlex.join(finetune_words(plan.model.name, plan.target))
    flags = {lever.label: shlex.join(flags_of(lever, on_scaled=scaled)) for lever in plan.levers}
    lines = [f"the command of {plan.lever.label}:", f"  {begin} {flags.pop(plan.lever.label)}".rstrip()]
    if flags:
        width = max(map(len, flags))
        lines.append("with other flags after the context length:")
        lines += [f"  {label.ljust(width)}  {words or 'none'}" for label, words in flags.items()]
    return lines


def _settings(plan: Plan) -> str:
    run = plan.lever.run
    blocks = f"{run.per_device_train_batch_size} block" + "s" * (run.per_device_train_batch_size > 1)
    return f"{blocks} a forward, loss in chunks of {run.logits_chunk} rows"


def _row(plan: Plan, lever: Lever) -> list[str]:
    memory, over = lever.memory, lever.sharding
    parts = [getattr(memory, part) for part in TrainingMemory.PARTS]
    # Of a way that is not predicted whole, a part that is 0 is one that was not counted.
    sizes = ["" if over is not None or (lever.at_least and not part) else f"{part / 1e9:.2f}" for part in parts]
    fits = "" if plan.gpu_memory is None else "fits" if lever.fits(plan.gpu_memory) else "too much"
    peak = f"{'over ' if lever.at_least else ''}{lever.per_device / 1e9:.2f}"
    gpu = "" if lever.at_least else _gpu(lever.smallest_gpu)
    return [lever.label, length_name(lever.seq_len), peak, *sizes, gpu, fits]


def _verdict(plan: Plan) -> list[str]:
    lines = []
    if plan.gpu_memory is not None:
        room = f"{_size(plan.gpu_memory)}, of which {_size(RESERVE)} are left for the device's own use"
        words = f"the first that fits: {plan.lever.label}" if plan.fits else "nothing here fits"
        lines.append(f"{words} ({room})")
    weights = plan.all_weights.memory.weights
    if plan.gpu_memory is not None and weights > usable(plan.gpu_memory):
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
    if plan.flops is None:
        return []
    total = plan.flops.total
    lines = [
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
