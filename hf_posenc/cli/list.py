"""``hf-posenc list``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.shared_arguments import OptionArguments, parse, parse_options
from hf_posenc.errors import InvalidRequestError, UnknownNameError, argument
from hf_posenc.families.refusals import Refusal
from hf_posenc.methods.registry import get_method, make_method
from hf_posenc.patching import presets as published
from hf_posenc.patching.extension_config import ExtensionConfig, ExtensionRequest
from hf_posenc.retrieving.tasks import tasks as registered
from hf_posenc.retrieving.tasks.groups import GROUPS
from hf_posenc.utils.console import text_width
from hf_posenc.utils.units import aligned

if TYPE_CHECKING:
    from hf_posenc.explain.sections import Explanation
    from hf_posenc.explain.subject import Subject


# Times its length that a model is shown with an encoding, where no length is given.
_SHOWN_FACTOR = 4.0


@dataclass
class ListArguments:
    """A single method."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "model on which a method is explained: name on the Hub, folder or .gguf file, of which only the "
            "config is read; default: the numbers of Llama 2 7B"
        },
    )


def list_known(argv: Sequence[str]) -> None:
    """List methods, model families, presets, checkpoints, recipes or tasks; or explain one method in words and numbers.

    Examples:
        hf-posenc list methods
        hf-posenc list methods yarn --model MODEL --factor 4
        hf-posenc list methods alibi
    """
    positional = {
        "what": f"one of: {', '.join(LISTS)}",
        "name": "after methods: the method or encoding to explain; rope, xpos, sinusoidal and others are known too",
    }
    known = (ListArguments, ExtensionConfig, OptionArguments)
    given, shown, extension, flags = parse("list", list_known.__doc__, argv, known, positional, nargs={"name": "?"})
    if given.what not in LISTS:
        raise UnknownNameError("list", given.what, LISTS)
    if given.name is not None and given.what != "methods":
        raise InvalidRequestError(f"{given.name!r}: only a method is explained, by hf-posenc list methods NAME.")
    if given.name is None:
        if (shown, extension, flags) != (ListArguments(), ExtensionConfig(), OptionArguments()):
            raise InvalidRequestError("flags are for a single method: hf-posenc list methods NAME.")
        print(LISTS[given.what](text_width()))
    else:
        print(_explained(given.name, shown.model, extension, parse_options(flags.option)))


def _explained(name: str, model: str | None, extension: ExtensionConfig, options: dict[str, Any]) -> str:
    """Return the effect of a method on a model, or the working of an encoding."""
    if extension.rope_scaling is not None:
        raise InvalidRequestError("--rope-scaling: give the method by its name, and how far by --factor.")
    from hf_posenc.explain.subject import read_subject
    from hf_posenc.methods.explained import InPlaceOfRope

    instead_of_rope = issubclass(get_method(name), InPlaceOfRope)
    for field_name in ("preset", "original_max_position_embeddings") if instead_of_rope else ():
        if getattr(extension, field_name) is not None:
            raise InvalidRequestError(
                f"{argument(field_name)} is for methods that extend a model; {name!r} is an encoding."
            )
    name = get_method(name).name
    request = ExtensionRequest(**vars(extension), method=None if extension.preset else name, options=options)
    if request.method != name:
        raise InvalidRequestError(
            f"preset {extension.preset!r} is of {request.method}, not of {name}: hf-posenc list methods "
            f"{request.method} --preset {extension.preset}."
        )
    subject = read_subject(model)
    explanation = _encoding(name, subject, extension, options) if instead_of_rope else _method(subject, request)
    return explanation.text(text_width())


def _method(subject: Subject, request: ExtensionRequest) -> Explanation:
    from hf_posenc.explain.explanations import explain_method
    from hf_posenc.families.family_data import attention_capabilities
    from hf_posenc.families.refusals import TAKE_STATIC
    from hf_posenc.patching.request import resolve

    resolved = resolve(subject.config, request)
    refusal = attention_capabilities().get(subject.config.model_type)
    if resolved.method.needs_hf_posenc and refusal is not None:
        raise refusal.error(resolved.method.name, TAKE_STATIC)
    return explain_method(subject, resolved)


def _encoding(name: str, subject: Subject, extension: ExtensionConfig, options: dict[str, Any]) -> Explanation:
    from hf_posenc.explain.explanations import explain_encoding

    factor = _SHOWN_FACTOR if extension.factor is None else extension.factor
    target = round(factor * subject.length) if extension.context_length is None else int(extension.context_length)
    return explain_encoding(subject, make_method(name, options=options), target)


def _filled(text: str, width: int, indent: str = "    ") -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


# What the words of `options` do not say.
_NOTES = {
    "dynamic": (
        "scope=query (the default): stages of `stage` tokens past the original length, growth=linear or geometric; "
        "hf_posenc alone runs it",
        "scope=sequence: Transformers' own rule, one scale for a whole forward; plain Transformers runs it, and it is "
        "not exact with a KV cache",
    ),
}


def methods_text(width: int) -> str:
    """Return every method with its aliases, options, serialization and paper."""
    from hf_posenc.methods.registry import available_methods  # brings PyTorch

    lines = [
        _filled(
            "On disk: the rope_type in config.json, which plain Transformers reads. Rules in the manifest only are run "
            "by hf_posenc (load_extended, hf-posenc eval); for servers `hf-posenc export --as yarn` has the nearest.",
            width,
            indent="",
        ),
        "",
    ]
    for row in available_methods():
        also = f" (or {', '.join(row['aliases'])})" if row["aliases"] else ""
        options = (f"options: {', '.join(row['options']) or 'none'}", *_NOTES.get(row["name"], ()))
        facts = (row["summary"], *options, f"on disk: {row['on_disk']}", row["paper"])
        lines += [f"{row['name']}{also}", *(_filled(fact, width) for fact in facts)]
    return "\n".join(lines)


def recipes_text(width: int) -> str:
    """Return every recipe with its settings, what it chooses by the model, and what it leaves to the user."""
    from hf_posenc.training.recipes import RECIPES  # brings PyTorch

    lines = []
    for recipe in RECIPES.values():
        values = {**recipe.values, **recipe.loading}
        shown = [
            f"{name} {' '.join(value) if isinstance(value, list) else value}"
            for name, value in values.items()
            if name != "options"
        ]
        shown += [f"option {name}={value}" for name, value in recipe.values.get("options", {}).items()]
        facts = [recipe.summary, f"sets: {', '.join(shown)}"]
        facts += [f"chooses {recipe.by_model}"] if recipe.by_model else []
        facts += [f"left: {recipe.left}", recipe.paper]
        lines += [recipe.name, *(_filled(fact, width) for fact in facts)]
    return "\n".join(lines)


def tasks_text(width: int) -> str:
    """Return every retrieval task with what it asks, how it is measured and its source; then the groups."""
    lines = []
    for task in registered().values():
        measured = ["measured by depth"] if task.has_depth else []
        measured += ["several questions of a text" if task.several_questions else "one question of a text"]
        facts = (task.summary, ", ".join(measured), task.source)
        lines += [task.name, *(_filled(fact, width) for fact in facts if fact)]
    lines += ["", "Groups:"]
    for name, group in GROUPS.items():
        facts = (group.summary, ", ".join(group.tasks), group.left_out)
        lines += [name, *(_filled(fact, width) for fact in facts if fact)]
    return "\n".join(lines)


def families_text(width: int) -> str:
    """Return the model types that can be extended, by method, and the others by the reason why not."""
    from hf_posenc.families.family_data import attention_capabilities, capabilities, table_version

    table, attention = capabilities(), attention_capabilities()
    both = [model_type for model_type, refusal in attention.items() if refusal is None]
    return "\n".join(
        [
            f"Of the {len(table)} causal language model types of Transformers {table_version()}, "
            f"{len(attention)} can be extended.",
            "",
            f"By every method: {len(both)}",
            _filled(", ".join(both), width),
            "",
            "By all but the methods that run in attention (dynamic in its scope 'query', dynamic_yarn, self_extend, "
            f"dca, rerope and leaky_rerope): {len(attention) - len(both)}",
            *_by_reason(attention, width),
            "",
            f"Refused: {len(table) - len(attention)}",
            *_by_reason(table, width),
        ]
    )


def _by_reason(table: Mapping[str, Refusal | None], width: int) -> list[str]:
    """Return the types that have a reason as lines, the rarest reasons first."""
    refused: dict[str, list[str]] = {}
    for model_type, refusal in table.items():
        if refusal is not None:
            refused.setdefault(refusal.reason, []).append(model_type)
    lines = []
    for reason, model_types in sorted(refused.items(), key=lambda pair: len(pair[1])):
        lines += [_filled(", ".join(model_types), width), _filled(f"{reason}.", width, indent="        ")]
    return lines


def _rule(preset: published.Preset) -> str:
    original = preset.original_max_position_embeddings
    options = [
        f"{name}: {len(value)} numbers" if isinstance(value, list) else f"{name} {value:g}"
        for name, value in preset.options.items()
    ]
    window = [f"sliding window {preset.sliding_window}"] if preset.sliding_window else []
    rule = f"{', '.join([preset.method, f'factor {preset.factor:g}', *options])}: {original} -> "
    return rule + ", ".join([f"{round(original * preset.factor)}", *window])


def _names(preset: published.Preset) -> list[str]:
    """Return a preset's checkpoints, those trained with it marked."""
    facts = [published.known_checkpoint(name) for name in preset.checkpoints]
    return [f"{fact.name} (trained with it)" if fact.scaled else fact.name for fact in facts if fact is not None]


def presets_text(width: int) -> str:
    """Return every preset with its numbers, the checkpoints it is for and the source."""
    lines = []
    for preset in published.presets().values():
        facts = (_rule(preset), f"for {', '.join(_names(preset))}", f"source: {preset.source}")
        lines += [preset.name, *(_filled(fact, width) for fact in facts)]
    return "\n".join(lines)


def _cells(one: published.Checkpoint) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.trained_length}",
        "-" if one.declared_length is None else f"{one.declared_length}",
        f"{one.head_dim}" if one.rotary_dim == one.head_dim else f"{one.rotary_dim} of {one.head_dim}",
        f"{one.rope_theta:.0f}",
        f"{one.sliding_window}, {one.windowed_layers}" if one.sliding_window else "-",
        f"{one.scaled['method']} x{one.scaled['factor']:g} from {one.trained_length}" if one.scaled else "-",
    )


_COLUMNS = ("", "trained", "declares", "rotary", "theta", "window", "scaled")


def checkpoints_text(width: int) -> str:
    """Return the known facts of published checkpoints: a table in tokens, at most 120 columns, and the sources."""
    known = list(published.checkpoints().values())
    header, *lines = aligned([_COLUMNS, *map(_cells, known)], left=(0, 5, 6))
    shown = []
    for family, pairs in groupby(zip(known, lines, strict=True), key=lambda pair: pair[0].family):
        shown += ["", family + header[len(family) :]]
        for source, rows in groupby(pairs, key=lambda pair: pair[0].source):
            shown += [*(line for _, line in rows), _filled(f"source: {source}", width)]
    return "\n".join(shown[1:])


LISTS: dict[str, Callable[[int], str]] = {
    "methods": methods_text,
    "families": families_text,
    "presets": presets_text,
    "checkpoints": checkpoints_text,
    "recipes": recipes_text,
    "tasks": tasks_text,
}
