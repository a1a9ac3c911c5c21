"""The effect of a method on a model, and an encoding's way of working on it, as sections of words and numbers."""

from __future__ import annotations

import math

import torch

from hf_posenc.attention.staged import Stages
from hf_posenc.explain.method_words import method_words
from hf_posenc.explain.sections import Explanation, Section, evenly
from hf_posenc.explain.subject import Subject
from hf_posenc.methods.base import AttentionMethod, DistanceMethod, Extension, Method, StagedMethod, Unscaled
from hf_posenc.methods.encodings.rope import RopeOptions
from hf_posenc.methods.explained import InPlaceOfRope, ModelShape, Numbers
from hf_posenc.methods.longrope import LongRope
from hf_posenc.methods.yarn import YarnOptions, yarn_ramp
from hf_posenc.reporting.frequencies import PairRule, wavelengths
from hf_posenc.spec import RopeSpec
from hf_posenc.utils.units import length_name, number_name

_PAIR_HEADS = ("pair", "wavelength", "rotations", "new wavelength", "stretch", "")
_PAIR_ROWS = 12  # of the small table of pairs, besides those where something begins


def explain_method(subject: Subject, extension: Extension) -> Explanation:
    """Return the effect of a method on a model."""
    spec, method, reach = extension.spec, extension.method, extension.context_length
    rule = PairRule(f"{method.name} x{method.factor:.4g}", spec, method, reach)
    title = f"{rule.name}: {length_name(spec.original_max_position_embeddings)} -> {length_name(reach)} tokens"
    words = method_words(method)
    changed = method.changed_options().items()
    options = ", ".join(f"{name} {value}" for name, value in changed if not isinstance(value, list))
    about = [words.explanation, f"On short texts: {words.on_short_texts}"]
    about += [f"KV cache: {words.kv_cache}"] if words.kv_cache else []
    about += [f"Source: {method.paper}.", *([f"Options: {options}."] if options else [])]
    on_model = [*partial_sentence(subject.head_dim, spec), *pair_sentences(rule)]
    sections = [Section("What it does", about), Section("This model", on_model)]
    if isinstance(method, DistanceMethod):
        sections.append(_distances(rule, method))
    else:
        if isinstance(method, StagedMethod) and method.needs_hf_posenc:
            sections.append(_stages(rule, method))
        sections.append(_frequencies(rule))
    return Explanation(title, subject.sentence, sections)


def explain_encoding(subject: Subject, method: Method, target: int) -> Explanation:
    """Return an explanation of an encoding, in general and on a model.

    Args:
        subject: The model.
        method: Replaces RoPE.
        target: Tokens that the model is to read.

    Raises:
        ValueError: The encoding is rotary and the model's config has no rotary embedding.
    """
    assert isinstance(method, InPlaceOfRope)
    model, words = subject.shape(target), method_words(method)
    about = [
        ("How positions enter", words.explanation),
        ("Absolute or relative", words.absolute_or_relative),
        ("KV cache", words.kv_cache),
        ("Parameters", words.trained),
        ("Reads further than trained", words.extrapolates),
        ("Source", f"{method.paper}."),
    ]
    sections = [Section("What it is", [f"{name}: {text}" for name, text in about if text])]
    numbers = method.numbers(model) or _rotary_numbers(method, model)
    sections.append(Section("On this model", numbers.sentences, numbers.heads, numbers.rows))
    if words.properties:
        held = [f"{sentence} ({test})" for sentence, test in words.properties]
        sections.append(Section("Held by tests/unit/methods/test_encoding_properties.py", held))
    title = f"{words.title or method.name}, up to {length_name(target)} tokens"
    return Explanation(title, subject.sentence, sections)


def _rotary_numbers(method: Method, model: ModelShape) -> Numbers:
    """Return the pairs of an encoding that rotates them and says nothing more; no numbers of any other."""
    if not isinstance(method, RopeOptions):
        return Numbers([])
    spec = method.rotary_spec(model.rope, model.head_dim)
    rule = PairRule(method.name, spec, Unscaled(), model.target)
    heads = [*_PAIR_HEADS[:2], f"rotations in {spec.original_max_position_embeddings:,}"]
    sentences = [*partial_sentence(model.head_dim, spec), *pair_sentences(rule)]
    return Numbers(sentences, heads, [row[:3] for row in pair_rows(rule)])


def partial_sentence(head_dim: int, spec: RopeSpec) -> list[str]:
    """Say how much of a head is rotated, where that is not all of it."""
    if spec.rotary_dim >= head_dim:
        return []
    rest = head_dim - spec.rotary_dim
    return [f"Of the {head_dim} features of a head {spec.rotary_dim} are rotated; {rest} carry no position."]


def pair_sentences(rule: PairRule) -> list[str]:
    """Return sentences on a model's pairs, and on the effect of a rule on them."""
    spec, original = rule.spec, rule.spec.original_max_position_embeddings
    tokens, (never, _) = wavelengths(spec), rule.incomplete()
    unrotated = f" {spec.unrotated_pairs} more pairs are never rotated." if spec.unrotated_pairs else ""
    first = f" (from pair {spec.rotated_pairs - never})" if never else ""
    lines = [
        f"{spec.rotated_pairs} pairs of features are rotated by the position, at base {spec.rope_theta:g}: the fastest "
        f"completes one rotation in {number_name(tokens[0])} tokens, the slowest one in {number_name(tokens[-1])}."
        f"{unrotated}",
        f"Within the {original:,} tokens of training {_pairs(never, 'never completes', 'never complete')} a rotation"
        + first
        + (", and so met only a part of the circle." if never else ": every angle was met."),
    ]
    if rule.reach > original:
        unscaled = PairRule("unscaled", spec, Unscaled(), rule.reach)
        lines.append(
            f"Unscaled, within {rule.reach:,} tokens {_pairs(unscaled.incomplete()[1], 'completes', 'complete')} no "
            f"rotation, and {_pairs(unscaled.unseen() or 0, 'meets', 'meet')} angles never met in training."
        )
    return lines


def rule_sentences(rule: PairRule) -> list[str]:
    """Return sentences on the effect of a rule that changes frequencies, on the pairs and on the logits."""
    kept, blended, stretched = rule.shares()
    slowest = rule.stretch[-1]
    by = "stopped" if math.isinf(slowest) else f"stretched by {slowest:.4g}"
    never = rule.incomplete()[1]
    complete = "every pair completes a rotation"
    if never:
        complete = _pairs(never, "completes no rotation", "complete no rotation")
    lines = [
        f"{rule.name}, {len(rule.stretch)} pairs: {kept} kept, {blended} between, {stretched} stretched by "
        f"{rule.method.factor:.4g} or more; the slowest is {by}. Within {rule.reach:,} tokens {complete}, and "
        f"{_pairs(rule.unseen() or 0, 'meets', 'meet')} angles never met in training."
    ]
    return [*lines, *_ramp(rule), temperature_sentence(rule.frequencies[1])]


def _ramp(rule: PairRule) -> list[str]:
    """Say between which pairs the ramp of a rule by parts lies."""
    method = rule.method
    if (pairs := method.ramp_pairs(rule.spec)) is not None:
        kept, critical = pairs
        count = critical - kept - 1
        between = "no pair lies between"
        if count:
            where = f"from pair {kept + 1} to {critical - 1}" if count > 1 else f"at pair {critical - 1}"
            between = f"{where} the share grows (linear in its index)"
        return [
            f"The ramp: pairs 0 to {kept} are kept, pair {critical}, the critical pair, and slower ones are divided by "
            f"{method.ramp_scale:.4g}; {between}."
        ]
    if method.ramp_turns is None:
        return []
    slow, fast = method.ramp_turns
    if isinstance(method, YarnOptions) and method.ramp != "paper":
        ramp = yarn_ramp(rule.spec, method)[: rule.spec.rotated_pairs]
        kept, whole = int((ramp == 0).sum()), int((ramp == 1).sum())
        shape = "wavelengths mixed, linear in the pair's index" if method.ramp == "harmonic" else "linear in its index"
    else:
        kept, whole = sum(count >= fast for count in rule.rotations), sum(count <= slow for count in rule.rotations)
        shape = "linear in its rotations"
    begin, end = kept, rule.spec.rotated_pairs - whole
    between = f"from pair {begin} to {end - 1} the share grows ({shape})" if end > begin else "no pair lies between"
    return [
        f"The ramp: a pair of {fast:g} rotations or more is kept, one of {slow:g} or less divided by "
        f"{method.factor:g}; {between}."
    ]


def temperature_sentence(attention_factor: float) -> str:
    """Say what multiplies cos and sin, and so the logits."""
    if attention_factor == 1:
        return "Temperature: none; logits keep their size."
    effect = "sharper" if attention_factor > 1 else "flatter"
    return (
        f"Temperature: cos and sin times {attention_factor:.4g}, so the logits of rotated pairs times "
        f"{attention_factor**2:.4g}: attention is {effect}."
    )


def pair_rows(rule: PairRule) -> list[list[str]]:
    """Return a row for each rotated pair: index, tokens and rotations before, tokens after, stretch, and its share."""
    rows = []
    for pair, (tokens, rotations) in enumerate(zip(wavelengths(rule.spec), rule.rotations, strict=False)):
        stretch = rule.stretch[pair]
        stopped = math.isinf(stretch)
        after = ["never", "stopped"] if stopped else [number_name(tokens * stretch), f"{stretch:.3f}"]
        share = "" if isinstance(rule.method, Unscaled) else rule.share_of(pair)
        rows.append([str(pair), number_name(tokens), number_name(rotations), *after, share])
    return rows


def chosen_pairs(rule: PairRule) -> list[int]:
    """Return the pairs of a small table: evenly spread ones, and those where something else begins."""
    last = rule.spec.rotated_pairs - 1
    shares = [rule.share_of(pair) for pair in range(last + 1)]
    begins = {pair for pair in range(1, last + 1) if shares[pair] != shares[pair - 1]}
    never = {pair for pair in range(last + 1) if rule.rotations[pair] < 1}
    return sorted({*evenly(last + 1, _PAIR_ROWS)} | begins | set(sorted(never)[:1]))


def _pairs(count: int, one: str, more: str) -> str:
    return f"1 pair {one}" if count == 1 else f"{count or 'no'} pairs {more}"


def _frequencies(rule: PairRule) -> Section:
    """Return the frequencies of the pairs, at the target if the rule depends on the length."""
    spec, method = rule.spec, rule.method
    sentences = rule_sentences(rule)
    if method.latent_temperature != 1:
        softmax = method.latent_temperature**2
        sentences.append(
            f"The softmax scale is also multiplied by {softmax:.4g}, which reaches whole logits (mscale_all_dim)."
        )
    if method.temperature_on_logits:
        sentences.append("The temperature is put on whole logits, by the softmax scale (temperature=logits).")
    sentences.append(
        "A wavelength is the tokens of one rotation; kept, blended and stretched say how much of the factor a pair "
        "has; * marks pairs that complete no rotation in training."
    )
    heads = list(_PAIR_HEADS)
    heads[2] = f"rotations in {length_name(spec.original_max_position_embeddings)}"
    rows = pair_rows(rule)
    for row, rotations in zip(rows, rule.rotations, strict=False):
        row[0] += "*" if rotations < 1 else ""
    heading = "What it does to the pairs"
    if isinstance(method, (StagedMethod, LongRope)):
        heading += f", at {rule.reach:,} tokens"
    return Section(heading, sentences, heads, rows, chosen_pairs(rule), left=(5,))


def _stages(rule: PairRule, method: StagedMethod) -> Section:
    """Return the stages up to the target."""
    spec, reach, stages = rule.spec, rule.reach, Stages(rule.spec, method)
    ends = stages.ends(reach)
    growth = "each longer than the one before by one ratio" if method.growth == "geometric" else "all of one length"
    sentences = [
        f"Queries up to {spec.original_max_position_embeddings:,} use the model's own frequencies. From there the "
        f"first stage is {stages.stage_length:,} tokens long, {growth}; {len(ends)} stages, the original length "
        f"included, reach {reach:,} tokens. Each has the scale of its end.",
        *query_sentence(spec, method, reach),
    ]
    rows = []
    for stage, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        inv_freq, attention_factor = stages.frequencies(stage)
        slowest = 2 * math.pi / float(inv_freq[spec.rotated_pairs - 1])
        scale = f"{end / ends[0]:.4g}"
        positions = f"{begin:,} to {end - 1:,}"
        rows.append([str(stage), positions, scale, f"{attention_factor:.4g}", number_name(slowest)])
    heads = ["stage", "queries at", "scale", "cos and sin times", "slowest pair, tokens"]
    return Section("Stages", sentences, heads, rows, left=(1,))


def _distances(rule: PairRule, method: DistanceMethod) -> Section:
    """Return the distances used within the target."""
    spec, reach, original = rule.spec, rule.reach, rule.spec.original_max_position_embeddings
    regions = method.regions(spec)
    # The farthest key of queries that are close enough to each other to miss nothing.
    step = regions.chunk or reach
    queries = {reach - 1, *range(step - 1, reach, step)}
    farthest = max(float(last_row(spec, method, query + 1).max()) for query in queries)
    verdict = (
        "a distance it was trained on" if farthest < original else "more than it was trained on: the rule cannot reach"
    )
    sentences = [
        f"Texts up to {regions.plain_until:,} tokens are read by the unmodified model. Frequencies are its own: what "
        f"changes is the distance by which a query and a far key are rotated apart. {method.settings(spec)}",
        f"Within {reach:,} tokens the farthest key of all counts as {farthest:,.6g} tokens away, of {original:,} "
        f"trained: {verdict}.",
        f"The distances from the last of {reach:,} tokens:",
        *query_sentence(spec, method, reach),
    ]
    used = last_row(spec, method, reach)
    changed = torch.nonzero(used != torch.arange(len(used))).flatten().tolist()
    borders = {changed[0] - 1, changed[0]} if changed and changed[0] else set()
    shown = {4**power for power in range(1, 12) if 4**power < reach} | {1, reach - 1} | borders
    rows = [[f"{distance:,}", f"{float(used[distance]):,.6g}"] for distance in sorted(shown)]
    return Section("What it does to distances", sentences, ["true distance", "used"], rows)


def used_distances(spec: RopeSpec, method: Method, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return by what distance each query and key are rotated apart, float64; nan for keys after the query.

    Args:
        spec: What the model was trained with.
        method: Any method; those that change no distances leave them as they are.
        queries, keys: Positions, int64, of shapes that broadcast.
    """
    queries, keys = torch.broadcast_tensors(queries, keys)  # type: ignore[no-untyped-call]  # torch has no types for it
    used = torch.full(queries.shape, torch.nan, dtype=torch.float64)
    if not isinstance(method, DistanceMethod):
        return torch.where(keys <= queries, (queries - keys).double(), used)
    for region in method.regions(spec).regions:
        inside = (keys >= region.begin(queries)) & (keys < region.end(queries))
        used = torch.where(inside, (region.query(queries) - region.key(keys)).double(), used)
    return used


def last_row(spec: RopeSpec, method: Method, length: int) -> torch.Tensor:
    """Return the distances used for the last token of a text, float64 ``(length,)``, by the true distance 0, 1, ..."""
    return used_distances(spec, method, torch.tensor(length - 1), torch.arange(length - 1, -1, -1))


def query_sentence(spec: RopeSpec, method: AttentionMethod, reach: int) -> list[str]:
    """Say what multiplies the queries, where something does."""
    factors = method.query_factors(spec, torch.tensor([spec.original_max_position_embeddings - 1, reach - 1]))
    if factors is None:
        return []
    return [
        f"Queries are also multiplied by a factor of their position: {float(factors[0]):.4g} at the original length, "
        f"{float(factors[1]):.4g} at {reach:,} tokens."
    ]
