"""The closed forms: one pure function per rule, in float64, numbers in and ``inv_freq``, ``attention_factor`` out.

Every function takes ``(spec, scaling, seq_len)`` and returns ``inv_freq``, float64 ``(num_pairs,)``, radians per token,
fastest pair first, 0 for pairs that never turn, and ``attention_factor``, which multiplies cos and sin. They are the
reference that live modules are verified against; the values a model runs with are made by Transformers itself, in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hf_posenc.spec import ENCODINGS, RopeScaling, RopeSpec

Frequencies = tuple[torch.Tensor, float]
Formula = Callable[[RopeSpec, RopeScaling, int | None], Frequencies]
# The divisor of a pair that a rule stops: float32 makes it infinite, and so the frequency exactly 0.
STOPPED = 1e200


def _geometric(spec: RopeSpec, rope_theta: float) -> torch.Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
    inv_freq = torch.exp(-math.log(rope_theta) * exponents)
    inv_freq[spec.turning_pairs :] = 0.0
    return inv_freq


def ntk_theta(spec: RopeSpec, factor: float) -> float:
    """Return the base that stretches the slowest pair that turns by exactly ``factor`` and the fastest by 1."""
    if spec.turning_pairs < 2:
        raise ValueError("NTK scaling needs at least two pairs of features that turn (rotary_dim >= 4).")
    return spec.rope_theta * math.pow(factor, spec.rotary_dim / (2 * (spec.turning_pairs - 1)))


def plain_frequencies(spec: RopeSpec, scaling: RopeScaling | None = None, seq_len: int | None = None) -> Frequencies:
    """Return ``rope_theta ** (-2i / rotary_dim)`` for pair i: no scaling (Su et al. 2021, arXiv:2104.09864)."""
    return _geometric(spec, spec.rope_theta), 1.0


def linear_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Divide every frequency by ``factor``: position interpolation.

    Reference: Chen et al. 2023, arXiv:2306.15595, section 2.3.
    """
    return plain_frequencies(spec)[0] / scaling.factor, 1.0


def ntk_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Raise the base so that the slowest pair is interpolated by ``factor`` and the fastest is kept.

    Reference: bloc97 2023 ("NTK-aware scaled RoPE"), as given in arXiv:2309.00071, section 3.1.
    """
    return _geometric(spec, ntk_theta(spec, scaling.factor)), 1.0


def dynamic_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Transformers' dynamic NTK: one base for the whole forward, chosen from its length.

    Args:
        spec: The model's rotary embedding.
        scaling: ``factor`` enters as Transformers has it; 1 gives the formula of the YaRN paper's appendix.
        seq_len: Tokens of this forward; up to the original length, and for None, nothing is scaled.

    Reference: emozilla 2023, arXiv:2309.00071, section 3.3; Transformers' ``_compute_dynamic_ntk_parameters``.
    """
    original = spec.original_max_position_embeddings
    length = max(seq_len or original, original)
    stretch = scaling.factor * length / original - (scaling.factor - 1)
    if spec.rotary_dim <= 2:
        raise ValueError("NTK scaling needs at least two pairs of features that turn (rotary_dim >= 4).")
    # Of an odd rotary_dim this is not quite ntk_theta.
    theta = spec.rope_theta * math.pow(stretch, spec.rotary_dim / (spec.rotary_dim - 2))
    return _geometric(spec, theta), 1.0


def abf_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Use a given, larger base (adjusted base frequency).

    Raises:
        ValueError: ``rope_theta`` is missing or not larger than the model's.

    Reference: Xiong et al. 2023, arXiv:2309.16039, section 2.1.
    """
    if scaling.rope_theta is None:
        raise ValueError("method 'abf' needs the new base: rope_theta=500000, for example.")
    if scaling.rope_theta <= spec.rope_theta:
        raise ValueError(
            f"rope_theta must be larger than the model's {spec.rope_theta:g} to slow the pairs down, "
            f"got {scaling.rope_theta:g}."
        )
    return _geometric(spec, scaling.rope_theta), 1.0


def by_parts_frequencies(spec: RopeSpec, factor: float, slow: float, fast: float) -> torch.Tensor:
    """Keep pairs of at least ``fast`` turns, divide pairs of at most ``slow``, blend linearly in turns between."""
    plain = plain_frequencies(spec)[0]
    turns = spec.original_max_position_embeddings * plain / (2 * math.pi)
    keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / factor


def ntk_by_parts_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Keep the pairs that turn often, stretch the ones that hardly turn, blend by the number of turns.

    The paper's ramp, without a temperature. ``beta_slow`` and ``beta_fast`` are its alpha and beta.

    Reference: Peng et al. 2023, arXiv:2309.00071, section 3.2, equations 17 to 20.
    """
    return by_parts_frequencies(spec, scaling.factor, scaling.beta_slow, scaling.beta_fast), 1.0


def llama3_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Llama 3.1's rule: ``ntk_by_parts`` between ``low_freq_factor`` and ``high_freq_factor`` turns.

    Reference: Llama Team 2024, arXiv:2407.21783, section 3.4.2; Transformers' ``_compute_llama3_parameters``.
    """
    return by_parts_frequencies(spec, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor), 1.0


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Return what multiplies cos and sin: given, DeepSeek's quotient, or ``0.1 ln(factor) + 1``.

    Reference: arXiv:2309.00071, section 3.4, equation 22; DeepSeek-V2, arXiv:2405.04434, for the quotient.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_ramp(spec: RopeSpec, scaling: RopeScaling) -> torch.Tensor:
    """Return the share of interpolation per pair, 0 (keep) to 1 (divide), linear in the pair's index."""
    original = spec.original_max_position_embeddings

    def index_of(turns: float) -> float:
        wanted = original / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(wanted) / (2 * math.log(spec.rope_theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # as the reference code does, to divide by something
    pairs = torch.arange(spec.num_pairs, dtype=torch.float64)
    return ((pairs - low) / (high - low)).clamp(0, 1)


def yarn_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Keep the pairs that turn often, stretch the ones that hardly turn, blend between, and sharpen attention.

    A pair making at least ``beta_fast`` turns over the original context keeps its frequency; one making at most
    ``beta_slow`` has it divided by ``factor``. Three published curves differ in between (``ramp``): the authors' code,
    the paper's text, and PoSE's, which blends wavelengths.

    Args:
        spec: ``rotary_dim`` in features, ``rope_theta``, ``original_max_position_embeddings`` in tokens.
        scaling: ``factor`` >= 1; ``beta_fast``, ``beta_slow`` in turns; ``attention_factor``, None for the paper's.
        seq_len: Ignored; YaRN does not depend on the current length.

    Reference: Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4, equation 22; Zhu et al. 2023,
    arXiv:2309.10400 (PoSE), for the harmonic blend.
    """
    plain = plain_frequencies(spec)[0]
    if scaling.ramp == "paper":
        scaled = by_parts_frequencies(spec, scaling.factor, scaling.beta_slow, scaling.beta_fast)
    else:
        share = yarn_ramp(spec, scaling)
        if scaling.ramp == "code":
            scaled = plain / scaling.factor * share + plain * (1 - share)
        else:
            scaled = plain / (share * scaling.factor + (1 - share))
    return scaled, yarn_attention_factor(scaling)


def longrope_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Divide each frequency by a number of its own: ``long_factor`` past the original length, else ``short_factor``.

    Args:
        spec: The model's rotary embedding.
        scaling: The lists; ``short_factor`` None for all ones; ``attention_factor`` None for
            ``sqrt(1 + ln(factor) / ln(original))``.
        seq_len: Tokens of this forward; None for the short list.

    Raises:
        ValueError: ``long_factor`` is missing, or a list is not one number per pair that turns.

    Reference: Ding et al. 2024, arXiv:2402.13753, section 3; Transformers' ``_compute_longrope_parameters``.
    """
    num_pairs, original = spec.turning_pairs, spec.original_max_position_embeddings
    if scaling.long_factor is None:
        raise ValueError(f"method 'longrope' needs long_factor, a list of {num_pairs} numbers (one per pair).")
    short_factor = scaling.short_factor or (1.0,) * num_pairs
    for name, factors in (("long_factor", scaling.long_factor), ("short_factor", short_factor)):
        if len(factors) != num_pairs:
            raise ValueError(f"{name} must hold {num_pairs} numbers (one per pair of features), got {len(factors)}.")
    factors = scaling.long_factor if (seq_len or 0) > original else short_factor
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    divisors = torch.tensor((*factors, *(1.0,) * spec.still_pairs), dtype=torch.float64)
    return torch.where(divisors < STOPPED, plain_frequencies(spec)[0] / divisors, 0.0), attention_factor


def nope_frequencies(spec: RopeSpec, scaling: RopeScaling, seq_len: int | None = None) -> Frequencies:
    """Stop every pair: no position is told, and only the causal mask says what came before.

    Args:
        spec: The model's rotary embedding.
        scaling: ``attention_factor`` sharpens attention; None for 1, no temperature.
        seq_len: Ignored.

    Reference: Gelberg et al. 2025 (DroPE), arXiv:2512.12167: after a recalibration on short texts.
    """
    factor = 1.0 if scaling.attention_factor is None else scaling.attention_factor
    return torch.zeros(spec.num_pairs, dtype=torch.float64), factor


# By the name of the method. Rules that change distances leave frequencies alone; an encoding that takes the place of
# RoPE stops them all.
FORMULAS: dict[str, Formula] = {
    "linear": linear_frequencies,
    "ntk": ntk_frequencies,
    "ntk_by_parts": ntk_by_parts_frequencies,
    "dynamic": dynamic_frequencies,
    "dynamic_yarn": yarn_frequencies,
    "yarn": yarn_frequencies,
    "llama3": llama3_frequencies,
    "longrope": longrope_frequencies,
    "abf": abf_frequencies,
    "nope": nope_frequencies,
    **dict.fromkeys(("self_extend", "dca", "rerope", "leaky_rerope"), plain_frequencies),
    **dict.fromkeys(ENCODINGS, nope_frequencies),
}
