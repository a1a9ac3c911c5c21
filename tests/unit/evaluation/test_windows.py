"""Window plans against hand-written ones, and what each protocol scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_posenc.data.tokens import spread
from hf_posenc.evaluation.windows import Pass, Run, Window, plan_passes, plan_runs, sliding_windows


def test_sliding_windows_by_hand():
    assert sliding_windows(10, window=6, stride=3) == [Window(0, 6, 1), Window(3, 9, 6), Window(4, 10, 9)]
    assert sliding_windows(7, window=4, stride=1) == [
        Window(0, 4, 1),
        Window(1, 5, 4),
        Window(2, 6, 5),
        Window(3, 7, 6),
    ]
    assert sliding_windows(6, window=6, stride=2) == [Window(0, 6, 1)]
    assert sliding_windows(3, window=6, stride=5) == [Window(0, 3, 1)]


@pytest.mark.parametrize("num_tokens", [2, 3, 17, 40])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (5, 4), (8, 3), (40, 7)])
def test_every_token_but_the_first_is_scored_once_with_context(num_tokens, window, stride):
    windows = sliding_windows(num_tokens, window, stride)
    scored = [token for one in windows for token in range(one.score_from, one.end)]
    assert scored == list(range(1, num_tokens))
    assert all(one.start < one.score_from for one in windows)
    assert {one.end - one.start for one in windows} == {min(window, num_tokens)}
    assert all(one.end - one.score_from <= stride for one in windows[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 6, 6), r"from 1 to window - 1 = 5, got 6"),
        ((10, 6, 0), r"from 1 to window - 1 = 5, got 0"),
        ((10, 1, 1), r"a window needs at least 2 tokens, got 1"),
        ((1, 6, 3), r"a document needs at least 2 tokens, got 1"),
    ],
)
def test_impossible_windows(arguments, message):
    with pytest.raises(ValueError, match=message):
        sliding_windows(*arguments)


def test_what_each_protocol_scores():
    assert list(Run("truncated", 4).scored(10)) == [1, 2, 3]
    assert list(Run("last_k", 6, last_k=2).scored(10)) == [4, 5]
    assert list(Run("sliding_window", 4, stride=2).scored(6)) == [1, 2, 3, 4, 5]


def test_runs_are_sorted_unique_and_take_a_stride_that_fits():
    assert plan_runs(["truncated", "truncated"], [8, 4, 8]) == [Run("truncated", 4), Run("truncated", 8)]
    strides = [run.stride for run in plan_runs(["sliding_window"], [2, 64, 256, 512])]
    assert strides == [1, 32, 128, 256]
    assert [run.stride for run in plan_runs(["sliding_window"], [64, 512], stride=10)] == [10, 10]


@pytest.mark.parametrize(
    ("protocols", "lengths", "options", "message"),
    [
        (["truncated"], [], {}, "one or more numbers of tokens"),
        (["truncated"], [1, 8], {}, r"each at least 2, got \[1, 8\]"),
        (["trunkated"], [8], {}, "unknown protocol 'trunkated'. Did you mean 'truncated'"),
        ([], [8], {}, "protocol is empty"),
        (["last_k"], [256, 512], {}, "less than the shortest context length, got 256 and 256"),
        (["last_k"], [8], {"last_k": 0}, "at least 1"),
        (["sliding_window"], [8, 512], {"stride": 100}, "window - 1 = 7, got 100"),
    ],
)
def test_bad_plans(protocols, lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_runs(protocols, lengths, **options)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (16, r"a list of numbers of tokens, such as \[512, 2048\], got 16"),
        ("16", "a list of numbers of tokens"),
        ([8, 16.5], "whole numbers of tokens, got 16.5"),
        (["16"], "whole numbers of tokens, got '16'"),
    ],
)
def test_lengths_are_a_list_of_whole_numbers(lengths, message):
    with pytest.raises(TypeError, match=message):
        plan_runs(["truncated"], lengths)


def test_lengths_may_come_from_numpy_or_torch():
    expected = [Run("truncated", 4), Run("truncated", 8)]
    assert plan_runs(["truncated"], np.array([8, 4])) == plan_runs(["truncated"], torch.tensor([8, 4])) == expected


def test_one_pass_serves_all_lengths_of_a_causal_model_only():
    runs = plan_runs(["truncated", "last_k", "sliding_window"], [4, 8], stride=2, last_k=3)
    truncated, last_k, sliding = runs[:2], runs[2:4], runs[4:]
    assert plan_passes(runs, causal_in_position=True) == [
        Pass((*truncated, *last_k)),
        Pass((sliding[0],)),
        Pass((sliding[1],)),
    ]
    separate = plan_passes(runs, causal_in_position=False)
    assert separate[:2] == [Pass((truncated[0], last_k[0])), Pass((truncated[1], last_k[1]))]
    assert [one.windows(20) for one in separate[:2]] == [[Window(0, 4, 1)], [Window(0, 8, 1)]]
    (portion,) = Pass((sliding[0],)).portions([6])
    assert portion.num_tokens_fed == 8  # [0, 4) and [2, 6)


def test_spread_takes_evenly():
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(3), 5) == [0, 1, 2]
    assert spread(range(3), None) == [0, 1, 2]
