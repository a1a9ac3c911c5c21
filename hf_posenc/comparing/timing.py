"""The time of a pass by its length: short passes are timed, and the law by which they grow gives the rest."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc.comparing.candidates import STATIC, Candidate
from hf_posenc.evaluation.losses import evaluation_mode, window_losses
from hf_posenc.evaluation.memory import shape_of
from hf_posenc.evaluation.rows import extended_as
from hf_posenc.evaluation.windows import Window
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.retrieving.scoring import Asked, replies

_LONG_ENOUGH = 1.0  # seconds of the shorter timed pass: above the noise, and attention has begun to show
_SHORTEST = 64
_DECODED = 8


@dataclass(frozen=True)
class Cost:
    """The cost of a pass over n tokens, in seconds or operations: ``linear * n + quadratic * n ** 2``."""

    linear: float
    quadratic: float

    def of(self, num_tokens: int) -> float:
        """Return the cost of a pass over so many tokens."""
        return self.linear * num_tokens + self.quadratic * num_tokens**2


def work_of(model: PreTrainedModel) -> Cost:
    """Return the floating-point operations of a model's forward, from its config and the sizes of its weights.

    Two a weight and token, the head on every token included, the embedding's look-up not. Attention: two for each
    feature of a score and two for each of a value, over half of all pairs of tokens. Of a mixture of experts all
    weights are counted, and every layer as one that reads everything; ``fit`` needs the ratio as a bound only.
    """
    base, shape = RotaryModel(model).model, shape_of(model)
    weights = base.num_parameters(exclude_embeddings=True)
    head = shape.vocab_size * shape.hidden_size
    output: Any = base.get_output_embeddings()  # type: ignore[no-untyped-call]  # Transformers leaves it untyped
    tied = output is None or output.weight is base.get_input_embeddings().weight  # a head of its own is in `weights`
    return Cost(2.0 * (weights + head * tied), 2.0 * shape.num_heads * shape.head_dim * shape.num_layers)


def fit(work: Cost, short: tuple[int, float], long: tuple[int, float]) -> Cost:
    """Return the seconds of a pass by its length, through two timed passes, each (tokens, seconds).

    Attention does not run faster, by the operation, than products with weights. Where two passes say so all the same,
    what was timed is the cost of starting operations, and the longer pass is taken to have run both at one speed.
    """
    (n1, t1), (n2, t2) = short, long
    quadratic = (t2 / n2 - t1 / n1) / (n2 - n1)
    linear = t1 / n1 - quadratic * n1
    if linear < 0:  # the longer one ran out of a cache, or was disturbed
        return Cost(0.0, t2 / n2**2)
    if quadratic * work.linear < linear * work.quadratic:
        speed = t2 / work.of(n2)
        return Cost(speed * work.linear, speed * work.quadratic)
    return Cost(linear, quadratic)


@dataclass(frozen=True)
class Timings:
    """The measured times: the cost of each row, and of one token written by the unpatched model.

    ``lengths`` are the tokens of the two timed passes.
    """

    costs: dict[str, Cost]
    lengths: tuple[int, int]
    decode_step: float


@torch.no_grad()
def time_candidates(
    model: PreTrainedModel, candidates: Sequence[Candidate], ids: torch.Tensor, target: int, original: int
) -> Timings:
    """Time short passes of each kind of candidate.

    A static rule costs what the unpatched model does. One that runs in attention is timed at a smaller scale: with
    an original length as much shorter as the pass is, it goes through as many stages or chunks as it will later.

    Args:
        model: The loaded model.
        candidates: From ``find_candidates``.
        ids: int64 ``(num_tokens,)``, of a text; what it says does not matter.
        target: The length to come, in tokens.
        original: The original length, in tokens.
    """
    work = work_of(model)
    with evaluation_mode(model):
        n1 = min(_SHORTEST, target // 2)
        _score(model, ids[:n1])  # the first one warms up
        while (t1 := _time_pass(model, ids[:n1])) < _LONG_ENOUGH and 4 * n1 <= target:
            n1 *= 2
        n2 = 2 * n1
        t2 = _time_pass(model, ids[:n2])
        costs = {}
        for one in candidates:
            if one.kind > STATIC:
                times = [(n, _time_smaller(model, one, ids[:n], target, original)) for n in (n1, n2)]
                costs[one.name] = fit(work, *times)
        # Again at the end: most rows hang on it, and something else may have run meanwhile.
        plain = fit(work, *((n, min(t, _time_pass(model, ids[:n]))) for n, t in ((n1, t1), (n2, t2))))
        costs |= {candidate.name: plain for candidate in candidates if candidate.kind <= STATIC}
        step = _decode_step(model, ids[:n1])
    return Timings(costs, (n1, n2), step)


def _time_pass(model: PreTrainedModel, ids: torch.Tensor) -> float:
    return _time(partial(_score, model, ids))


def _score(model: PreTrainedModel, ids: torch.Tensor) -> None:
    window_losses(model, ids, [Window(0, len(ids), 1)], torch.ones(len(ids), dtype=torch.bool))


def _time(run: Callable[[], object]) -> float:
    """Return the least seconds of three runs, or of fewer that take long: what else the machine does only adds."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < 2 * _LONG_ENOUGH:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _time_smaller(model: PreTrainedModel, one: Candidate, ids: torch.Tensor, target: int, original: int) -> float:
    small = {"original_max_position_embeddings": max(round(original * len(ids) / target), 8)}
    row = {**(one.row or {}), **small, "context_length": len(ids), "sliding_window": "keep"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with extended_as(model, row):
            return _time_pass(model, ids)


def _decode_step(model: PreTrainedModel, ids: torch.Tensor) -> float:
    prompt, answer = ids[:-1].tolist(), ids[-1:].tolist()

    def write(count: int) -> None:
        list(replies(model, prompt, [Asked([], answer, count)]))

    few, many = (_time(partial(write, count)) for count in (1, 1 + _DECODED))
    return max(many - few, 0.0) / _DECODED
