"""What positional encodings promise, against Transformers' own code and float64 by hand, never against ourselves."""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotation
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotation
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.methods.encodings.alibi import alibi_slopes
from hf_posenc.methods.encodings.rope import rope_decay_bound, rotate_complex, rotate_real
from hf_posenc.methods.encodings.sinusoidal import sinusoidal_shift, sinusoidal_table
from hf_posenc.methods.encodings.t5_bias import t5_buckets
from hf_posenc.methods.encodings.xpos import xpos_decay

Rotation = Callable[..., torch.Tensor]


def frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
    return torch.tensor([base ** (-2 * pair / dim) for pair in range(dim // 2)], dtype=torch.float64)


def angles_at(positions: torch.Tensor, dim: int) -> torch.Tensor:
    return positions.double()[:, None] * frequencies(dim)


def pairs_by_hand(states: torch.Tensor, interleaved: bool) -> list[complex]:
    values, half = states.tolist(), len(states) // 2
    if interleaved:
        return [complex(values[2 * i], values[2 * i + 1]) for i in range(half)]
    return [complex(values[i], values[i + half]) for i in range(half)]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotate", [rotate_real, rotate_complex])
def test_the_score_of_rope_depends_on_the_distance_only(rotate: Rotation, interleaved: bool) -> None:
    dim = 10
    query, key = torch.randn(2, dim, dtype=torch.float64)
    for distance in (0, 1, 7, 300):
        begins = torch.tensor([0, 1, 13, 4096])
        rotated_keys = rotate(key.expand(4, dim), angles_at(begins, dim), interleaved=interleaved)
        rotated = rotate(query.expand(4, dim), angles_at(begins + distance, dim), interleaved=interleaved)
        both = zip(pairs_by_hand(query, interleaved), pairs_by_hand(key, interleaved), frequencies(dim), strict=True)
        expected = sum((q * k.conjugate() * cmath.exp(1j * distance * f.item())).real for q, k, f in both)
        assert (rotated * rotated_keys).sum(-1).tolist() == pytest.approx([expected] * 4, abs=1e-9)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotate", [rotate_real, rotate_complex])
def test_rotation_keeps_norms_and_undoes_itself(rotate: Rotation, interleaved: bool) -> None:
    states, angles = torch.randn(50, 12, dtype=torch.float64), angles_at(torch.arange(50) * 97, 12)
    rotated = rotate(states, angles, interleaved=interleaved)
    assert (rotated - states)[1:].abs().amax(-1).min() > 1e-2  # it does rotate
    torch.testing.assert_close(rotated.norm(dim=-1), states.norm(dim=-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(rotate(rotated, -angles, interleaved=interleaved), states, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_complex_and_real_rotation_agree(interleaved: bool, dtype: torch.dtype, tolerance: float) -> None:
    states, angles = torch.rand(2, 3, 40, 16, dtype=dtype) * 2 - 1, angles_at(torch.arange(40) * 101, 16)
    real, rotated = (rotate(states, angles, interleaved=interleaved) for rotate in (rotate_real, rotate_complex))
    assert real.dtype == rotated.dtype == dtype
    torch.testing.assert_close(rotated, real, rtol=0, atol=tolerance)


@pytest.mark.parametrize("rotate", [rotate_real, rotate_complex])
def test_interleaved_is_gptjs_rotation_and_half_split_is_llamas(rotate: Rotation) -> None:
    states, angles = torch.randn(2, 9, 3, 16, dtype=torch.float64), angles_at(torch.arange(9) * 31, 16)
    whole = torch.cat((angles, angles), dim=-1).expand(2, 9, 16)
    gptj = gptj_rotation(states, angles.sin().expand(2, 9, 8), angles.cos().expand(2, 9, 8))
    llama, _ = llama_rotation(states.transpose(1, 2), states.transpose(1, 2), whole.cos(), whole.sin())
    ours = states.transpose(1, 2)  # (batch, heads, length, dim)
    torch.testing.assert_close(rotate(ours, angles, interleaved=True), gptj.transpose(1, 2), rtol=0, atol=1e-12)
    torch.testing.assert_close(rotate(ours, angles, interleaved=False), llama, rtol=0, atol=1e-12)
    assert (gptj.transpose(1, 2) - llama).abs().max() > 0.1  # the layouts are not the same


def test_the_decay_bound_is_the_papers_sum() -> None:
    for distance, num_pairs, base in ((0, 4, 1e4), (1, 64, 1e4), (37, 64, 1e4), (250, 64, 1e4), (4096, 32, 5e5)):
        sums, running = [], 0j
        for pair in range(num_pairs):
            running += cmath.exp(1j * distance * base ** (-2 * pair / (2 * num_pairs)))
            sums.append(abs(running))
        ours = rope_decay_bound(torch.tensor(distance), num_pairs, base).item()
        assert ours == pytest.approx(sum(sums) / num_pairs, rel=1e-12)


def scores_by_llama(query: torch.Tensor, key: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """The scores, by Transformers' code, of a query at each of the distances with a key at position 0."""
    whole = torch.cat((angles_at(distances, len(query)),) * 2, dim=-1)[None]
    rotated, _ = llama_rotation(query.expand(1, 1, len(distances), -1), query, whole.cos(), whole.sin())
    return rotated[0, 0] @ key


def test_scores_stay_below_the_decay_bound_and_reach_it() -> None:
    """Abel: ``|score| <= max |h_(i+1) - h_i| * sum |S_i|``, h_i the product of pair i of query and key, the last 0."""
    dim, distances = 128, torch.cat((torch.arange(0, 512), torch.arange(512, 20000, 97)))
    bound = rope_decay_bound(distances, dim // 2) * (dim // 2)
    for _ in range(100):
        query, key = torch.randn(2, dim, dtype=torch.float64)
        pairs = zip(pairs_by_hand(query, False), pairs_by_hand(key, False), strict=True)
        products = torch.tensor([*(q * k.conjugate() for q, k in pairs), 0])
        assert (scores_by_llama(query, key, distances).abs() <= products.diff().abs().max() * bound).all()
    # Products whose steps are all of length 1 and against the sums of one distance: there the bound is the score.
    for place in (3, 100, 400, 600):
        waves = [cmath.exp(1j * distances[place].item() * f) for f in frequencies(dim).tolist()]
        steps = [-(s.conjugate() / abs(s)) for s in itertools.accumulate(waves)]
        products = torch.tensor([-sum(steps[pair:]) for pair in range(dim // 2)], dtype=torch.complex128)
        query = torch.cat((products.real, products.imag))
        key = torch.cat((torch.ones(dim // 2), torch.zeros(dim // 2))).double()
        score = scores_by_llama(query, key, distances[place : place + 1]).item()
        assert score == pytest.approx(bound[place].item(), rel=1e-9)


def test_the_bound_and_the_score_of_equal_vectors_fall_on_average() -> None:
    octaves = [torch.arange(2**power, 2 ** (power + 1)) for power in range(13)]  # 1 to 8191
    bounds = [rope_decay_bound(octave, 64).mean().item() for octave in octaves]
    scores = [torch.cos(angles_at(octave, 128)).mean().item() for octave in octaves]
    for falling in (bounds, scores):
        assert all(later < earlier for earlier, later in itertools.pairwise(falling))
    assert bounds[-1] < bounds[0] / 4
    assert rope_decay_bound(torch.tensor(0), 64).item() == pytest.approx(sum(range(1, 65)) / 64)  # all in phase


@pytest.mark.parametrize("dim", [8, 64, 80])
def test_xpos_decay_is_torchscales_buffer(dim: int) -> None:
    scale = [(at + 0.4 * dim) / (1.4 * dim) for at in range(0, dim, 2)]
    assert xpos_decay(dim // 2).tolist() == pytest.approx(scale, rel=1e-14)
    assert 0.28 < xpos_decay(dim // 2)[0] < 0.29  # the fast pair, first, shrinks most


def test_alibi_is_blooms_and_mpts_for_any_number_of_heads() -> None:
    length = 6
    ones = torch.ones(1, length, dtype=torch.int64)
    for heads in range(1, 130):
        bias = -alibi_slopes(heads)[:, None, None] * torch.arange(length - 1, -1, -1)  # of the last query
        bloom = build_alibi_tensor(ones, heads, torch.float32).double()
        mpt = build_mpt_alibi_tensor(heads, length).double()
        torch.testing.assert_close(bias, bloom - bloom[..., -1:], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(bias, mpt, rtol=1e-6, atol=0)


def test_alibi_looks_no_further_in_a_longer_text() -> None:
    slope = alibi_slopes(8)[3].item()
    window = math.ceil(math.log(100) / slope)
    for length in (400, 4000):
        mpt = build_mpt_alibi_tensor(8, length)[3, 0].double()
        weights = torch.softmax(mpt, dim=-1)  # of equal scores
        assert weights[-window:].sum().item() == pytest.approx(0.99, abs=2e-3)


@pytest.mark.parametrize(("width", "base"), [(2, 1e4), (16, 1e4), (50, 500.0)])
def test_sinusoids_are_the_papers_and_shift_by_a_rotation(width: int, base: float) -> None:
    def by_hand(position: float) -> list[float]:
        angles = [position / base ** (2 * pair / width) for pair in range(width // 2)]
        return [value for angle in angles for value in (math.sin(angle), math.cos(angle))]

    table = sinusoidal_table(torch.tensor([[0, 1], [77, 4000]]), width, base)
    assert table.shape == (2, 2, width)
    expected = [value for position in (0, 1, 77, 4000) for value in by_hand(position)]
    assert table.flatten().tolist() == pytest.approx(expected, abs=1e-11)
    for distance in (1, -3, 512):
        shift = sinusoidal_shift(distance, width, base)
        for position in (0, 5, 1000):
            row = torch.tensor(by_hand(position), dtype=torch.float64)
            assert (shift @ row).tolist() == pytest.approx(by_hand(position + distance), abs=1e-11)
        torch.testing.assert_close(shift @ shift.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-14)
        assert torch.linalg.det(shift).item() == pytest.approx(1.0)  # a rotation, no reflection


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (64, 128), (32, 20000), (8, 20)])
def test_t5_buckets_are_t5s_own(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    relative = torch.arange(-30000, 30001)
    expected = T5Attention._relative_position_bucket(relative, bidirectional, num_buckets, max_distance)
    ours = t5_buckets(relative, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
    assert torch.equal(ours, expected)
    # The nearest keys have a bucket each, and so a number of their own.
    near = num_buckets // (4 if bidirectional else 2)
    assert t5_buckets(-torch.arange(near), bidirectional=bidirectional, num_buckets=num_buckets).tolist() == list(
        range(near)
    )
