"""Each attention layer matched with its teacher's, by changes of its queries and keys.

While the teacher reads the texts, each attention layer is stopped at once it is computed: its inputs and its output are
there, and its changes (``layer_changes``) are trained until the same layer under the rule gives the same output. No
gradient passes through the network, one layer is in memory at a time, and no token is predicted. The matching of layers
is known from the conversion to linear attention (LoLCATs, Zhang et al. 2024, arXiv:2410.10254, section 3.1); here it
moves a position rule.

Each text is read twice: as a whole, and cut into pieces of the original length. A step takes some queries of the whole
text, or of one piece. Most take a piece: it has fewer keys, and short texts are what is to be kept. A third of the
queries are where the text repeats what it had long before: few heads read that far, and those who do matter there.
A layer whose error stays large, before its changes are reduced to the wanted rank, is trained for as many steps again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_posenc.attention.inner import AttentionCall, Output
from hf_posenc.attention.installation import layer_kind, text_layers
from hf_posenc.attention.interface import attending_by, attention_of, split_mask
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.lm_head import decoder_body
from hf_posenc.evaluation.memory import return_free_memory
from hf_posenc.fitting.adapter import low_rank_weights, projections
from hf_posenc.fitting.budget import Seconds
from hf_posenc.fitting.layer_changes import LayerChanges
from hf_posenc.fitting.recording import OwnAttention
from hf_posenc.fitting.rule import RuleParameters
from hf_posenc.fitting.rule_attention import RuleAttention, extended_layers, seen_keys
from hf_posenc.fitting.run import FitRun
from hf_posenc.fitting.short_matching import BETAS, LAST_RATE
from hf_posenc.methods.base import Method
from hf_posenc.utils.console import Progress
from hf_posenc.utils.files import write_tensors

_WHOLE_EVERY = 4  # steps, one of them is on a whole text
_QUARTERS = 4  # of a whole text, one of which a step takes queries from
_ROUND = _WHOLE_EVERY * _QUARTERS  # steps that read each quarter once
_SHARE = 1 / 3  # of a step's queries: those at copied pairs, and those of a piece that are in its first quarter
_LONG_BEFORE = 16  # a pair of tokens is copied if it was there more than the original length over this before
_RATE_OF_MAPS = 1 / 6  # of the learning rate
_LARGE_ERROR = 0.008  # of a layer: above it, it is trained for as many steps again
_SHARE_OF_TIME = 0.6  # of what a budget leaves; the rest is for steps on short texts


@torch.no_grad()
def match_layers(run: FitRun, rule: Method, texts: Sequence[torch.Tensor], seed: int, folder: Path) -> None:
    """Fit the changes of each layer in one forward of the teacher; layers that were fitted before are not fitted again.

    Args:
        run: The fit.
        rule: What the layers are to attend under.
        texts: int64 ``(num_tokens,)`` each, of one length.
        seed: Of everything random.
        folder: Where the changes of each layer are kept as soon as they are fitted, for ``restore_layer``.

    Raises:
        ValueError: There is time for hardly a step, or the numbers of a layer are not finite.
    """
    rotary, fitted = run.rotary, extended_layers(run.rotary)
    if all(_file_of(layer, folder).is_file() for layer in fitted):
        return
    parameters = RuleParameters(run.spec, rule.frequencies(run.spec), keep_rotations=math.inf).to(rotary.device)
    student = RuleAttention(rotary, parameters.requires_grad_(False), run.rotation)
    ids = torch.stack([*texts, *texts]).to(rotary.device)
    positions = torch.arange(ids.shape[1], device=rotary.device)[None]
    bar = Progress("adapt", len(fitted), unit="layers", shown=not run.config.hide_progress)
    with run.extended(run.config.teacher_request()), ExitStack() as hooks:
        matching = LayerMatching(run, student, texts, positions, seed, folder)
        for layer in fitted:
            linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
            handles = [linear.register_forward_pre_hook(matching.look_for_projection) for linear in linears]
            handles.append(layer.register_forward_hook(matching.fit, with_kwargs=True))
            handles.append(layer.register_forward_hook(lambda *args: bar.update()))
            for handle in handles:
                hooks.callback(handle.remove)
        layers = {layer: (matching, layer_kind(layer, rotary.text_config)) for layer in text_layers(rotary)}
        with bar, attending_by(rotary.text_configs, layers):
            decoder_body(rotary.model)(input_ids=ids, position_ids=positions, use_cache=False)


def restore_layer(layer: nn.Module, folder: Path) -> tuple[tuple[float, float], int]:
    """Give a layer of a PEFT model the changes that were fitted; return its errors before and after, and the steps."""
    kept = load_file(_file_of(layer, folder))
    for name, weight in low_rank_weights(layer).items():
        found = kept[name]  # of no more directions than the projection has outputs
        weight.data[tuple(map(slice, found.shape))].copy_(found)
    before, after = kept["errors"].tolist()
    return (before, after), int(kept["steps"])


class _Read(Exception):
    """Ends the call of a layer of which only the attention is wanted."""


class _Layer(NamedTuple):
    """An attention layer that the teacher has computed."""

    module: nn.Module
    args: tuple[Any, ...]  # it was called with
    kwargs: dict[str, Any]
    wanted: torch.Tensor  # output of its attention, (num_rows, length, heads, head_dim)

    @property
    def num_rows(self) -> int:
        return len(self.wanted)

    @property
    def length(self) -> int:
        return self.wanted.shape[1]


class LayerMatching:
    """Attends in place of each layer as the teacher does, and fits the layer's changes once its output is there."""

    def __init__(
        self,
        run: FitRun,
        student: RuleAttention,
        texts: Sequence[torch.Tensor],
        positions: torch.Tensor,
        seed: int,
        folder: Path,
    ) -> None:
        """Make one, for a model that is extended by the teacher's rule.

        Args:
            run: The fit.
            student: Attention under the static rule.
            texts: int64 ``(num_tokens,)`` each, which are read as a whole, and then again in pieces.
            positions: Of their tokens, int64 ``(1, num_tokens)``.
            seed: Of the drawn queries.
            folder: Where the changes of each layer are kept.
        """
        settings = run.config.adapt
        assert settings is not None
        self.student, self.config, self.original, self.positions = student, settings, run.original, positions
        self.num_texts, self.seed, self.folder, self.rounds = len(texts), seed, folder, run.config.most_rounds
        self.modules = projections(run.rotary)
        least = self.original // _LONG_BEFORE
        in_pieces = [_copied(ids, least, self.original) for ids in texts]
        self._copied = [*(_copied(ids, least, len(ids)) for ids in texts), *in_pieces]  # of each row of the batch
        self._steps = partial(
            run.budget.steps,
            settings.steps,
            folder / "steps.json",
            share=run.share_of(seed) * _SHARE_OF_TIME,
            of=" in each layer",
        )
        self._began = time.perf_counter()
        self._teachers = {layer: attention_of(layer) for layer in text_layers(run.rotary)}
        self._number = len(extended_layers(run.rotary))  # of the layers that are fitted
        self._output: torch.Tensor | None = None  # of the teacher's attention, (batch, length, heads, head_dim)
        self._head_dim = 0  # of queries and keys
        self._projection: nn.Linear | None = None  # W_o, where it gets that output as it is
        self._fitting = False  # whether a step is taken; otherwise the teacher reads
        self._call: AttentionCall

    def attend(self, call: AttentionCall) -> Output:
        """Attend as the teacher does; in a step the layer's call ends here.

        Whole texts are read by the teacher, and pieces by the unextended model: positions are relative.
        """
        if self._fitting:
            self._call = call
            raise _Read
        own, many = OwnAttention(self.student.inner), self.num_texts
        teacher = self._teachers[call.module] or own
        output, weights = teacher.attend(_of_part(call, slice(many)))
        starts = range(0, call.query.shape[2], self.original)
        pieces = [_of_part(call, slice(many, None), slice(start, start + self.original)) for start in starts]
        attended = torch.cat([own.attend(piece)[0] for piece in pieces], dim=1)
        self._output, self._projection, self._head_dim = torch.cat((output, attended)), None, call.query.shape[-1]
        return self._output, weights

    def look_for_projection(self, linear: nn.Linear, args: tuple[Any, ...]) -> None:
        """Note W_o: the linear layer that gets the attention output."""
        output, states = self._output, args[0]
        may_be = not self._fitting and output is not None and states.numel() == output.numel()
        if may_be and torch.equal(states.flatten(), output.flatten()):  # type: ignore[union-attr]  # not None there
            self._projection = linear

    def fit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Fit the changes of a layer that the teacher has just computed."""
        if self._fitting or self._output is None:
            return
        layer, self._output = _Layer(module, args, kwargs, self._output), None
        if (file := _file_of(module, self.folder)).is_file():  # fitted before the run was stopped
            return
        generator = torch.Generator().manual_seed(self.seed + 1000 * cast(int, module.layer_idx))
        changes = LayerChanges(module, self.modules, self._head_dim, generator)
        low_rank, maps = changes.weights()
        rate = self.config.learning_rate
        groups = [{"params": low_rank, "lr": rate}, {"params": maps, "lr": _RATE_OF_MAPS * rate}]
        optimizer = torch.optim.Adam(groups, betas=BETAS)
        kept: list[dict[nn.Module, torch.Tensor]] = [{} for _ in range(self.num_texts)]

        def error(step: int, generator: torch.Generator) -> torch.Tensor:
            wholes = -(-step // _WHOLE_EVERY)  # steps on whole texts before
            whole = step % _WHOLE_EVERY == 0
            number = wholes if whole else step - wholes
            row, drawn, read = (self._draw if whole else self._draw_of_piece)(layer.length, number, generator)
            rows = drawn.to(layer.wanted.device)
            found = self._under_the_rule(layer, row, rows, read, changes, kept[row] if whole else {})
            return self._error(found, layer.wanted[row, rows])

        def gradients(step: int, generator: torch.Generator) -> None:
            optimizer.zero_grad()
            with torch.enable_grad():
                error(step, generator).backward(inputs=low_rank + maps)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped

        def measured() -> float:
            generator = torch.Generator().manual_seed(self.seed)
            return sum(float(error(step, generator)) for step in range(_ROUND)) / _ROUND

        self._fitting = True
        self.student.begin(None, 0, 0)
        steps = self._steps(lambda: self._cost(module, gradients))
        before = measured()
        fall = (1 - LAST_RATE) / steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - fall * (step % steps))
        for step in range(self.rounds * steps):
            if step and step % steps == 0 and measured() <= _LARGE_ERROR:
                break
            gradients(step, generator)
            optimizer.step()
            schedule.step()
        if not all(bool(weight.isfinite().all()) for weight in low_rank + maps):
            raise InvalidRequestError(
                f"the fit of layer {module.layer_idx} gave numbers that are not finite: the model overflows in its "
                "dtype, or learning_rate is too large. Load it in bfloat16 or float32, or lower learning_rate."
            )
        weights = changes.reduce(self.config.rank)
        errors = torch.tensor((before, measured()), dtype=torch.float64)
        self._fitting = False
        write_tensors({**weights, "errors": errors, "steps": torch.tensor(steps)}, file)
        return_free_memory()

    def _cost(self, first: nn.Module, gradients: Callable[[int, torch.Generator], None]) -> Seconds:
        """Return the seconds of the teacher after the first fitted layer and of measuring, and of a step in each."""
        layers = list(self._teachers)
        read = layers.index(first) + 1
        of_teacher = (time.perf_counter() - self._began) / read * (len(layers) - read)
        generator = torch.Generator()
        for count in (_WHOLE_EVERY, _ROUND):  # the first steps warm up
            began = time.perf_counter()
            for step in range(count):
                gradients(step, generator)
        of_steps = (time.perf_counter() - began) / _ROUND * self._number
        return of_teacher + 2 * _ROUND * of_steps, of_steps

    def _draw(self, length: int, number: int, generator: torch.Generator) -> tuple[int, torch.Tensor, slice]:
        """Return what a step on a whole text takes: a row of the batch, queries of it, and the tokens with their keys.

        The queries are in one of the quarters of the text: for those in the first half, half of it is read.

        Args:
            length: Of a text.
            number: Of the step, among those on whole texts.
            generator: Of the positions of the queries, which rise.
        """
        text, quarter = self._turn(number, _QUARTERS)
        end = length * (_QUARTERS - quarter) // _QUARTERS
        drawn = self._queries(text, end - length // _QUARTERS, end, self.config.queries, generator)
        return text, drawn.sort().values, slice(end)

    def _draw_of_piece(self, length: int, number: int, generator: torch.Generator) -> tuple[int, torch.Tensor, slice]:
        """Return the same of a step on a piece of a text: a third of the queries is in its first quarter."""
        text, piece = self._turn(number, length // self.original)  # a last one that is shorter is left out
        row, start = self.num_texts + text, piece * self.original
        near, end = round(_SHARE * self.config.queries), start + self.original
        parts = [torch.randint(start, start + max(1, self.original // 4), (near,), generator=generator)]
        parts.append(self._queries(row, start, end, self.config.queries - near, generator))
        return row, torch.cat(parts).sort().values, slice(start, end)

    def _queries(self, row: int, start: int, end: int, count: int, generator: torch.Generator) -> torch.Tensor:
        """Draw positions of one row of the batch from ``start`` to before ``end``, some of them at copied pairs."""
        drawn = torch.randint(start, end, (count,), generator=generator)
        copied = self._copied[row]
        copied = copied[(copied >= start) & (copied < end)]
        if len(copied) and (number := min(count, round(_SHARE * self.config.queries))):
            drawn[:number] = copied[torch.randint(len(copied), (number,), generator=generator)]
        return drawn

    def _turn(self, number: int, parts: int) -> tuple[int, int]:
        """Return which text a step reads, and which part of it; with time it reads each part of each text."""
        text = (number + number // math.lcm(parts, self.num_texts)) % self.num_texts
        return text, number % parts

    def _under_the_rule(
        self,
        layer: _Layer,
        row: int,
        rows: torch.Tensor,
        read: slice,
        changes: LayerChanges,
        kept: dict[nn.Module, torch.Tensor],
    ) -> torch.Tensor:
        """Return the outputs of some queries of one text, ``(num_rows, heads, head_dim)``.

        Args:
            layer: The layer.
            row: Of the batch.
            rows: Positions of the queries.
            read: Of the tokens whose keys they see.
            changes: Of the layer.
            kept: What the unchanged weights made of the text before.
        """
        with changes.in_place():
            query = self._call_of(layer, row, rows).query
        with changes.in_place(kept):
            call = self._call_of(layer, row, read)
        num_keys, first = call.key.shape[2], read.start or 0
        query = self.student.rotated(query, rows, None, of_queries=True)
        key = self.student.rotated(call.key, torch.arange(first, first + num_keys, device=rows.device), None)
        seen = seen_keys(rows - first, num_keys, call.kwargs)
        return self.student.call(call._replace(query=query, key=key, mask=seen))[0]

    def _call_of(self, layer: _Layer, row: int, tokens: torch.Tensor | slice) -> AttentionCall:
        """Return what the layer attends with, of some tokens of one text."""
        inputs = _of_row((layer.args, layer.kwargs), row, layer.num_rows)
        args, kwargs = _of_tokens(inputs, tokens, layer.length)
        with suppress(_Read):
            layer.module(*args, **kwargs)
        return self._call

    def _error(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the relative squared error of some outputs, the mean of before and after W_o."""
        pairs = [(found.float(), wanted.float())]
        if self._projection is not None:
            weight = self._projection.weight.detach().float()
            pairs.append(tuple(states.flatten(1) @ weight.T for states in pairs[0]))  # type: ignore[arg-type]  # two
        errors = [(found - right).square().sum() / right.square().sum() for found, right in pairs]
        return torch.stack(errors).mean()


def _of_part(call: AttentionCall, rows: slice, tokens: slice = slice(None)) -> AttentionCall:
    """Return the call with the queries, keys and values of some tokens, in some rows of the batch."""
    part = rows, slice(None), tokens
    _, mask = split_mask(call.mask)  # of a window; there is no padding
    if mask is not None:
        mask = mask[rows if len(mask) > 1 else slice(None), :, tokens, tokens]
    return call._replace(query=call.query[part], key=call.key[part], value=call.value[part], mask=mask)


def _file_of(layer: Any, folder: Path) -> Path:
    return folder / f"adapter-layer-{layer.layer_idx:03d}.safetensors"


def _copied(ids: torch.Tensor, least: int, length: int) -> torch.Tensor:
    """Return the positions of tokens that begin a pair which was last there more than ``least`` tokens before.

    Args:
        ids: int64 ``(num_tokens,)``.
        least: A distance, in tokens.
        length: Of the pieces that the text is cut into; a pair of another piece was not there.
    """
    found: list[int] = []
    for start in range(0, len(ids), length):
        last: dict[tuple[int, int], int] = {}
        piece = ids[start : start + length].tolist()
        for at, pair in enumerate(pairwise(piece)):
            if at - last.get(pair, at) > least:
                found.append(start + at)
            last[pair] = at
    return torch.tensor(found, dtype=torch.int64)


def _of_row(value: Any, row: int, batch: int) -> Any:
    """Return the part of a layer's arguments that belongs to one row of the batch."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[row : row + 1] if batch > 1 and tensor.dim() > 1 and len(tensor) == batch else tensor

    return tree_map_only(torch.Tensor, part, value)


def _of_tokens(value: Any, tokens: torch.Tensor | slice, length: int) -> Any:
    """Return the part of a layer's arguments that belongs to some tokens: of states, positions, cosines and sines."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        dim = next((dim for dim in (1, 0) if dim < tensor.dim() and tensor.shape[dim] == length), None)
        return tensor if dim is None else tensor[(slice(None),) * dim + (tokens,)]

    return tree_map_only(torch.Tensor, part, value)
