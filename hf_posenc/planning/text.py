"""A plan in words and tables, with the ``hf-posenc finetune`` command of each way to train."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from typing import Any

from hf_posenc.families.sliding_window import KEEP
from hf_posenc.methods.registry import DEFAULT_METHOD
from hf_posenc.planning.gpus import RENTED, RESERVE, smallest_gpu, usable
from hf_posenc.planning.inference_memory import LONGEST_FACTOR, READ_CHUNK, Reading
from hf_posenc.planning.planned_fit import PlannedFit
from hf_posenc.planning.planner import Plan
from hf_posenc.planning.training_memory import TrainingMemory
from hf_posenc.planning.training_options import NO_MASK, SHARED_OVER, TrainingOption, shared_out
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.recipes import get_recipe
from hf_posenc.utils.dtypes import dtype_name
from hf_posenc.utils.units import aligned, count_name, duration_name, length_name, size_name

# Settings of finetune that are the same for every way, or are given by --option.
_NOT_FLAGS = ("output_dir", "options", "context_length")
# Parts of the memory whose columns have another name.
_HEADS = {"optimizer": "AdamW", "half_weights": "bf16 copies", "attention_matrices": "masks"}


def plan_text(plan: Plan) -> str:
    """Return the plan as it is printed: the answer, reading, and training where it was requested."""
    parts = [[*_answer(plan), *_advice(plan)], _model(plan), _reading(plan)]
    if plan.fitting is not None:
        parts.append(_fitting(plan.fitting))
    if plan.training_options:
        parts += [_training(plan), _work(plan)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _answer(plan: Plan) -> list[str]:
    words = {
        row.weights_in: f"{row.weights_in} weights ({size_name(row.per_device(plan.gpus))})" for row in plan.reading
    }
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
    if not plan.training_options:
        return [*lines, "Training: --training says what fits, with the command for each way."]
    if plan.gpu_memory is None:
        return lines
    block = f"{plan.option.seq_len:,} tokens"
    if plan.fits:
        size = size_name(plan.option.per_device)
        return [*lines, f"Training in blocks of {block} fits {_devices(plan)}: {plan.option.label} ({size})."]
    return [*lines, f"Training: nothing fits {_devices(plan)}. {_rent(plan)}"]


def _fitting(fit: PlannedFit) -> list[str]:
    steps, measured = (100 * part / fit.flops for part in (fit.step_flops, fit.measuring_flops))
    adapted = "" if fit.adapted_memory is None else f" ({size_name(fit.adapted_memory)} with --adapt)"
    return [
        f"fitting a rule to it (hf-posenc fit, default settings): {size_name(fit.memory)}{adapted} of memory on one "
        f"device, {size_name(fit.disk)} on disk, {fit.flops:.2e} operations ({steps:.0f} % the steps, {measured:.0f} % "
        "the comparison with published rules)"
    ]


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _devices(plan: Plan) -> str:
    return f"{plan.gpus} x {size_name(plan.gpu_memory or 0)}" if plan.gpus > 1 else size_name(plan.gpu_memory or 0)


def _rent(plan: Plan) -> str:
    """Return the smallest of the rented GPUs on which some way fits, and at the full length, of one and of several."""
    known = [option for option in plan.training_options if not option.at_least]
    at_length = [option for option in known if option.seq_len == plan.target and option.sharding is None]
    best, *full = (min(some, key=lambda option: option.needed) for some in (known, at_length) if some)
    options = [_smallest(best), *(_smallest(option) for option in full if option is not best)]
    for devices in SHARED_OVER:
        shared = [
            way
            for option in at_length
            for way in shared_out(option, plan.model.num_layers, devices, plan.model.unmasked)
        ]
        ways = [way for way in shared if way.sharding is not None and way.sharding.context_parallel]
        way = min(ways, key=lambda option: option.needed, default=None)
        if way is not None and way.smallest_gpu is not None:
            options.append(_smallest(way))
            break
    return f"To rent: {'; '.join(filter(None, options))}." if any(options) else "Nor does it fit one rented GPU."


def _smallest(option: TrainingOption) -> str:
    if option.smallest_gpu is None:
        return ""
    many = "one" if option.sharding is None else f"{option.sharding.num_devices} x"
    return f"{many} {option.smallest_gpu} GB for {option.name} in blocks of {length_name(option.seq_len)}"


def _model(plan: Plan) -> list[str]:
    facts = plan.model
    dtype = facts.dtype
    if plan.dtype.reason and plan.dtype.checkpoint is not None:
        dtype += f" here, the checkpoint is in {dtype_name(plan.dtype.checkpoint)}"
    windows = sorted({window for window in facts.windows if window is not None})
    scaled = "" if facts.method == "none" else f", scaled already: {facts.method}, factor {facts.factor:g}"
    lines = [
        f"{facts.name}: {facts.model_type}, {count_name(facts.parameters)} parameters ({dtype}), "
        f"{facts.num_layers} layers of {facts.hidden_size}, {facts.num_heads} heads of {facts.head_dim}, "
        f"{facts.num_kv_heads} of keys and values",
        f"trained on {length_name(facts.original or 0)} tokens{scaled}, reads {length_name(facts.reads)}; requested: "
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
    for row in plan.reading:
        sizes = [row.weights, row.kv_cache, *([row.rule] if rule else []), row.working, row.total]
        cells = [row.weights_in, *(f"{size / 1e9:.2f}" for size in sizes), _gpu(smallest_gpu(row.total))]
        if plan.gpu_memory is not None:
            each = f"{row.per_device(plan.gpus) / 1e9:.2f} each, " if plan.gpus > 1 else ""
            fits = "fits" if row.fits(plan.gpu_memory, plan.gpus) else "too much"
            cells += [each + fits, _longest(row, plan.target)]
        rows.append(cells)
    lines = [f"reading {length_name(plan.target)} tokens, {READ_CHUNK} at a time:", *aligned(rows, left=(0,))]
    lines.append("8 and 4 bits: bitsandbytes' int8 and nested NF4, of all linear layers but the head")
    if rule:
        lines.append(f"a static rule, such as yarn, keeps no rotated keys: {size_name(plan.reading[0].rule)} less")
    return lines


def _longest(row: Reading, target: int) -> str:
    """Return the longest text that fits, in whole k from there on."""
    length, most = row.longest or 0, LONGEST_FACTOR * target
    if length == most:
        return f"over {length_name(most)}"
    return length_name(length // 1024 * 1024 if length >= 1024 else length) if length else "none"


def _gpu(size: int | None) -> str:
    return f"{size} GB" if size is not None else f"over {RENTED[-1]} GB"


def _training(plan: Plan) -> list[str]:
    """Return the table of ways to train: bytes by part at the peak of a step."""
    parts = TrainingMemory.PARTS
    heads = ["GB on each device", "block", "peak", *(_HEADS.get(part, part) for part in parts), "smallest GPU", ""]
    lines = [
        f"Training, each row with what those above it change (PoSE and 4-bit rows without LoRA+), {_settings(plan)}:",
        *aligned([heads, *(_row(plan, option) for option in plan.training_options)], left=(0,)),
    ]
    return [*lines, *_verdict(plan), *_commands(plan)]


def _commands(plan: Plan) -> list[str]:
    """Return the command of the way that was chosen, and the flags that the others have instead of its last ones."""
    scaled = plan.model.method != "none" and plan.target > plan.model.reads
    begin = shlex.join(finetune_words(plan.model.name, plan.target, plan.static_method, plan.sliding_window))
    dtype = plan.requested_dtype
    flags = {way.label: shlex.join(flags_of(way, on_scaled=scaled, dtype=dtype)) for way in plan.training_options}
    lines = [f"the command of {plan.option.label}:", f"  {begin} {flags.pop(plan.option.label)}".rstrip()]
    if flags:
        width = max(map(len, flags))
        lines.append("with other flags after the context length:")
        lines += [f"  {label.ljust(width)}  {words or 'none'}" for label, words in flags.items()]
    return lines


def finetune_words(
    model: str, target: int, method: str = DEFAULT_METHOD, sliding_window: str | int = KEEP
) -> list[str]:
    """Return the first words of the command of each way; the user adds texts and the folder."""
    files = ["--documents", "TEXTS", "--output-dir", "OUT"]
    words = ["hf-posenc", "finetune", model, *files, "--context-length", str(int(target))]
    if method != DEFAULT_METHOD:
        words += ["--method", method]
    return words if sliding_window == KEEP else [*words, "--sliding-window", str(sliding_window)]


def flags_of(option: TrainingOption, *, on_scaled: bool = False, dtype: str | None = None) -> list[str]:
    """Return the flags that make ``finetune`` train in one way.

    Args:
        option: The way.
        on_scaled: The model has a scaling, which the new one is to replace.
        dtype: What the weights are loaded in; None leaves it to the checkpoint and the machine.
    """
    run, usual = option.run, _usual()
    if run.recipe is not None:
        usual |= {**get_recipe(run.recipe).values, "recipe": None}
    given = {name: vars(run)[name] for name in usual if vars(run)[name] != usual[name] and name not in _NOT_FLAGS}
    if on_scaled:
        given["on_scaled"] = "replace"
    if dtype is not None:
        given["dtype"] = dtype
    words = []
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True and usual[name] is False else _values(value))]
    for name, value in run.options.items() if run.options != usual["options"] else ():
        words += ["--option", f"{name}={value}"]
    if option.sharding is not None:
        devices = option.sharding.num_devices
        if option.sharding.context_parallel:
            return [*words, "--accelerate-config", f"context_parallel_{devices}gpu"]
        return [*words, "--accelerate-config", "fsdp2", "--num-processes", str(devices)]
    return words


def _usual() -> dict[str, Any]:
    """Return the default of each field that is a flag, and that of the options of a method."""
    shown = {one.name for one in dataclasses.fields(FinetuneConfig) if one.metadata.get("help") != argparse.SUPPRESS}
    usual = FinetuneConfig.defaults()
    return {**{name: usual[name] for name in usual if name in shown}, "options": {}}


def _values(value: Any) -> list[str]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]


def _settings(plan: Plan) -> str:
    run = plan.option.run
    blocks = f"{run.per_device_train_batch_size} block" + "s" * (run.per_device_train_batch_size > 1)
    return f"{blocks} a forward, loss in chunks of {run.logits_chunk} rows"


def _row(plan: Plan, option: TrainingOption) -> list[str]:
    memory, sharding = option.memory, option.sharding
    parts = [getattr(memory, part) for part in TrainingMemory.PARTS]
    # Of a way that is not predicted whole, a part that is 0 is one that was not counted.
    sizes = ["" if sharding is not None or (option.at_least and not part) else f"{part / 1e9:.2f}" for part in parts]
    fits = "" if plan.gpu_memory is None else "fits" if option.fits(plan.gpu_memory) else "too much"
    peak = f"{'over ' if option.at_least else ''}{option.per_device / 1e9:.2f}"
    gpu = "" if option.at_least else _gpu(option.smallest_gpu)
    return [option.label, length_name(option.seq_len), peak, *sizes, gpu, fits]


def _verdict(plan: Plan) -> list[str]:
    lines = []
    if plan.gpu_memory is not None:
        room = f"{size_name(plan.gpu_memory)}, of which {size_name(RESERVE)} are left for the device's own use"
        words = f"the first that fits: {plan.option.label}" if plan.fits else "nothing here fits"
        lines.append(f"{words} ({room})")
    full = plan.all_weights
    if full is not None and plan.gpu_memory is not None and full.memory.weights > usable(plan.gpu_memory):
        lines.append(
            f"more devices do not help to train all weights: before they are shared out each holds them whole, "
            f"{size_name(full.memory.weights)}"
        )
    if plan.sharding is not None:
        how = "FSDP2 or ZeRO-3" + (" with context parallel" if plan.sharding.context_parallel else "")
        lines.append(
            f"all weights at the full length: {plan.sharding.num_devices} devices with {how}, about "
            f"{size_name(plan.sharding.per_device)} on each (estimated)"
        )
    if any(option.name == NO_MASK for option in plan.training_options):
        lines.append(
            "no mask: blocks of one document each (--packing false), or --attn-implementation flash_attention_2 in its "
            "place, which needs none to keep documents apart"
        )
    return lines


def _work(plan: Plan) -> list[str]:
    if plan.flops is None:
        return []
    total = plan.flops.total
    lines = [
        f"{count_name(plan.token_budget)} tokens, {plan.option.name}, blocks of {length_name(plan.option.seq_len)}: "
        f"{total:.2e} operations, "
        f"{100 * plan.flops.attention / total:.0f} % of them attention",
    ]
    hours = plan.hours
    if hours is None or plan.tokens_per_second is None:
        return [*lines, f"time: {plan.rate}"]
    lines.append(f"time: {duration_name(hours * 3600)} at {plan.tokens_per_second:,.4g} tokens a second ({plan.rate})")
    return lines
