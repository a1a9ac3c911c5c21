"""Pages of the reference that are made from the package: methods, protocols, tasks, commands, model families."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from hf_posenc.cli.main import COMMANDS
from hf_posenc.cli.shared_arguments import HELP_ALL, HelpShown, examples_in, summary_line
from hf_posenc.evaluation.protocols import RULES, in_words
from hf_posenc.explain.method_words import method_words
from hf_posenc.families.family_data import attention_capabilities, capabilities, table_version
from hf_posenc.families.refusals import Refusal
from hf_posenc.methods.base import (
    DistanceMethod,
    Encoding,
    Method,
    StagedMethod,
    StaticMethod,
    encoding_rope_type,
)
from hf_posenc.methods.explained import InPlaceOfRope
from hf_posenc.methods.registry import methods
from hf_posenc.retrieving.tasks import tasks
from hf_posenc.retrieving.tasks.groups import GROUPS
from hf_posenc.spec import RopeSpec
from measured import read_rows  # beside this file, which scripts/docs puts on the path

# The model that the examples of rope_parameters are of.
_SPEC = RopeSpec(rotary_dim=128, rope_theta=10000.0, original_max_position_embeddings=4096)
_KINDS: dict[str, tuple[type[Method], str]] = {
    "Static methods": (
        StaticMethod,
        "A static method gives each pair of features a new frequency, which is the same for every token of a forward "
        "pass. It is written to `config.json` in the form that Transformers reads, so a saved checkpoint runs where "
        "hf_posenc is not installed.",
    ),
    "Staged methods": (
        StagedMethod,
        "A staged method uses a static method at a factor that depends on the position of the query. It runs in "
        "hf_posenc's attention implementation. Up to the original length, the extended model gives the logits of the "
        "unpatched one.",
    ),
    "Distance methods": (
        DistanceMethod,
        "A distance method keeps the frequencies of the model and changes the distances between a query and the keys "
        "that are far from it. It runs in hf_posenc's attention implementation.",
    ),
    "Encodings in place of RoPE": (
        Encoding,
        "An encoding takes the place of the model's RoPE. A model that was trained with RoPE must be trained with the "
        "encoding before it is of use.",
    ),
}
# The symbols that formulas of methods share, in LaTeX, and what each is, in Markdown.
_SYMBOLS: dict[str, str] = {
    "L": "the original length: tokens the model was trained on (`original_max_position_embeddings`)",
    "s": "the factor: target length / original length",
    "b": "the base of the model's RoPE (`rope_theta`)",
    "d": "the number of features of a head that are rotated (`rotary_dim`), in $d/2$ pairs",
    "i": "the index of a pair of features, from 0; in an exponent of $e$, $\\mathrm{i}$ is the imaginary unit",
    r"\theta_i": "the frequency of a pair in the unpatched model, in radians per token: $b^{-2i/d}$",
    r"\theta'_i": "the frequency of a pair in the extended model",
    "r_i": "the number of full rotations of a pair over the original length",
    "a": "the attention factor, which multiplies cos and sin, so that attention logits are multiplied by its square; 1 "
    "where the formula does not say otherwise",
    "m": "the position of a query, from 0",
    "n": "the position of a key, from 0, not after the query",
    r"\Delta": "the distance by which the rotations of a query and a key differ; $m - n$ in the unpatched model",
    "x_m": "the embedding of the token at a position",
    "q_m": "the query at a position",
    "k_n": "the key at a position",
    "d_h": "the number of features of a head",
    "z_{m,n}": "the attention logit of a query and a key",
}
_METHODS_LEAD = """\
# Methods

This page is made from the methods that are registered in the package. `hf-posenc list methods` prints this list in a
terminal. [Choosing a method](../start/choosing-a-method.md) says which one to take.

`patch_model(model, NAME, factor=4)` and `hf-posenc patch MODEL OUTPUT --method NAME --factor 4` extend a model by the
method `NAME`. The factor is the target length divided by the original length. Options are keyword arguments in Python;
on the command line they follow `--option`, as in `--option beta_fast=16 ramp=paper`.
"""
_TABLE_LEAD = """\
The column *without fine-tuning* says whether the method is of use on a model that is not trained further. The column
*rope_type* says what `config.json` contains; *manifest* means that `config.json` does not change, and that the method
is in `context_extension.json`, which only hf_posenc reads (see [Records and files](records.md)).
"""
_REQUESTS = """\
## Presets and rope_scaling dictionaries

Two other requests name a method, its factor and its options.

A **preset** is how a published checkpoint is extended: `patch_model(model, preset="qwen2.5-yarn-4x")` or `--preset
qwen2.5-yarn-4x`. `hf-posenc list presets` lists all presets, and `hf-posenc list checkpoints` lists what published
checkpoints were trained on and how they are already extended, each number with its source.

A **rope_scaling dictionary** from a vLLM command, an Axolotl config or a model card can be passed unchanged:
`patch_model(model, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})`, or
`--rope-scaling` with the dictionary as JSON. `extend_config` takes it too, and for `eval --method auto` it is one more
row. The dictionary must say how far the model is extended, by its `factor`, unless a length is given beside it. It must
agree with whatever else is given, and with the model's own `rope_theta`. The rope type `dynamic` of a dictionary is the
method `dynamic` with `scope="sequence"`. For each kind of dictionary, a test compares the result with a model that
Transformers builds from the same dictionary.
"""
_SYMBOLS_LEAD = """\
The formulas on this page use these symbols. In the unpatched model, pair $i$ of a query at position $m$ is rotated by
the angle $m \\theta_i$, and pair $i$ of a key at position $n$ by $n \\theta_i$.
"""
_COMMANDS_LEAD = """\
# Command line

This page is made from the parsers of the commands. `hf-posenc COMMAND --help-all` prints the same text, and
`hf-posenc --version` prints the version.

- `MODEL` is a name on the Hugging Face Hub, a folder or a `.gguf` file.
- Lengths and budgets in tokens can be written with `k` and `M`. For lengths, `32k` is 32 times 1,024, which is 32,768
  tokens; for budgets, `1M` is 1,000,000 tokens.
- A flag can be written with hyphens or underscores, and can be shortened while it remains unambiguous.
- The exit code is 0 when a command has done its work, 2 after a mistake in the request, with one message on stderr,
  and 130 after Ctrl-C. `hf-posenc doctor` exits with 1 if something is wrong with the checkpoint, and
  `hf-posenc export --verify` if the server does not run the method.
- Every command takes `--traceback`, which shows where an error came from.
- `python -m hf_posenc COMMAND` is the same program.
"""
_FAMILIES_LEAD = """\
# Model families

hf_posenc extends causal language models whose attention layers rotate queries and keys (RoPE). This page lists every
causal language model type of Transformers {version}; the model type is the value of `model_type` in `config.json`.
The list is made from a table in the package, and a test compares each row of the table with a small random model of
that type.

Of the {all} model types, {extended} can be extended, and {refused} are refused. A refused model raises
`UnsupportedModelError` with the reason, and nothing is changed.

Of the {extended} model types that can be extended, {both} can also be extended by the methods that run in hf_posenc's
attention implementation: {names}. The other {static_only} cannot be extended by these
methods; the table below gives the reason for each of them: multi-head latent attention, an indexer that rotates keys of
its own, or a normalisation after the rotation, for example.

`hf-posenc list families` prints this list. `hf-posenc doctor PATH` says which model type a checkpoint has.

## What the tests check

For every model type that can be extended, a test builds a small random model, extends it, and compares its logits, to
the bit, with those of the model that Transformers itself builds from the extended config. Then the test saves the
model, loads it with Transformers alone, and removes the extension again.

For the model types that also take the methods in attention, another test feeds each model a whole text, the text in
chunks, and token by token, and compares the result with the YaRN model that Transformers builds. MiniMax is tested
with whole texts only, because its own cache is not exact.

## What differs between families

**Layer types with rotary settings of their own** (Gemma 3, OLMo 3, ModernBERT): only full-attention layers are
extended. Where only layers with a sliding window or layers in chunks are rotary (Cohere 2, EXAONE 4, Llama 4), there
is nothing to extend, and the model is refused.

**Pairs that are never rotated** (Gemma 4, LFM 3) remain unrotated. Gemma 4 can be extended by `linear`, `ntk` and
`abf`: its head size differs by layer, and Transformers cannot check the lists that `yarn` would need. With `linear`,
Transformers logs that it does not recognise `factor`, and still divides by it.

**DeepSeek-V4** rotates its values too, so its attention factor is always 1.

**Models that read images** (Qwen-VL, Gemma 3, Llava, Mistral 3) are extended in their text decoder. `mrope_section`
is kept, the vision tower is not touched, and `load_extended` returns the whole model. Vision models whose positions
have three parts (Qwen-VL) can be extended for texts by the methods that run in attention; images are refused.

**Multi-head latent attention** (DeepSeek, MiniCPM 3, Longcat): most of a head is not rotated, so YaRN's temperature
goes into the softmax scale and reaches whole logits. Give `attention_factor` to multiply the rotated part alone. With
`ramp="paper"` and `ramp="harmonic"`, `attention_factor` must be given: these ramps are written as `longrope`, which
has no key for the softmax scale.

**A base model that is already scaled** (Llama 3.1, a YaRN checkpoint) is refused unless `on_scaled="replace"` is
given.

## All model types
"""


def methods_page() -> str:
    """Return the page of all methods, from the registry."""
    found = methods()
    encodings = [cls for cls in found.values() if cls.is_encoding]
    others = [cls for cls in found.values() if not cls.is_encoding]
    parts = [_METHODS_LEAD, "## Summary\n", _TABLE_LEAD, _summary_table(others)]
    parts += [
        "These encodings take the place of RoPE in a model that is trained with them:\n",
        _summary_table(encodings),
    ]
    parts += ["## Symbols\n", _SYMBOLS_LEAD]
    parts += [_table(("symbol", "meaning"), ((f"${symbol}$", meaning) for symbol, meaning in _SYMBOLS.items()))]
    parts.append(_REQUESTS)
    for title, (kind, lead) in _KINDS.items():
        parts += [f"## {title}\n", f"{lead}\n"]
        parts += [_method_section(cls) for cls in found.values() if issubclass(cls, kind)]
    return "\n".join(parts)


def _summary_table(classes: Iterable[type[Method]]) -> str:
    rows = []
    for cls in classes:
        also = "".join(f", `{alias}`" for alias in cls.aliases)
        on_disk = cls.on_disk.replace("the manifest only", "manifest")
        name = f"[`{cls.name}`](#{cls.name}){also}"
        rows.append((name, cls.summary, _zero_shot(cls), on_disk, _linked(cls.paper)))
    return _table(("method", "what it does", "without fine-tuning", "rope_type", "source"), rows)


def _method_section(cls: type[Method]) -> str:
    parts = [f"### `{cls.name}` {{ #{cls.name} }}\n", cls.summary + "\n"]
    words = method_words(cls)
    if not cls.instead_of_rope:
        parts.append(words.explanation + "\n")
    if words.formula:
        parts.append(f"$$\n{words.formula}\n$$\n")
    if words.symbols:
        parts.append(_names_as_code(cls, words.symbols) + "\n")
    arguments = [f'"{cls.name}"', *(["factor=4"] if not cls.is_encoding else [])]
    arguments += [f"{name}={_in_python(value)}" for name, value in cls.example_options.items()]
    parts.append(f"```python\npatch_model(model, {', '.join(arguments)})\n```\n")
    if options := cls.option_fields():
        rows = [
            (f"`{name}`", _default(field.default), _ended(field.metadata["help"])) for name, field in options.items()
        ]
        parts.append(_table(("option", "default", "meaning"), rows))
    else:
        parts.append("It has no options.\n")
    facts = [("Other names", ", ".join(f"`{alias}`" for alias in cls.aliases))]
    facts += [("Of use without fine-tuning", _zero_shot(cls))]
    if issubclass(cls, InPlaceOfRope):
        facts += [("How positions enter", words.explanation), ("Absolute or relative", words.absolute_or_relative)]
        facts += [("What is trained", words.trained), ("Longer texts than in training", words.extrapolates)]
        facts += [("Whether a KV cache stays right", words.kv_cache)]
    else:
        facts += [("Texts up to the original length", words.on_short_texts), ("KV cache", words.kv_cache)]
    facts += [("Measured", _measured(cls)), ("On disk", _on_disk(cls)), ("Source", _linked(cls.paper))]
    parts += ["".join(f"{term}\n:   {text}\n\n" for term, text in facts if text)]
    return "\n".join(parts)


def _measured(cls: type[Method]) -> str:
    """Return one measured row of a method: on SmolLM2, or else on the tiny model; with the page that has the others."""
    rows = {row["name"]: row for row in read_rows("smollm2-zero-shot-2x.jsonl")}
    if found := rows.get(cls.name):
        plain = rows["unpatched"]
        return (
            f"perplexity of *Persuasion* at factor 2 without fine-tuning: {found['8k']} at 8k tokens and "
            f"{found['16k']} at 16k. The unpatched SmolLM2-135M, trained on 8k tokens, has {plain['8k']} and "
            f"{plain['16k']}. "
            "[All methods](../results/zero-shot.md)."
        )
    encodings = {row["name"]: row for row in read_rows("encodings.csv")}
    if (found := encodings.get(cls.name)) and issubclass(cls, InPlaceOfRope):
        longer = f"{found['1024']} at 1024" if found["1024"] else "it cannot read 1024"
        return (
            f"perplexity of the tiny model trained from scratch with it on 256 tokens at a time: {found['256']} at 256 "
            f"tokens, {longer}. RoPE has {encodings['rope']['256']} and {encodings['rope']['1024']}. "
            "[All encodings](../results/encodings.md)."
        )
    near, far = (_by_first_name(read_rows("study-budget-4x.csv", at=length)) for length in ("256", "1024"))
    if found := far.get(cls.name):
        return (
            f"perplexity of the tiny model, trained on 256 tokens at a time, at factor 4 without fine-tuning: "
            f"{near[cls.name]['zero-shot']} at 256 tokens and {found['zero-shot']} at 1024. The unpatched model has "
            f"{near['unpatched']['zero-shot']} and {far['unpatched']['zero-shot']}. "
            "[All budgets](../results/fine-tuning.md)."
        )
    return "no published row of ours."


def _by_first_name(rows: Iterable[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {re.split(r"[, ]", row["name"])[0]: row for row in reversed(list(rows))}


def _on_disk(cls: type[Method]) -> str:
    """Return how config.json says a method, on a model of 4,096 tokens and heads of 128 features."""
    if issubclass(cls, Encoding):
        return (
            f'`config.json` gets `"rope_type": "{encoding_rope_type(cls.name)}"`, which plain Transformers refuses and '
            "prints, and `context_extension.json` says the rest."
        )
    method = cls(4.0, **cls.example_options)
    if method.needs_hf_posenc:
        said = "`context_extension.json`; the `rope_parameters` of `config.json` remain those of the base model."
        return said + (f" {cls.on_disk[0].upper()}{cls.on_disk[1:]}." if "(" in cls.on_disk else "")
    parameters = {
        name: _shortened(value)
        for name, value in {"rope_theta": _SPEC.rope_theta, **method.rope_parameters(_SPEC)}.items()
    }
    shown = json.dumps(parameters).replace('"...', "...").replace('..."', "...")
    said = f"`rope_parameters` of `config.json`, at 4 times 4,096 tokens with 128 features in a head: `{shown}`"
    other = f". By option: {cls.on_disk}" if "(" in cls.on_disk else ""
    return f"{said}{other}."


def _shortened(value: object) -> object:
    """Return a list by its first and last numbers, and other numbers in few digits."""
    if isinstance(value, list):
        return [_shortened(value[0]), "...", _shortened(value[-1])]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _names_as_code(cls: type[Method], text: str) -> str:
    """Return a text with the names of options, and of methods, as code; formulas stay."""
    names = sorted({*cls.option_fields(), "ntk_by_parts"}, key=len, reverse=True)
    values = r"(?:='\w+')?"
    pattern = re.compile(rf"(\$[^$]*\$)|\b(?:{'|'.join(names)})\b{values}")
    plain = {"window", "group", "leak", "stage", "base", "scale"}  # words too: names after "option" only

    def marked(found: re.Match[str]) -> str:
        if found[1] or (found[0] in plain and not text[: found.start()].endswith("option ")):
            return found[0]
        return "`" + found[0].replace("'", '"') + "`"

    return pattern.sub(marked, text)


def _in_python(value: object) -> str:
    """Return a value as a line of Python has it: a list by its repeated numbers, a large number with underscores."""
    if isinstance(value, list):
        return " + ".join(f"[{number}] * {len(list(same))}" for number, same in groupby(value))
    return f"{value:_}" if isinstance(value, int) else repr(value)


def _default(value: object) -> str:
    return f"`{value!r}`".replace("'", '"')


def _zero_shot(cls: type[Method]) -> str:
    if not cls.zero_shot:
        return "no"
    return "depends on its options" if cls.needs_options else "yes"


def _ended(text: str) -> str:
    """Return a help text with a full stop; it may begin with a value, so its first letter stays."""
    return text if text.endswith(".") else f"{text}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _linked(paper: str) -> str:
    """Return a source with links to arXiv and GitHub."""
    paper = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)
    return re.sub(r"(?<![/\w])(github\.com/\S+?)(?=[,;)]|$)", r"[\1](https://\1)", paper)


def command_line_page() -> str:
    """Return the page of all commands, from their parsers."""
    rows = [(f"[`hf-posenc {name}`](#{name})", summary_line(run.__doc__)) for name, run in COMMANDS.items()]
    parts = [_COMMANDS_LEAD, _table(("command", "what it does"), rows)]
    return "\n".join([*parts, *(_command_section(name, run) for name, run in COMMANDS.items())])


def _command_section(name: str, run: Callable[[Sequence[str]], int | None]) -> str:
    parser = parser_of(run)
    parts = [f"## `hf-posenc {name}` {{ #{name} }}\n", f"{summary_line(run.__doc__)}\n"]
    parts += [f"```text\n{parser.usage}\n```\n"]
    if examples := examples_in(run.__doc__):
        parts += ["```sh\n" + "\n".join(examples) + "\n```\n"]
    for group in parser._action_groups:
        actions = [one for one in shown_actions(group) if not {"-h", "--traceback"} & set(one.option_strings)]
        if not actions:
            continue
        title = (group.title or "").replace("``", "`")
        entries = "".join(_entry(parser, action) for action in actions)
        if len(actions) > 30:  # TrainingArguments
            body = "\n".join(f"    {line}" if line else "" for line in entries.splitlines())
            parts.append(f'??? note "{title}"\n\n{body}\n')
        else:
            parts.append(f"**{title[0].upper()}{title[1:]}**\n\n{entries}")
    return "\n".join(parts)


def parser_of(run: Callable[[Sequence[str]], int | None]) -> argparse.ArgumentParser:
    """Return the parser of a command, which makes it when it is called."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            run([HELP_ALL])
        except HelpShown as shown:
            return shown.parser
    raise AssertionError(f"{run.__name__} did not show its help")


def shown_actions(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """Return the arguments of a group that its help shows, without the second forms of switches."""
    shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
    return [action for action in shown if not is_negation(action)]


def is_negation(action: argparse.Action) -> bool:
    """Return whether an argument only switches off what another one switches on."""
    return isinstance(action, argparse._StoreFalseAction)


def _entry(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return one argument as an item of a definition list."""
    values = ""
    if action.nargs not in (0, "?"):
        values = " " + parser._get_formatter()._format_args(action, action.dest.upper())
    off = [one for one in parser._actions if is_negation(one) and one.dest == action.dest]
    names = [*action.option_strings, *(flag for one in off for flag in one.option_strings)]
    said = ", ".join(f"`{flag}{values}`" for flag in names) or f"`{action.metavar or action.dest.upper()}`"
    text = _in_markdown(re.sub(r"\s+", " ", action.help or "").strip().replace("%%", "%"))
    text = _ended(text) if text else "See TrainingArguments."
    if action.option_strings and action.required:
        text += " Required."
    elif action.option_strings and action.default not in (None, False, [], "", argparse.SUPPRESS):
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else action.default
        text += f" Default: `{getattr(default, 'value', default)}`."
    return f"{said}\n:   {text}\n\n"


def _in_markdown(text: str) -> str:
    """Return a help text with quoted values and flags as code, and nothing that Markdown or HTML would read."""
    text = re.sub(r"'(\{.*?\})'", r"`'\1'`", text)
    parts = re.split(r"(`[^`]*`)", text)
    for at in range(0, len(parts), 2):
        part = parts[at].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        part = re.sub(r"([*_\[\]{}\\|$#])", r"\\\1", part)
        parts[at] = re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", part)
    return "".join(parts)


def families_page() -> str:
    """Return the page of all model types."""
    table, attention = capabilities(), attention_capabilities()
    both = [name for name, refusal in attention.items() if refusal is None]
    names = [f"[`{name}`](methods.md#{name})" for name, cls in methods().items() if cls(1.0).runs_in_attention]
    lead = _FAMILIES_LEAD.format(
        version=table_version(),
        all=len(table),
        extended=len(attention),
        refused=len(table) - len(attention),
        both=len(both),
        static_only=len(attention) - len(both),
        names=", ".join(names),
    )
    rows = [_family_row(name, refusal, attention.get(name)) for name, refusal in sorted(table.items())]
    return lead + "\n" + _table(("model type", "static methods", "methods in attention", "reason"), rows)


def _family_row(name: str, refusal: Refusal | None, in_attention: Refusal | None) -> tuple[str, ...]:
    if refusal is not None:
        return f"`{name}`", "no", "no", _sentence(_in_markdown(refusal.reason))
    if in_attention is not None:
        return f"`{name}`", "yes", "no", _sentence(_in_markdown(in_attention.reason))
    return f"`{name}`", "yes", "yes", ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


_PROTOCOLS_LEAD = """# Protocols

A protocol says which tokens are scored, how much context each of them has, where a BOS token is added and what is
averaged. `--protocol NAME` and `perplexity(protocol=NAME)` take these names. The published ones do what their authors'
code does. This page is made from the package. [Numbers and protocols](../understand/numbers-and-protocols.md) explains
which one to choose.
"""


def protocols_page() -> str:
    """Return the page of all protocols, from the table that perplexities are measured by."""
    parts = [_PROTOCOLS_LEAD]
    for name, rule in RULES.items():
        numbers: dict[str, int | str | None] = {
            "n": "N",
            "stride": rule.stride or "`--stride`",
            "last_k": rule.last_k,
            "first": "`score_from`",
        }
        words = in_words(name, rule.bos or "none", rule.average, None, **numbers)
        more = " `--last-k` takes another number of tokens." if rule.last_k else ""
        more += "" if rule.bos else " `--bos` changes the rule for the BOS token."
        parts += [f"## `{name}` {{ #{name} }}\n", f"{words}{more}\n", f"Source: {_linked(rule.source)}.\n"]
    return "\n".join(parts)


_TASKS_LEAD = """# Retrieval tasks

`--tasks NAME` and `retrieval(tasks=[NAME])` take these names; lm-eval knows them as `hf_posenc_NAME`. All texts
are made offline, from a seed, in sentences of our own, so scores cannot be compared with those of the papers' prompts.
[Measure retrieval](../how-to/measure-retrieval.md) explains how to use them. This page is made from the package.

- *By depth*: the answer lies at one depth of the text, so the task is measured at each of `--depths`.
- *Several*: a text can have several questions (`--questions`), so that it is read only once.
"""


def tasks_page() -> str:
    """Return the page of all retrieval tasks and groups, from their registries."""
    yes = {True: "yes", False: "no"}
    rows = [
        (f"`{task.name}`", task.summary, yes[task.has_depth], yes[task.several_questions], _linked(task.source))
        for task in tasks().values()
    ]
    heads = ("task", "what the model has to find", "by depth", "several", "published in")
    parts = [_TASKS_LEAD, _table(heads, rows), "## Groups\n\nThe name of a group stands for all of its tasks.\n"]
    groups = [
        (f"`{name}`", group.summary, ", ".join(f"`{task}`" for task in group.tasks)) for name, group in GROUPS.items()
    ]
    parts += [_table(("group", "what it is", "tasks"), groups)]
    return "\n".join([*parts, *(f"{group.left_out}\n" for group in GROUPS.values() if group.left_out)])


PAGES: dict[str, Callable[[], str]] = {
    "reference/methods.md": methods_page,
    "reference/protocols.md": protocols_page,
    "reference/tasks.md": tasks_page,
    "reference/command-line.md": command_line_page,
    "reference/model-families.md": families_page,
}
