"""The pairs of a model under a rule, as sentences and as a table."""

from __future__ import annotations

import math

from hf_posenc.methods.base import Unscaled
from hf_posenc.methods.yarn import YarnOptions, yarn_ramp
from hf_posenc.report.frequencies import PairRule, wavelengths

HEADS = ("pair", "wavelength", "turns", "new wavelength", "stretch", "")
_ROWS = 12  # of the small table, besides the pairs where something begins


def pair_sentences(rule: PairRule) -> list[str]:
    """Return what a model's pairs are, and what a rule makes of them."""
    spec, original = rule.spec, rule.spec.original_max_position_embeddings
    tokens, (never, _) = wavelengths(spec), rule.incomplete()
    still = f" {spec.unrotated_pairs} more pairs never turn at all." if spec.unrotated_pairs else ""
    first = f" (from pair {spec.rotated_pairs - never})" if never else ""
    lines = [
        f"{spec.rotated_pairs} pairs of features turn with the position, at base {spec.rope_theta:g}: the fastest once "
        f"in {number_name(tokens[0])} tokens, the slowest once in {number_name(tokens[-1])}.{still}",
        f"Within the {original:,} tokens of training {_pairs(never, 'never completes', 'never complete')} a turn{first}"
        + (", and so met only a part of the circle." if never else ": every angle was met."),
    ]
    if rule.reach > original:
        unscaled = PairRule("unscaled", spec, Unscaled(), rule.reach)
        lines.append(
            f"Unscaled, within {rule.reach:,} tokens {_pairs(unscaled.incomplete()[1], 'completes', 'complete')} no "
            f"turn, and {_pairs(unscaled.unseen() or 0, 'meets', 'meet')} angles never met in training."
        )
    return lines


def rule_sentences(rule: PairRule) -> list[str]:
    """Return what a rule that changes frequencies makes of the pairs, and of the logits."""
    kept, blended, stretched = rule.shares()
    slowest = rule.stretch[-1]
    by = "stopped" if math.isinf(slowest) else f"stretched by {slowest:.4g}"
    lines = [
        f"{rule.name}, {len(rule.stretch)} pairs: {kept} kept, {blended} between, {stretched} stretched by "
        f"{rule.method.factor:.4g} or more; the slowest is {by}. Within {rule.reach:,} tokens {_complete(rule)}, and "
        f"{_pairs(rule.unseen() or 0, 'meets', 'meet')} angles never met in training."
    ]
    return [*lines, *_ramp(rule), temperature_sentence(rule.frequencies[1])]


def _ramp(rule: PairRule) -> list[str]:
    """Say between which pairs the ramp of a rule by parts lies."""
    method = rule.method
    if method.ramp_turns is None:
        return []
    slow, fast = method.ramp_turns
    if isinstance(method, YarnOptions) and method.ramp != "paper":
        ramp = yarn_ramp(rule.spec, method)[: rule.spec.rotated_pairs]
        kept, whole = int((ramp == 0).sum()), int((ramp == 1).sum())
        shape = "wavelengths mixed, linear in the pair's index" if method.ramp == "harmonic" else "linear in its index"
    else:
        kept, whole = sum(turns >= fast for turns in rule.turns), sum(turns <= slow for turns in rule.turns)
        shape = "linear in its turns"
    begin, end = kept, rule.spec.rotated_pairs - whole
    between = f"from pair {begin} to {end - 1} the share grows ({shape})" if end > begin else "no pair lies between"
    return [
        f"The ramp: a pair of {fast:g} turns or more is kept, one of {slow:g} or less divided by {method.factor:g}; "
        f"{between}."
    ]


def temperature_sentence(attention_factor: float) -> str:
    """Say what multiplies cos and sin, and so the logits."""
    if attention_factor == 1:
        return "Temperature: none; logits keep their size."
    effect = "sharper" if attention_factor > 1 else "flatter"
    return (
        f"Temperature: cos and sin times {attention_factor:.4g}, so logits of the pairs that turn times "
        f"{attention_factor**2:.4g}: attention is {effect}."
    )


def pair_rows(rule: PairRule) -> list[list[str]]:
    """Return a row for each pair that turns: index, tokens and turns before, tokens after, stretch, and its share."""
    rows = []
    for pair, (tokens, turns) in enumerate(zip(wavelengths(rule.spec), rule.turns, strict=False)):
        stretch = rule.stretch[pair]
        stopped = math.isinf(stretch)
        after = ["never", "stopped"] if stopped else [number_name(tokens * stretch), f"{stretch:.3f}"]
        share = "" if rule.method.name == "none" else rule.share_of(pair)
        rows.append([str(pair), number_name(tokens), number_name(turns), *after, share])
    return rows


def chosen_pairs(rule: PairRule) -> list[int]:
    """Return the pairs of a small table: evenly spread ones, and those where something else begins."""
    last = rule.spec.rotated_pairs - 1
    spread = {round(at * last / (_ROWS - 1)) for at in range(_ROWS)}
    shares = [rule.share_of(pair) for pair in range(last + 1)]
    begins = {pair for pair in range(1, last + 1) if shares[pair] != shares[pair - 1]}
    never = {pair for pair in range(last + 1) if rule.turns[pair] < 1}
    return sorted(spread | begins | set(sorted(never)[:1]))


def number_name(value: float) -> str:
    """Return a number with three digits that count, or whole from a thousand on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _complete(rule: PairRule) -> str:
    """Say how many pairs complete no turn under a rule."""
    never = rule.incomplete()[1]
    return _pairs(never, "completes no turn", "complete no turn") if never else "every pair completes a turn"


def _pairs(count: int, one: str, more: str) -> str:
    return f"1 pair {one}" if count == 1 else f"{count or 'no'} pairs {more}"
