"""Positions of training blocks against the definitions they come from, and masks against pairs counted one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import masking_utils

from hf_posenc.training import FinetuneConfig
from hf_posenc.training.masks import find_documents
from hf_posenc.training.positions import (
    PositionSchedule,
    cream_positions,
    pose_positions,
    random_positions,
)
from hf_posenc.training.run_plan import StagePlan
from tiny_llama import make_tiny_llama
from training_plans import plan_for


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pairs(positions: torch.Tensor) -> set[int]:
    return {int(later - earlier) for i, later in enumerate(positions) for earlier in positions[:i]}


@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_pose_positions_rise_below_the_target_in_so_many_chunks(length: int, chunks: int):
    longest_first = 0
    draw = generator()
    for _ in range(300):
        positions = pose_positions(length, 40, chunks, draw)
        steps = positions.diff()
        assert positions.shape == (length,)
        assert positions[0] == 0
        assert positions[-1] < 40
        assert bool((steps >= 1).all())
        assert int((steps > 1).sum()) <= min(chunks, length) - 1
        gaps = (steps > 1).nonzero()
        longest_first = max(longest_first, int(gaps[0]) + 1 if len(gaps) else 0)
    if chunks == 2 and length > 1:
        assert longest_first == (length + 1) // 2  # the authors' randint(1, (len_chunk+1)//2)


def test_pose_draws_border_and_bias_alike_likely():
    borders, biases, draws = [0] * 8, [0] * 10, 4000
    draw = generator()
    for _ in range(draws):
        positions = pose_positions(8, 17, 2, draw)
        biases[int(positions[-1]) - 7] += 1  # 0 to 17 - 8
        gap = (positions.diff() > 1).nonzero()
        borders[int(gap[0]) + 1 if len(gap) else 0] += 1
    assert all(abs(count - draws / 10) < 5 * (draws / 10) ** 0.5 for count in biases)
    assert borders[0] == biases[0]
    expected = draws * 9 / 10 / 4  # a bias above nothing, and four borders
    assert borders[5:] == [0, 0, 0]
    assert all(abs(count - expected) < 5 * expected**0.5 for count in borders[1:5])


def test_the_bias_of_a_chunk_is_at_least_that_of_the_one_before_and_then_alike_likely():
    counts: dict[tuple[int, int], int] = {}
    draw, draws = generator(), 2000
    for _ in range(draws):
        positions = pose_positions(3, 6, 3, draw)  # a token each: biases are all that is drawn
        found = (int(positions[1]) - 1, int(positions[2]) - 2)
        counts[found] = counts.get(found, 0) + 1
    for first in range(4):  # paper: u_i ~ U(u_{i-1}, target - length), target - length is 3
        for second in range(first, 4):
            expected = draws / 4 / (4 - first)
            assert abs(counts[first, second] - expected) < 5 * expected**0.5
    assert sum(counts.values()) == draws
    assert len(counts) == 10


@pytest.mark.parametrize("kind", ["pose", "random"])
def test_every_distance_below_the_target_comes(kind: str):
    schedule = PositionSchedule(kind, 8, 32, seed=3)
    seen: set[int] = set()
    for index in range(600):
        seen |= pairs(schedule.of(index, [8]))
    assert seen == set(range(1, 32))


def test_random_positions_are_sorted_different_and_alike_likely():
    counts = torch.zeros(12)
    draw, draws = generator(), 2000
    for _ in range(draws):
        positions = random_positions(4, 12, draw)
        assert bool((positions.diff() >= 1).all())
        counts[positions] += 1
    assert counts[0] == draws
    assert bool(((counts[1:] - draws * 3 / 11).abs() < 5 * (draws * 3 / 11) ** 0.5).all())


def test_each_document_of_a_block_is_drawn_on_its_own():
    positions = PositionSchedule("pose", 64, 256, seed=1).of(5, [30, 1, 33])
    starts = (positions == 0).nonzero()[:, 0].tolist()
    assert starts == [0, 30, 31]
    first, last = positions[:30], positions[31:]
    assert int((first.diff() > 1).sum()) == int((last.diff() > 1).sum()) == 1
    assert first[-1] - 29 != last[-1] - 32  # another bias


def test_draws_belong_to_the_seed_and_the_place_in_the_order():
    drawn = {
        (seed, index): tuple(PositionSchedule("pose", 64, 4096, seed=seed).of(index, [64]).tolist())
        for seed in (0, 1)
        for index in range(50)
    }
    assert len(set(drawn.values())) > 95  # of 32 borders x 4033 biases, two may be the same
    for (seed, index), positions in reversed(drawn.items()):  # in another order, as another process would
        assert tuple(PositionSchedule("pose", 64, 4096, seed=seed).of(index, [64]).tolist()) == positions


@pytest.mark.parametrize("kind", ["full", "pose", "cream", "random"])
def test_the_short_share_of_the_blocks_is_read_in_plain_windows_and_spread_evenly(kind: str):
    schedule = PositionSchedule(kind, 8, 64, short_share=0.3)
    short = [schedule.is_short(index) for index in range(1000)]
    assert all(sum(short[start : start + 10]) in (2, 3, 4) for start in range(990))
    assert sum(short) == 300
    index = short.index(True)
    assert schedule.of(index, [19, 5], short=True).tolist() == [*range(8), *range(8), *range(3), *range(5)]
    assert PositionSchedule(kind, 8, 64).is_short(index) is False
    assert PositionSchedule(kind, 8, 64, short_share=1.0).is_short(0) is True


def test_documents_begin_where_positions_fall_and_not_where_they_skip():
    rows = [[0, 1, 7, 8, 0, 0, 3], [0, 1, 2, 3, 4, 5, 6]]
    found = find_documents(torch.tensor(rows), skips_matter=False)
    assert found is not None
    for row, numbers in zip(rows, found.tolist(), strict=True):
        for i in range(7):
            for j in range(i):
                same = all(row[k] > row[k - 1] for k in range(j + 1, i + 1))
                assert (numbers[i] == numbers[j]) == same
    skipping = torch.tensor([[0, 1, 7, 8]])
    assert find_documents(skipping, skips_matter=False) is None  # plainly causal
    assert find_documents(skipping, skips_matter=True) is not None  # a window has to know the positions
    assert find_documents(torch.arange(5)[None], skips_matter=True) is None


def test_without_skips_documents_are_found_as_transformers_finds_them():
    draw = generator()
    for _ in range(50):
        lengths = torch.randint(1, 6, (4,), generator=draw).tolist()
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        expected = masking_utils.find_packed_sequence_indices(positions)
        assert torch.equal(find_documents(positions, skips_matter=False), expected)


def stage_of(method: str = "yarn", factor: float = 4.0, **settings: Any) -> StagePlan:
    (stage,) = plan_for(FinetuneConfig("out", method=method, factor=factor, **settings), make_tiny_llama()).stages
    return stage


def test_blocks_are_of_the_original_length_where_positions_skip():
    for kind, expected in (("full", 256), ("pose", 64), ("random", 64)):
        stage = stage_of(position_schedule=kind)
        assert (stage.positions.original_length, stage.positions.target_length) == (64, 256)
        assert stage.seq_len == expected
        assert stage_of(position_schedule=kind, seq_len=96).seq_len == 96


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 257}, "seq_len 257 is longer than the target length, 256 tokens"),
        ({"position_schedule": "pose", "seq_len": 256}, "nothing to skip in blocks of seq_len 256, the target length"),
        ({"position_schedule": "random", "factor": 1.0}, "the target is 64 tokens and the model was trained on 64"),
        ({"position_schedule": "pose", "pose_chunks": 65}, "pose_chunks must be at most seq_len, 64 tokens, got 65"),
        ({"position_schedule": "pose", "method": "dca"}, "'pose' skips positions, and 'dca' counts distances in tok"),
        ({"position_schedule": "random", "method": "rerope"}, "'random' skips positions, and 'rerope' counts dist"),
    ],
)
def test_schedules_that_do_not_suit_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        stage_of(**settings)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("target", [100, 256, 1000])
def test_cream_positions_are_a_head_a_middle_and_a_tail_at_the_end_of_the_target(length: int, target: int):
    draw, heads = generator(), set()
    for _ in range(200):
        positions = cream_positions(length, target, 64, draw)
        steps = positions.diff()
        assert positions.shape == (length,)
        assert positions[0] == 0
        assert bool((steps >= 1).all())
        assert positions[-1] == (target - 1 if length > 2 else length - 1)
        borders = (steps > 1).nonzero().flatten() + 1
        assert len(borders) <= 2
        if len(borders) == 2:
            heads.add((int(borders[0]), length - int(borders[1])))
    few = min(max(1, 4 * target // 64), length // 3)  # as in the authors' code: 4 * factor, or a third
    assert heads <= {(few, few), (length // 3, length // 3)}
    if length > 30 and target > length:
        assert heads == {(few, few), (length // 3, length // 3)}
    if length == target:
        assert torch.equal(positions, torch.arange(length))


def test_the_middle_of_cream_is_drawn_by_a_truncated_gaussian():
    """Of factor 8, as the code has it: 9 +- 3 half lengths, cut at 2 and 16, then alike likely in what that allows."""
    length, target, end, draws = 96, 768, 32, 4000
    draw, reference = generator(), random.Random(0)
    found = []
    while len(found) < draws:
        positions = cream_positions(length, target, 12, draw)  # 4 x 768 / 12 is more than a third: always thirds
        assert positions[:end].tolist() == list(range(end))
        found.append(int(positions[end]))
    expected = []
    while len(expected) < draws:
        halves = reference.gauss(9, 3)
        if 2 <= halves <= 16:
            low, high = end + (length - 2 * end - 1) * halves / 2, halves / 2 * length - end - 1
            expected.append(int(reference.uniform(low, high)) - (length - 2 * end - 1))
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        ours, theirs = sorted(found)[int(share * draws)], sorted(expected)[int(share * draws)]
        assert abs(ours - theirs) < 0.04 * target, share
    assert min(found) >= end
    assert max(found) <= target - end - (length - 2 * end)
