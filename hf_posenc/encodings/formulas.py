"""The closed forms of positional encodings: pure functions of positions, numbers in, tensors out."""

from __future__ import annotations

import math

import torch


def sinusoidal_table(positions: torch.Tensor, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return sines in the even and cosines in the odd features, float64 ``(*positions.shape, width)``.

    Feature ``2i`` of position p is ``sin(p / base ** (2i / width))``, feature ``2i + 1`` the cosine of the same angle.

    Args:
        positions: Tokens before each, of any shape.
        width: Features, even.
        base: Of the geometric series of wavelengths.

    Raises:
        ValueError: ``width`` is odd.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    if width % 2:
        raise ValueError(f"sinusoids come in pairs of features: the width must be even, got {width}.")
    angles = positions.double()[..., None] * _sinusoidal_frequencies(width, base).to(positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def sinusoidal_shift(distance: float, width: int, base: float = 10000.0) -> torch.Tensor:
    """Return the matrix T, float64 ``(width, width)``, that takes the table's row p to row ``p + distance``, for all p.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5: "can be represented as a linear function".
    """
    shift = torch.zeros(width, width, dtype=torch.float64)
    angles = distance * _sinusoidal_frequencies(width, base)
    even = torch.arange(0, width, 2)
    shift[even, even] = shift[even + 1, even + 1] = angles.cos()
    shift[even, even + 1], shift[even + 1, even] = angles.sin(), -angles.sin()
    return shift


def _sinusoidal_frequencies(width: int, base: float) -> torch.Tensor:
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return what each head takes off a logit for a token of distance, float64 ``(num_heads,)``.

    ``2 ** (-8 (h + 1) / n)`` for n heads, a power of two. For other numbers, as the paper's code has it: those of the
    power of two below, then every other one of the power of two above.

    Reference: Press et al. 2021, arXiv:2108.12409, section 3; ``get_slopes`` of its code.

    Raises:
        ValueError: Less than one head.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}.")
    below = 2 ** (num_heads.bit_length() - 1)

    def of_power(heads: int) -> torch.Tensor:
        return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))

    return torch.cat((of_power(below), of_power(2 * below)[::2][: num_heads - below]))


def t5_buckets(
    relative: torch.Tensor, *, bidirectional: bool = False, num_buckets: int = 32, max_distance: int = 128
) -> torch.Tensor:
    """Return the bucket of each relative position, int64 of the same shape.

    Half of the buckets (of a direction) hold one distance each, the others grow by a ratio up to ``max_distance``, from
    which on all distances share the last.

    Args:
        relative: Key position minus query position, int64.
        bidirectional: Whether keys after the query have the upper half of the buckets; else they are in bucket 0.
        num_buckets: Of all.
        max_distance: In tokens.

    Reference: Raffel et al. 2019, arXiv:1910.10683, section 2.1; ``_relative_position_bucket`` of its code.
    """
    buckets = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        buckets = (relative > 0) * num_buckets
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    exact = num_buckets // 2
    # float32 and in this order, as T5 has it: where a bucket begins is a matter of rounding.
    ratio = (distance.float() / exact).log() / math.log(max_distance / exact)
    grown = exact + (ratio.clamp(min=0) * (num_buckets - exact)).long()
    return buckets + torch.where(distance < exact, distance, grown.clamp(max=num_buckets - 1))


def xpos_decay(num_pairs: int, gamma: float = 0.4) -> torch.Tensor:
    """Return each pair's decay, float64 ``(num_pairs,)``: its logits shrink by this every ``scale_base`` tokens.

    ``(2i / d + gamma) / (1 + gamma)`` of pair i: the fast pairs, first, shrink most.

    Reference: Sun et al. 2022, arXiv:2212.10554, section 3.2 and algorithm 1.
    """
    share = torch.arange(num_pairs, dtype=torch.float64) / num_pairs
    return (share + gamma) / (1 + gamma)


def rotate_real(states: torch.Tensor, angles: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Turn each pair of features by its angle, in real numbers.

    Args:
        states: ``(..., length, dim)``.
        angles: Radians, ``(..., length, dim // 2)``.
        interleaved: Pairs are features ``(2i, 2i + 1)``, as in the paper, Meta's Llama and GPT-J; else
            ``(i, i + dim / 2)``, as in GPT-NeoX and Transformers' Llama.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.4.2, equation 34.
    """
    first, second = split_pairs(states, interleaved=interleaved)
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    return join_pairs(first * cos - second * sin, second * cos + first * sin, interleaved=interleaved)


def rotate_complex(states: torch.Tensor, angles: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Turn each pair of features by its angle, as a product of complex numbers; arguments as ``rotate_real``'s.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.2.1, equation 12; Meta's Llama code.
    """
    first, second = split_pairs(states, interleaved=interleaved)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).to(_complex_of(states.dtype))
    return join_pairs(turned.real, turned.imag, interleaved=interleaved)


def split_pairs(states: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the second feature of each pair, ``(..., dim // 2)`` each."""
    if interleaved:
        return states[..., ::2], states[..., 1::2]
    first, second = states.chunk(2, dim=-1)
    return first, second


def join_pairs(first: torch.Tensor, second: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Undo ``split_pairs``."""
    return torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def rope_decay_bound(distance: torch.Tensor, num_pairs: int, base: float = 10000.0) -> torch.Tensor:
    """Return the mean over i of ``|S_i|``, float64: what the score at a distance is bounded by, up to a constant.

    ``S_i`` is the sum of ``exp(1j * distance * frequency)`` over the first i pairs.

    Args:
        distance: In tokens, of any shape.
        num_pairs: Half the rotated width of a head.
        base: ``rope_theta``.

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.4.3, equations 36 and 37.
    """
    frequencies = base ** (-torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    angles = distance.double()[..., None] * frequencies
    sums = torch.polar(torch.ones_like(angles), angles).cumsum(dim=-1)
    return sums.abs().mean(dim=-1)
