"""What the positional encodings are: a table of words, and the tests that hold what is said of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EncodingFacts:
    """An encoding in words.

    Attributes:
        title: Its name as papers write it.
        enters: How positions reach the model.
        kind: Absolute or relative.
        cache: Whether a KV cache can hold what it needs.
        parameters: What is trained.
        extrapolates: Whether it reads further than it was trained, and why.
        paper: Where it comes from.
        properties: What holds of it, each with the test in ``tests/test_encoding_properties.py`` that holds it.
        options: Its numbers that ``--option`` changes, with their defaults.
    """

    title: str
    enters: str
    kind: str
    cache: str
    parameters: str
    extrapolates: str
    paper: str
    properties: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


ENCODING_FACTS: dict[str, EncodingFacts] = {
    "rope": EncodingFacts(
        "Rotary position embedding (RoPE)",
        "In every layer the features of queries and keys are taken in pairs, and each pair is turned by an angle: "
        "position times the pair's frequency. Values are left alone.",
        "Applied to absolute positions, relative in effect: a score sees only by how much key and query are turned "
        "apart, which is the distance.",
        "Yes: a key is turned once, by where it stands, and the cache holds it turned.",
        "None.",
        "Not by itself: slow pairs never complete a turn in training and meet new angles beyond it. The methods of "
        "`hf-posenc methods` stretch them.",
        "Su et al. 2021, arXiv:2104.09864",
        (
            (
                "The score depends on the distance only, for both layouts of pairs, in real and in complex numbers.",
                "test_the_score_of_rope_depends_on_the_distance_only",
            ),
            ("Turning keeps the length of queries and keys.", "test_rotation_keeps_norms_and_undoes_itself"),
            (
                "Scores are bounded by a sum that falls with the distance on average (section 3.4.3).",
                "test_scores_stay_below_the_decay_bound_and_reach_it",
            ),
        ),
    ),
    "xpos": EncodingFacts(
        "xPos (extrapolatable position embedding)",
        "As RoPE, and besides each pair of a query is multiplied by its decay to the power of position / scale_base, "
        "that of a key by the inverse.",
        "Relative in effect: the score is RoPE's, each pair faded by the distance, the fast ones most.",
        "Yes, with care: the factor of keys grows with the position without end, so long texts want positions counted "
        "from the middle, or float32.",
        "None.",
        "Better than RoPE: by the time slow pairs come to new angles, their part of the score has faded. What is far "
        "away is lost with it.",
        "Sun et al. 2022, arXiv:2212.10554",
        (("The decay of each pair is that of torchscale's code.", "test_xpos_decay_is_torchscales_buffer"),),
        {"scale_base": 512},
    ),
    "sinusoidal": EncodingFacts(
        "Sinusoidal positions",
        "Before the first layer a row of sines and cosines of the position, of wavelengths in a geometric series, is "
        "added to the features of each token.",
        "Absolute: each position has a row. Rows of equal distance are related by one rotation, which layers may learn "
        "to use.",
        "Yes: keys are made from features that hold the position already.",
        "None.",
        "Hardly: every position has a row, but sums of words and rows it never saw in training confuse the layers.",
        "Vaswani et al. 2017, arXiv:1706.03762, section 3.5",
        (
            (
                "The row of p + k is one matrix times the row of p, whatever p is, and that matrix is a rotation.",
                "test_sinusoids_are_the_papers_and_shift_by_a_rotation",
            ),
        ),
        {"base": 10000.0},
    ),
    "learned": EncodingFacts(
        "Learned positions",
        "Before the first layer a trained row of a table is added to the features of each token, one row a position.",
        "Absolute.",
        "Yes: keys are made from features that hold the position already.",
        "One row of the model's width for each position.",
        "No: past the last row of the table there is none. Longer tables start untrained, or are interpolated from the "
        "old one and trained on.",
        "Gehring et al. 2017, arXiv:1705.03122; Radford et al. 2018 and 2019 (GPT, GPT-2)",
    ),
    "alibi": EncodingFacts(
        "Attention with linear biases (ALiBi)",
        "Nothing is added to words and nothing is turned. A penalty is added to each score: minus the distance times a "
        "slope that each head has of its own.",
        "Relative: only the distance counts.",
        "Yes: keys know of no position; the bias is made anew for each query, from the distance.",
        "None: the slopes are fixed.",
        "Yes, without training: the bias goes on as it did, and far keys weigh next to nothing. It reads on without "
        "breaking, but uses little that is farther away than the slowest head looks.",
        "Press et al. 2021, arXiv:2108.12409",
        (
            (
                "The slopes of any number of heads, and the bias, are those of Bloom's and of MPT's code.",
                "test_alibi_is_blooms_and_mpts_for_any_number_of_heads",
            ),
            ("A head looks no further in a longer text.", "test_alibi_looks_no_further_in_a_longer_text"),
        ),
    ),
    "t5_bias": EncodingFacts(
        "T5's relative bias",
        "A trained number is added to each score, one for each head and bucket of distances: near distances have a "
        "bucket each, farther ones share ever wider ones.",
        "Relative: only the distance counts.",
        "Yes: keys know of no position; the bias is looked up anew for each query, from the distance.",
        "One number for each head and bucket, shared by all layers (T5 keeps them in its first).",
        "Partly: all distances past the largest share the last bucket, so longer texts are nothing new, but a text "
        "longer than those of training spreads attention over more keys than it was trained to weigh.",
        "Raffel et al. 2019, arXiv:1910.10683, section 2.1",
        (
            (
                "Buckets are those of T5Attention._relative_position_bucket, causal and in both directions.",
                "test_t5_buckets_are_t5s_own",
            ),
        ),
        {"num_buckets": 32, "max_distance": 128},
    ),
    "relative_bias": EncodingFacts(
        "Learned relative bias, clipped",
        "A trained number is added to each score, one for each head and distance; distances past the largest share its "
        "number.",
        "Relative: only the distance counts.",
        "Yes: keys know of no position; the bias is looked up anew for each query, from the distance.",
        "One number for each head and distance up to the largest.",
        "Partly, as T5's: far keys are all alike, and attention spreads over more of them than in training.",
        "after Shaw et al. 2018, arXiv:1803.02155, whose numbers are vectors; Huang et al. 2018, arXiv:1809.04281",
        (),
        {"max_distance": 128},
    ),
    "nope": EncodingFacts(
        "No positional encoding (NoPE)",
        "Not at all. The causal mask alone tells positions apart: the first token sees one key, the second two, ...",
        "Neither.",
        "Yes: there is nothing to hold.",
        "None.",
        "Partly: no angle and no row is ever new, but attention spreads over more keys than in training; a temperature "
        "helps. A model that was trained with RoPE has to be trained again, on short texts, to do without (DroPE).",
        "Kazemnejad et al. 2023, arXiv:2305.19466; Gelberg et al. 2025, arXiv:2512.12167 (DroPE)",
    ),
}
_ALSO = {"t5": "t5_bias", "drope": "nope"}


def encoding_of(name: str) -> str | None:
    """Return the name an encoding has in the table, None if it is not there."""
    key = name.lower().replace("-", "_")
    key = _ALSO.get(key, key)
    return key if key in ENCODING_FACTS else None


def encoding_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoding's numbers, with those that were given in place of their defaults.

    Raises:
        TypeError: It takes no such option, or a value is no number.
        ValueError: A value is out of range.
    """
    from hf_posenc.spec import check_length, check_number

    options = dict(ENCODING_FACTS[name].options)
    for option, value in given.items():
        if option not in options:
            takes = f"It takes: {', '.join(options)}." if options else "It takes none."
            raise TypeError(f"{name!r} takes no option {option!r}. {takes}")
        is_length = option in ("num_buckets", "max_distance")
        options[option] = check_length(option, value) if is_length else check_number(option, value, above=1)
    if name == "t5_bias" and (options["num_buckets"] < 4 or options["max_distance"] <= options["num_buckets"] // 2):
        raise ValueError(
            f"t5_bias needs at least 4 num_buckets and a max_distance of more than half as many tokens, got "
            f"{options['num_buckets']} and {options['max_distance']}."
        )
    return options
