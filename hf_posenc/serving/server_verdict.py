"""What the log-probabilities of a server say about the rule that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_posenc.serving.log_probabilities import LogProbs, ModelServer
from hf_posenc.utils.units import aligned

UNSCALED = "unscaled"
# The share of the way to another rule at which a server is no longer taken to run the folder's.
_NEAR = 0.1


@dataclass(frozen=True)
class Precision:
    """The largest distance of a server that runs the right rule from the live model, by the numbers it computes in.

    Attributes:
        words: For people.
        measured: The mean difference in nats that was measured, and on what.
        limit: The largest mean difference that is taken for rounding.
    """

    words: str
    measured: str
    limit: float


# Measured with yarn on 500 to 1000 tokens, the live model in float32: the tiny model x4, SmolLM2-135M x2.
PRECISIONS: dict[str, Precision] = {
    "float32": Precision("float32, cache too", "measured 7e-6 and 1.3e-4", 1e-3),
    "float16": Precision("float16 weights or cache", "measured 1e-3 and 8e-3", 3e-2),
    "bfloat16": Precision("bfloat16", "measured 5e-3", 5e-2),
    "quantised": Precision("quantised weights", "measured 6e-2 for Q4_1, 9e-2 for Q8_0", 4e-1),
}


@dataclass(frozen=True)
class Difference:
    """The distance of a server from the live model under one rule.

    Attributes:
        mean: Mean absolute difference of the log-probabilities, in nats.
        largest: The largest one.
        past: The mean where more than the original length was read; None if nothing was.
        share: Where the server is on the way from the folder's rule (0) to this one (1): the least-squares coefficient
            of its difference from the folder's rule on the difference of the two rules. None for the folder's own.
        error: The standard error of ``share``, with positions as clusters; None for the folder's own.
    """

    mean: float
    largest: float
    past: float | None
    share: float | None = None
    error: float | None = None


def precision_of(server: ModelServer, given: str | None) -> Precision:
    """Return what a server computes in: as given, or by the bits of its weights, or bfloat16."""
    if given is not None:
        return PRECISIONS[given]
    bits = server.weight_bits
    if bits is None:
        return PRECISIONS["bfloat16"]
    # A file of float32 weights is served with a float16 cache, unless a flag says otherwise.
    return PRECISIONS["float16" if bits >= 16 else "quantised"]


def compare(answered: LogProbs, live: Mapping[str, torch.Tensor], original: int) -> dict[str, Difference]:
    """Return the distance of a server from each rule; the first is the folder's own."""
    own = next(iter(live.values()))
    past = answered.rows > original
    distances = {}
    for name, values in live.items():
        apart = (answered.values - values).abs()
        share, error = (None, None) if values is own else share_of(answered, own, values)
        past_mean = float(apart[past].mean()) if past.any() else None
        distances[name] = Difference(float(apart.mean()), float(apart.max()), past_mean, share, error)
    return distances


def share_of(answered: LogProbs, own: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return where a server is between two rules, 0 at the first and 1 at the second, and the standard error.

    Rounding hardly goes in the direction from one rule to the other, so this decides between them even where the mean
    difference from either is mostly rounding. Infinite error: the two rules give the same numbers.
    """
    apart, way = answered.values - own, other - own
    square = float((way * way).sum())
    if square == 0:
        return 0.0, float("inf")
    share = float((apart * way).sum()) / square
    _, position = torch.unique(answered.rows, return_inverse=True)
    moments = torch.zeros(int(position.max()) + 1, dtype=torch.float64)
    moments.index_add_(0, position, way * (apart - share * way))
    return share, float((moments * moments).sum().sqrt()) / square


def judge(found: Mapping[str, Difference], limit: float) -> tuple[str, str | None]:
    """Return the verdict on a server and the rule that it runs; see ``ServerCheck``.

    Args:
        found: The folder's rule first; ``"unscaled"`` among the others.
        limit: The largest mean difference that is taken for rounding.
    """
    own = next(iter(found))
    nearest = min(found, key=lambda name: found[name].mean)
    if found[nearest].mean > limit:
        return "differs", None
    share, error = _share(found[nearest]) if nearest != own else (0.0, 0.0)
    if share - 3 * error > 0.5:  # else the two cannot be told apart
        if abs(share - 1) > _NEAR + 3 * error:
            return "differs", None
        return ("unscaled" if nearest == UNSCALED else "another"), nearest
    share, error = _share(found[UNSCALED])
    if 3 * error > 0.5:  # the rule changes less than the server rounds
        return "undecided", None
    if found[own].mean <= limit and abs(share) <= _NEAR + 3 * error:
        return "agrees", own
    return "differs", None


def _share(other: Difference) -> tuple[float, float]:
    assert other.share is not None
    assert other.error is not None
    return other.share, other.error


def sentence_of(verdict: str, rule: str | None, found: Mapping[str, Difference], precision: Precision) -> str:
    """Return a verdict in words, with its numbers."""
    own = next(iter(found))
    nearest = min(found, key=lambda name: found[name].mean)
    share, error = _share(found[UNSCALED])
    limit = f"{precision.words}: at most {precision.limit:g} is taken for rounding ({precision.measured})"
    mean = f"the mean difference from {own} is {found[own].mean:.1e}"
    way = f"and the server is {share:.2f} ± {error:.2f} of the way from there (0) to the unscaled model (1)"
    if verdict == "agrees":
        return f"agrees: the server runs {own}; {mean}, {way}. {limit}"
    if verdict == "unscaled":
        advice = "It was started without the rule: hf-posenc export --to prints the command with it"
        return f"unscaled: the server runs the unscaled model; {mean}, {way}. {limit}. {advice}"
    if verdict == "another":
        assert rule is not None
        return f"another rule: the server runs {rule}, not {own}; {mean}, from {rule} {found[rule].mean:.1e}. {limit}"
    if verdict == "undecided":
        return (
            f"undecided: {own} changes the log-probabilities of this text less than the server rounds; {mean}, {way}. "
            "Compare more tokens, or serve the model in a higher precision"
        )
    return (
        f"differs: the server runs neither {own} nor any rule that was compared; {mean}, {way}; the nearest is "
        f"{nearest}, {found[nearest].mean:.1e} off. {limit}. Are weights, precision and lengths those of the folder?"
    )


def table_of(found: Mapping[str, Difference]) -> list[str]:
    """Return the lines of a table: how far a server is from each rule."""
    rows = [["difference in log-probability from", "mean", "largest", "past original"]]
    for name, one in found.items():
        rows.append([name, f"{one.mean:.1e}", f"{one.largest:.1e}", "-" if one.past is None else f"{one.past:.1e}"])
    return aligned(rows, left=(0,))
