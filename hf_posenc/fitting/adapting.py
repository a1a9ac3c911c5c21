"""Low-rank changes of the query and key projections, by which each layer attends under a static rule as its teacher.

While the teacher reads the texts, each attention layer is stopped at once it is computed: its inputs and its output are
there, and changes of W_q and W_k are trained until the same layer under the rule gives the same output: low-rank
changes (LoRA: Hu et al. 2021, arXiv:2106.09685), and a linear map of the queries and keys of each head, which can move
what a head keeps in one pair of features to a pair that rotates under the rule as the first one did. Both are then
written as low-rank changes alone. No gradient passes through the network, one layer is in memory at a time, and no
token is predicted. The matching of layers is known from the conversion to linear attention (LoLCATs, Zhang et al. 2024,
arXiv:2410.10254, section 3.1); here it moves a position rule. Then all changes are trained together on short texts
(``short_matching``), because the small errors of many layers add up. The rule is one that is there: ``llama3`` keeps
the pairs that rotate within short texts, which is what costs them least, and servers know it by name.

Each text is read twice: as a whole, and cut into pieces of the original length. A step takes some queries of the whole
text, or of one piece. Most take a piece: it has fewer keys, and short texts are what is to be kept. A third of the
queries are where the text repeats what it had long before: few heads read that far, and those who do matter there.
Where the error of a layer stays large, its steps are taken again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from hf_posenc.attention.interface import attending_by, attention_of
from hf_posenc.checkpoint.extended import peft_renamed_attribute
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation.lm_head import decoder_body
from hf_posenc.evaluation.memory import return_free_memory
from hf_posenc.evaluation.model_facts import hash_json
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.budget import Budget, Decide, Seconds
from hf_posenc.fitting.config import MOST_ROUNDS, AdaptConfig
from hf_posenc.fitting.layer_changes import LayerChanges
from hf_posenc.fitting.recording import OwnAttention
from hf_posenc.fitting.rule_attention import RuleAttention, extended_layers, seen_keys
from hf_posenc.fitting.short_matching import BETAS, LAST_RATE, low_rank_weights, match_short_texts
from hf_posenc.utils.console import Progress
from hf_posenc.utils.files import write_tensors

logger = logging.getLogger(__name__)

# Names of the projections of queries and keys in Transformers' attention layers; the last ones hold all three at once.
_SEPARATE = ("q_proj", "k_proj")
_FUSED = ("qkv_proj", "query_key_value", "Wqkv")
_WHOLE_EVERY = 4  # steps, one of them is on a whole text
_QUARTERS = 4  # of a whole text, one of which a step takes queries from
_ROUND = _WHOLE_EVERY * _QUARTERS  # steps that read each quarter once
_SHARE = 1 / 3  # of a step's queries: those at copied pairs, and those of a piece that are in its first quarter
_LONG_BEFORE = 16  # a pair of tokens is copied if it was there more than the original length over this before
_RATE_OF_MAPS = 1 / 6  # of the learning rate
_LARGE_ERROR = 0.008  # of a layer: above it, its steps are taken again
# Settings that decide no layer: those of what is done afterwards, and the name of the rule, which is in the identity.
_NOT_OF_LAYERS = ("short_steps", "short_rate", "rule")
_SHARE_OF_LAYERS = 0.6  # of the time that a budget leaves; the rest is for steps on short texts


@dataclass(frozen=True)
class Adapter:
    """Low-rank changes of a model's weights.

    Attributes:
        settings: How they were fitted: their rank, and the steps that were taken.
        modules: Names of the changed projections, such as ``q_proj``.
        weights: By name, as PEFT has them.
        errors: For each layer the relative squared error of its output under the rule, before and after.
    """

    settings: AdaptConfig
    modules: tuple[str, ...]
    weights: dict[str, torch.Tensor] = field(repr=False)
    errors: tuple[tuple[float, float], ...] = ()

    def wrap(self, model: Any) -> Any:
        """Return a model with the changes as a PEFT adapter, which ``merge_and_unload`` adds to the weights."""
        from peft import set_peft_model_state_dict

        wrapped = _wrapped(model, self.settings.rank, self.modules)
        set_peft_model_state_dict(wrapped, self.weights)
        return wrapped

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """While open, the model has the changes."""
        wrapped = self.wrap(model)
        try:
            yield
        finally:
            wrapped.unload()


def projections(rotary: RotaryModel) -> tuple[str, ...]:
    """Return the names of a model's query and key projections.

    Raises:
        ValueError: Its attention has no such projections (multi-head latent attention), or its weights are quantised.
    """
    if getattr(rotary.model, "is_quantized", False):
        raise InvalidRequestError(
            f"{argument('adapt')} changes weights, and those of this model are quantised. Fit the model in bfloat16, "
            "and quantise the result."
        )
    layers = extended_layers(rotary)
    names = {name for layer in layers for name, module in layer.named_children() if isinstance(module, nn.Linear)}
    if names >= set(_SEPARATE):
        return _SEPARATE
    fused = tuple(name for name in _FUSED if name in names)
    if not fused:
        raise InvalidRequestError(
            f"{argument('adapt')} cannot be used with model_type {rotary.text_config.model_type!r}: the projections of "
            f"queries and keys are not known among {', '.join(sorted(names)) or 'no linear layers'}."
        )
    return fused


def _wrapped(model: Any, rank: int, modules: Sequence[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=list(modules))
    with peft_renamed_attribute():
        return get_peft_model(model, config)


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
    """Stands before what each layer attends by; fits the layer's changes as soon as the teacher has computed it."""

    def __init__(
        self,
        rotary: RotaryModel,
        student: RuleAttention,
        config: AdaptConfig,
        texts: Sequence[torch.Tensor],
        original: int,
        seed: int,
        folder: Path,
        decide: Decide,
        rounds: int,
    ) -> None:
        """Make one.

        Args:
            rotary: The model, extended by the teacher's rule or not at all.
            student: Attention under the static rule.
            config: The settings.
            texts: int64 ``(num_tokens,)`` each, which are read as a whole, and then again in pieces.
            original: The original length, in tokens.
            seed: Of the drawn queries.
            folder: Where the changes of each layer are kept as soon as they are fitted.
            decide: Returns how many steps are taken in each layer.
            rounds: How often they may be taken where the error stays large.
        """
        self.student, self.config, self.original, self.folder, self.rounds = student, config, original, folder, rounds
        self.num_texts, self.seed, self.decide = len(texts), seed, decide
        self.modules = projections(rotary)
        least = original // _LONG_BEFORE
        in_pieces = [_copied(ids, least, original) for ids in texts]
        self._copied = [*(_copied(ids, least, len(ids)) for ids in texts), *in_pieces]  # of each row of the batch
        self.began = time.perf_counter()
        self.positions: torch.Tensor | None = None
        self._teachers = {layer: attention_of(layer) for layer in text_layers(rotary)}
        self._number = len(extended_layers(rotary))  # of the layers that are fitted
        self._output: torch.Tensor | None = None  # of the teacher's attention, (batch, length, heads, head_dim)
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
        attended = []
        for start in range(0, call.query.shape[2], self.original):
            part = slice(many, None), slice(None), slice(start, start + self.original)
            attended.append(own.attend(_of_part(call, part)._replace(mask=None))[0])
        self._output, self._projection = torch.cat((output, torch.cat(attended, dim=1))), None
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
        changes = LayerChanges(module, self.modules, layer.wanted.shape[-1], generator)
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
        steps = self.decide(lambda: self._cost(module, gradients))
        before = measured()
        fall = (1 - LAST_RATE) / steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - fall * (step % steps))
        for step in range(self.rounds * steps):
            if step and step % steps == 0 and measured() <= _LARGE_ERROR:
                break
            gradients(step, generator)
            optimizer.step()
            schedule.step()
        weights = changes.reduce(self.config.rank)
        errors = torch.tensor((before, measured()), dtype=torch.float64)
        self._fitting = False
        write_tensors({**weights, "errors": errors}, file)
        return_free_memory()

    def _cost(self, first: nn.Module, gradients: Callable[[int, torch.Generator], None]) -> Seconds:
        """Return the seconds of the teacher after the first fitted layer and of measuring, and of a step in each."""
        layers = list(self._teachers)
        read = layers.index(first) + 1
        of_teacher = (time.perf_counter() - self.began) / read * (len(layers) - read)
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


def _of_part(call: AttentionCall, part: Any) -> AttentionCall:
    """Return the call with some of its queries, keys and values."""
    return call._replace(query=call.query[part], key=call.key[part], value=call.value[part])


def _file_of(layer: Any, folder: Path) -> Path:
    return folder / f"adapter-layer-{layer.layer_idx:03d}.safetensors"


def _restore(layer: nn.Module, folder: Path) -> tuple[float, float]:
    """Give a layer the changes that were fitted; return its errors."""
    kept = load_file(_file_of(layer, folder))
    for name, weight in low_rank_weights(layer).items():
        found = kept[name]  # of no more directions than the projection has outputs
        weight.data[tuple(map(slice, found.shape))].copy_(found)
    return float(kept["errors"][0]), float(kept["errors"][1])


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


def adapt(
    rotary: RotaryModel,
    texts: Sequence[torch.Tensor],
    student: RuleAttention,
    teacher: Any,
    extended: Callable[[], AbstractContextManager[None]],
    config: AdaptConfig,
    *,
    original: int,
    seed: int,
    folder: Path,
    identity: str,
    budget: Budget,
    share: float = 1.0,
    show_progress: bool = True,
) -> Adapter:
    """Fit the changes of all layers in one forward of the teacher, then together; the model is left as it was.

    Layers that were fitted before, for other settings of the steps on short texts too, are not fitted again.

    Args:
        rotary: The model, not extended.
        texts: int64 ``(num_tokens,)`` each, of one length.
        student: Attention under the static rule.
        teacher: A context manager, while which the model is extended by the teacher's rule.
        extended: Returns one, while which it is extended by the static rule.
        config: The settings.
        original: The original length, in tokens.
        seed: Of everything random.
        folder: Where the layers that are fitted are kept, so that a stopped run goes on.
        identity: What the changes depend on besides the settings; files of another one are not read.
        budget: The time it may take: with a limit, the steps may be fewer than in the settings.
        share: Of the time that is left.
        show_progress: Whether to show it.

    Raises:
        ValueError: There is time for hardly a step.
    """
    from peft import get_peft_model_state_dict

    of_layers = {name: value for name, value in vars(config).items() if name not in _NOT_OF_LAYERS}
    limit = [] if budget.seconds is None else [budget.seconds]
    folder = folder / f"adapter-{hash_json([identity, of_layers, *limit])}"
    folder.mkdir(parents=True, exist_ok=True)
    modules = projections(rotary)
    began = time.perf_counter()
    fitted = extended_layers(rotary)
    decide: Decide = partial(
        budget.steps, config.steps, folder / "steps.json", share=share * _SHARE_OF_LAYERS, of=" in each layer"
    )
    kept = folder / f"short_steps-{config.short_steps}.json"
    decide_short = partial(budget.steps, config.short_steps, kept, share=share, fewest=0)
    if not all(_file_of(layer, folder).is_file() for layer in fitted):
        with teacher:
            rounds = 1 if limit else MOST_ROUNDS  # a limit counts the steps once
            matching = LayerMatching(rotary, student, config, texts, original, seed, folder, decide, rounds)
            _fit_layers(rotary, fitted, texts, matching, show_progress)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wrapped = _wrapped(rotary.model, config.rank, modules)
    try:
        errors = tuple(_restore(layer, folder) for layer in fitted)
        steps = decide(lambda: (0.0, 1.0))  # as they were fitted with
        short = match_short_texts(wrapped, texts, extended, config, original, seed, folder, decide_short, show_progress)
        weights = {name: weight.cpu().clone() for name, weight in get_peft_model_state_dict(wrapped).items()}
    finally:
        wrapped.unload()
    before, after = (sum(pair[which] for pair in errors) / len(errors) for which in (0, 1))
    logger.info("adapted: error %.4f -> %.4f in %.0f s", before, after, time.perf_counter() - began)
    return Adapter(replace(config, steps=steps, short_steps=short), modules, weights, errors)


@torch.no_grad()
def _fit_layers(
    rotary: RotaryModel,
    fitted: Sequence[nn.Module],
    texts: Sequence[torch.Tensor],
    matching: LayerMatching,
    show_progress: bool,
) -> None:
    """Fit layers in one forward of the model, extended by the teacher's rule."""
    layers = {layer: (matching, layer_kind(layer, rotary.text_config)) for layer in text_layers(rotary)}
    ids = torch.stack([*texts, *texts]).to(rotary.device)
    matching.positions = torch.arange(ids.shape[1], device=rotary.device)[None]
    bar = Progress("adapt", len(fitted), unit="layers", shown=show_progress)
    with ExitStack() as hooks:
        for layer in fitted:
            linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
            handles = [linear.register_forward_pre_hook(matching.look_for_projection) for linear in linears]
            handles.append(layer.register_forward_hook(matching.fit, with_kwargs=True))
            handles.append(layer.register_forward_hook(lambda *args: bar.update()))
            for handle in handles:
                hooks.callback(handle.remove)
        with bar, attending_by(rotary.text_configs, layers):
            decoder_body(rotary.model)(input_ids=ids, position_ids=matching.positions, use_cache=False)
