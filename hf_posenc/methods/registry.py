"""The methods, as one table: formula, options, source, and how each is spelled in a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_posenc.methods.closed_forms import FORMULAS, Formula
from hf_posenc.methods.serialization import SPELLINGS, OnDisk
from hf_posenc.spec import RopeScaling, unknown_name


@dataclass(frozen=True)
class Method:
    """One way to extend a model.

    Attributes:
        name: What users type and records say.
        options: Keywords it takes besides ``factor``; any other is an error.
        paper: Where the rule comes from.
        summary: One plain sentence.
        rope_type: The ``rope_type`` Transformers knows it by.
        aliases: Other names it answers to.
        zero_shot: Whether it is of use without fine-tuning.
        default_factor: Where neither a factor nor a length is given.
    """

    name: str
    options: frozenset[str]
    paper: str
    summary: str
    rope_type: str
    aliases: tuple[str, ...] = ()
    zero_shot: bool = True
    default_factor: float = 4.0

    @property
    def formula(self) -> Formula:
        """The float64 closed form."""
        return FORMULAS[self.name]

    @property
    def on_disk(self) -> OnDisk:
        """What gives the keys of Transformers' ``rope_parameters`` that express the rule."""
        return SPELLINGS[self.name]


_YARN_PAPER = "Peng et al. 2023, arXiv:2309.00071"
_YARN_OPTIONS = frozenset(
    {"ramp", "temperature", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}
)

_ALL = (
    Method(
        name="linear",
        options=frozenset(),
        paper="Chen et al. 2023, arXiv:2306.15595, section 2.3",
        summary="Divides all frequencies: squeezes positions into the trained range; wants fine-tuning.",
        rope_type="linear",
        aliases=("pi",),
        zero_shot=False,
    ),
    Method(
        name="ntk",
        options=frozenset(),
        paper=f"bloc97 2023; {_YARN_PAPER}, section 3.1",
        summary="Raises the base: keeps fast pairs, stretches slow ones; useful without fine-tuning.",
        rope_type="default",
    ),
    Method(
        name="ntk_by_parts",
        options=frozenset({"beta_fast", "beta_slow"}),
        paper=f"{_YARN_PAPER}, section 3.2",
        summary="Keeps pairs that turn often, divides those that hardly turn, blends by turns between.",
        rope_type="llama3",
    ),
    Method(
        name="dynamic",
        options=frozenset({"scope", "stage", "growth", "log_n"}),
        paper=f"emozilla 2023; {_YARN_PAPER}, section 3.3; stages: hf_posenc",
        summary="NTK in stages, by where each query stands: exact with a KV cache, nothing lost on short texts.",
        rope_type="the manifest only (dynamic for scope=sequence)",
        aliases=("dynamic_ntk",),
    ),
    Method(
        name="dynamic_yarn",
        options=(_YARN_OPTIONS - {"temperature"}) | {"stage", "growth", "log_n"},
        paper=f"{_YARN_PAPER}, sections 3.2 to 3.4; stages: hf_posenc",
        summary="YaRN in stages, by where each query stands: exact with a KV cache, nothing lost on short texts.",
        rope_type="the manifest only",
    ),
    Method(
        name="yarn",
        options=_YARN_OPTIONS,
        paper=f"{_YARN_PAPER}, sections 3.2 and 3.4",
        summary="NTK-by-parts with an attention temperature: the usual choice, with or without fine-tuning.",
        rope_type="yarn (longrope for ramp=paper and ramp=harmonic)",
    ),
    Method(
        name="self_extend",
        options=frozenset({"group", "window", "log_n"}),
        paper="Jin et al. 2024, arXiv:2401.01325, section 3.2",
        summary="Far tokens share positions in groups, near ones keep theirs; no fine-tuning.",
        rope_type="the manifest only",
    ),
    Method(
        name="dca",
        options=frozenset({"chunk_size", "local_window", "sharpen", "log_n"}),
        paper="An et al. 2024, arXiv:2402.17463, section 3.2 (ChunkLlama)",
        summary="Positions start anew in each chunk, and far chunks are all equally far; no fine-tuning.",
        rope_type="the manifest only",
    ),
    Method(
        name="rerope",
        options=frozenset({"window", "log_n"}),
        paper="Su 2023, github.com/bojone/rerope",
        summary="Distances stop growing at a window; no fine-tuning.",
        rope_type="the manifest only",
    ),
    Method(
        name="leaky_rerope",
        options=frozenset({"window", "leak", "log_n"}),
        paper="Su 2023, github.com/bojone/rerope",
        summary="Distances grow more slowly beyond a window; no fine-tuning.",
        rope_type="the manifest only",
    ),
    Method(
        name="llama3",
        options=frozenset({"low_freq_factor", "high_freq_factor"}),
        paper="Llama Team 2024, arXiv:2407.21783, section 3.4.2",
        summary="Llama 3.1's frequencies: NTK-by-parts between 1 and 4 turns.",
        rope_type="llama3",
    ),
    Method(
        name="longrope",
        options=frozenset({"short_factor", "long_factor", "attention_factor"}),
        paper="Ding et al. 2024, arXiv:2402.13753, section 3",
        summary="A divisor per pair, given as a list (found by search, or another model's).",
        rope_type="longrope",
    ),
    Method(
        name="abf",
        options=frozenset({"rope_theta"}),
        paper="Xiong et al. 2023, arXiv:2309.16039, section 2.1",
        summary="A larger base of your choice; wants fine-tuning.",
        rope_type="default",
        zero_shot=False,
    ),
    Method(
        name="nope",
        options=frozenset({"attention_factor"}),
        paper="Gelberg et al. 2025, arXiv:2512.12167 (DroPE)",
        summary="Drops the positions altogether; of no use before fine-tuning, which it wants on short texts only.",
        rope_type="longrope",
        aliases=("drope",),
        zero_shot=False,
    ),
)


def _encoding(name: str, options: set[str], paper: str, summary: str, aliases: tuple[str, ...] = ()) -> Method:
    """Return an encoding that takes the place of the model's own, which is stilled; nothing can say it on disk."""
    return Method(
        name=name,
        options=frozenset(options),
        paper=paper,
        summary=summary,
        rope_type="the manifest only (plain Transformers refuses it)",
        aliases=aliases,
        zero_shot=False,
        default_factor=1.0,
    )


_ROPE_OPTIONS = {"rope_theta", "interleaved", "computation", "partial_rotary_factor"}
_ENCODINGS = (
    _encoding(
        "sinusoidal",
        {"embedding_scale"},
        "Vaswani et al. 2017, arXiv:1706.03762, section 3.5",
        "Adds sines and cosines of each position to the embeddings; for training from scratch.",
    ),
    _encoding(
        "learned",
        set(),
        "Gehring et al. 2017, arXiv:1705.03122, section 3.1",
        "Adds a trained vector for each position, and ends where the table does; for training from scratch.",
    ),
    _encoding(
        "relative_bias",
        {"max_distance"},
        "Shaw et al. 2018, arXiv:1803.02155, section 3.2 (distances clipped); as a bias: Raffel et al. 2019",
        "Adds a trained bias for each distance and head to the logits; for training from scratch.",
    ),
    _encoding(
        "t5_bias",
        {"num_buckets", "max_distance", "bidirectional"},
        "Raffel et al. 2019, arXiv:1910.10683, section 2.1",
        "Adds a trained bias for each bucket of distances and head to the logits; for training from scratch.",
        aliases=("t5",),
    ),
    _encoding(
        "alibi",
        set(),
        "Press et al. 2021, arXiv:2108.12409, section 3",
        "Takes a constant times the distance off the logits; for training from scratch.",
    ),
    _encoding(
        "rope",
        _ROPE_OPTIONS,
        "Su et al. 2021, arXiv:2104.09864, section 3",
        "Turns pairs of features by position, in either layout, in real or complex numbers.",
    ),
    _encoding(
        "xpos",
        _ROPE_OPTIONS | {"scale_base"},
        "Sun et al. 2022, arXiv:2212.10554, section 3.2",
        "RoPE whose pairs shrink with distance, the fast ones most; for training from scratch.",
    ),
)

METHODS: dict[str, Method] = {method.name: method for method in (*_ALL, *_ENCODINGS)}
_BY_NAME = {name: method for method in METHODS.values() for name in (method.name, *method.aliases)}


def get_method(name: str) -> Method:
    """Look a method up by name or alias.

    Raises:
        ValueError: It is unknown; the nearest known name is suggested.
    """
    key = name.lower().replace("-", "_") if isinstance(name, str) else name
    if key not in _BY_NAME:
        raise unknown_name("method", name, sorted(_BY_NAME), key)
    return _BY_NAME[key]


def make_scaling(method: str, factor: float, options: Mapping[str, Any]) -> RopeScaling:
    """Check that a method takes the given options, and their values.

    Raises:
        TypeError: The method does not take an option, or a value is of the wrong type.
        ValueError: The method is unknown or a value is out of range.
    """
    entry = get_method(method)
    for option in options:
        if option not in entry.options:
            takers = [m.name for m in METHODS.values() if option in m.options]
            others = f" ({', '.join(takers)} {'does' if len(takers) == 1 else 'do'})" if takers else ""
            allowed = f" It takes: {', '.join(sorted(entry.options))}." if entry.options else ""
            raise TypeError(f"method {entry.name!r} takes no option {option!r}{others}.{allowed}")
    return RopeScaling(entry.name, factor, **options)


def available_methods() -> list[dict[str, Any]]:
    """Return the table of methods as rows: name, aliases, summary, paper, options, on_disk."""
    return [
        {
            "name": m.name,
            "aliases": list(m.aliases),
            "summary": m.summary,
            "paper": m.paper,
            "options": sorted(m.options),
            "on_disk": m.rope_type,
        }
        for m in METHODS.values()
    ]
