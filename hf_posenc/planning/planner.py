"""The costs of a target length, and the method and recipe to take: from the config alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_posenc.checkpoint.loading import read_config
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.sliding_window import KEEP, choose_window
from hf_posenc.methods.registry import DEFAULT_METHOD
from hf_posenc.patching.extension import has_frequencies, original_length
from hf_posenc.planning.advice import Advice, Situation, advise
from hf_posenc.planning.architecture import Architecture, declared_extension, read_architecture, tokens_read
from hf_posenc.planning.flops import Flops, training_flops
from hf_posenc.planning.gpus import usable
from hf_posenc.planning.inference_memory import Reading, kv_cache, predict_readings
from hf_posenc.planning.planned_fit import PlannedFit, predict_fit
from hf_posenc.planning.possible_methods import possible_static_method, why_not_staged
from hf_posenc.planning.shapes import text_config
from hf_posenc.planning.training_options import Sharding, TrainingOption, fewest_devices, training_options
from hf_posenc.spec import check_length, check_number
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.conflicts import EIGHT_BIT_ADAMW, Combination, refuse_conflicts
from hf_posenc.training.launch import Launch
from hf_posenc.training.recipes import get_recipe
from hf_posenc.utils.dtypes import AUTO, DtypeChoice, choose_dtype, config_dtype, dtype_name
from hf_posenc.utils.units import MemorySize


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The costs of a longer context.

    Attributes:
        model: What it is.
        dtype: What the weights are loaded in, and why where that is not the checkpoint's dtype.
        requested_dtype: The dtype that was requested, by name; None for ``"auto"``.
        target: Tokens it is to read.
        factor: Target / original length.
        advice: Method and recipe, with reasons.
        static_method: The method to train, and for servers.
        sliding_window: What becomes of a window that every layer has, as requested.
        gpu_memory: Bytes of one device; None: not given.
        gpus: Devices.
        kv_cache: Bytes of one sequence's keys and values at the target, in the dtype computed in.
        fitting: What fitting a rule takes; None where the target is not past the original length, or ``fit`` refuses
            the model.
        reading: What reading the target takes, by how the weights are held.
        training_options: Ways to train, up to the first that fits; all of them where none does or no memory was given;
            none where training was not requested.
        chosen: Which of them: the first that fits, else the last; without a memory the first, as requested.
        sharding: Devices for training at the full length, where one is not enough; None: not needed, or 64 are too few.
        token_budget: Tokens counted with.
        flops: Operations of the training on them in the chosen way; None where training was not requested.
        tokens_per_second: Speed of training the chosen way; None: not known.
        rate: Where the speed is from.
    """

    model: Architecture
    dtype: DtypeChoice
    requested_dtype: str | None
    target: int
    factor: float
    advice: Advice
    static_method: str
    sliding_window: str | int
    gpu_memory: int | None
    gpus: int
    kv_cache: int
    fitting: PlannedFit | None
    reading: tuple[Reading, ...]
    training_options: tuple[TrainingOption, ...]
    chosen: int
    sharding: Sharding | None
    token_budget: int
    flops: Flops | None
    tokens_per_second: float | None = None
    rate: str = "not known: give --tokens-per-second or --tflops"

    @property
    def option(self) -> TrainingOption:
        """The way to train that the plan counts with.

        Raises:
            ValueError: Training was not requested.
        """
        if not self.training_options:
            raise InvalidRequestError("training was not planned: pass training=True (--training).")
        return self.training_options[self.chosen]

    @property
    def all_weights(self) -> TrainingOption | None:
        """The way to train all weights at the full length that needs least, of those FSDP2 can share if there are any.

        None where no way trains all weights at the full length.
        """
        return _all_weights(self.training_options, self.target)

    @property
    def fits(self) -> bool | None:
        """Whether training fits; None where the memory is not known, or training was not requested."""
        return None if self.gpu_memory is None or not self.training_options else self.option.fits(self.gpu_memory)

    @property
    def hours(self) -> float | None:
        """Of training; None where the speed is not known."""
        return None if self.tokens_per_second is None else self.token_budget / self.tokens_per_second / 3600

    def as_dict(self) -> dict[str, Any]:
        """Return everything, JSON-able."""
        shown: dict[str, Any] = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        for name in ("model", "advice", "flops", "sharding"):
            shown[name] = None if shown[name] is None else dataclasses.asdict(shown[name])
        return {
            **shown,
            "hours": self.hours,
            "dtype": self.model.dtype,
            "fitting": None if self.fitting is None else self.fitting.as_dict(),
            "dtype_reason": self.dtype.reason,
            "reading": [
                {**row.as_dict(), "per_device": row.per_device(self.gpus), "fits": self._fits(row, self.gpus)}
                for row in self.reading
            ],
            "training_options": [{**row.as_dict(), "fits": self._fits(row)} for row in self.training_options],
        }

    def _fits(self, row: Reading | TrainingOption, *gpus: int) -> bool | None:
        return None if self.gpu_memory is None else row.fits(self.gpu_memory, *gpus)


def plan(
    model: str | Path | PreTrainedConfig,
    context_length: int,
    *,
    gpu_memory: int | str | None = None,
    gpus: int = 1,
    training: bool = False,
    token_budget: int | None = None,
    original_max_position_embeddings: int | None = None,
    server: bool = False,
    run: FinetuneConfig | None = None,
    tokens_per_second: float | None = None,
    tflops: float | None = None,
    dtype: str | torch.dtype = "auto",
    sliding_window: str | int = KEEP,
) -> Plan:
    """Say what reading ``context_length`` tokens costs; only the config is read.

    Args:
        model: Folder, name on the Hub, ``.gguf`` file, or a config.
        context_length: Tokens the model is to read.
        gpu_memory: Bytes of one device, or such as ``"24GB"``.
        gpus: Devices of that memory.
        training: Say too what it takes to train, which takes seconds; so do ``token_budget``, ``run``, and both
            speeds.
        token_budget: Tokens to train on; None: whether to train is part of the answer, and costs are for those of
            ``run``.
        original_max_position_embeddings: Tokens it was trained on, where the config does not say it, or wrongly.
        server: Only rules that servers run.
        run: Settings of the training that is counted; None: ``finetune``'s.
        tokens_per_second: Measured speed of training at the target.
        tflops: Sustained speed of the device, in 10^12 operations a second.
        dtype: Dtype of the weights: ``"auto"`` is the checkpoint's own where ``gpu_memory`` is given, else
            what this machine computes natively (see ``hf_posenc.utils.dtypes.choose_dtype``).
        sliding_window: What becomes of a window that every layer has: ``"keep"``, ``"off"`` or a number of tokens.

    Raises:
        UnsupportedModelError: The model is to read more than it does, and its family cannot be extended.
        ValueError, TypeError: A value is out of range, the config cannot be read, its original length is not known, or
            the family cannot be run without data.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise InvalidRequestError(f"gpus must be a whole number of devices, at least 1, got {gpus!r}.")
    _check(context_length, token_budget, original_max_position_embeddings, tokens_per_second, tflops)
    memory = None if gpu_memory is None else MemorySize(gpu_memory)
    implied = (token_budget, run, tokens_per_second, tflops)
    with_training = training or any(one is not None for one in implied)
    run = run or FinetuneConfig("plan")
    config = model if isinstance(model, PreTrainedConfig) else read_config(model)
    choice = choose_dtype(dtype, config_dtype(config), None if memory is None else "cuda")
    config = copy.deepcopy(config)
    config.dtype = choice.dtype
    text = text_config(config)
    if sliding_window != KEEP:
        text.sliding_window = choose_window(text, sliding_window, context_length)
    name = str(config.name_or_path or config.model_type) if isinstance(model, PreTrainedConfig) else str(model)
    declared, trained = declared_extension(config, name), original_max_position_embeddings
    if trained is None and has_frequencies(text):
        original_length(text).counted_from()  # which warns, or refuses, where the config states several
    trained = trained or declared["original_max_position_embeddings"]
    static_method, no_staged = DEFAULT_METHOD, None
    if context_length > (tokens_read(declared, trained) or 0):
        static_method = possible_static_method(config, trained, context_length)
        no_staged = why_not_staged(config, trained, context_length)
    facts = read_architecture(config, name, trained)
    original = _known_original(facts)
    if with_training:
        run = _with_given(run, token_budget, original_max_position_embeddings)
        if facts.unmasked and run.task_mix is None:
            run = dataclasses.replace(run, packing=False)
        refuse_conflicts(Combination(run, Launch(), unmasked=facts.unmasked, method=run.method))  # as finetune does
    situation = Situation(
        facts.model_type,
        original,
        facts.reads,
        facts.method,
        context_length,
        token_budget,
        server,
        training=training,
        unmasked=facts.unmasked,
        static_method=static_method,
        no_staged=no_staged,
    )
    rows: list[TrainingOption] = []
    chosen = 0
    if with_training:
        options = training_options(
            config,
            run,
            _block(run, context_length, original),
            original,
            gpus=gpus,
            gpu_memory=memory,
            unmasked=facts.unmasked,
        )
        for option in options:
            rows.append(option)
            if memory is not None and option.fits(memory):
                break
        if memory is not None:
            chosen = len(rows) - 1
            fits = rows[chosen].fits(memory)
            if not fits:
                rows = _least_predicted(rows, context_length, config)
            situation = dataclasses.replace(situation, option=rows[chosen].name, fits=fits)
    sharding = None
    full = _all_weights(rows, context_length)
    if full and memory is not None and not any(row.fits(memory) for row in _of_all_weights(rows, context_length)):
        if full.at_least and full.memory.weights <= usable(memory):
            full = full.predicted(config)
        sharding = fewest_devices(full, memory, facts.num_layers)
    advice = advise(situation)
    cache = kv_cache(config, context_length)
    # Of a training, the rule that its beginning is read with.
    rule = advice.method if advice.recipe is None else situation.zero_shot_method
    budget = run.token_budget
    made = Plan(
        model=facts,
        dtype=choice,
        requested_dtype=None if dtype == AUTO else dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype,
        target=context_length,
        factor=context_length / original,
        advice=advice,
        static_method=static_method,
        sliding_window=sliding_window,
        gpu_memory=memory,
        gpus=gpus,
        kv_cache=cache.at(context_length),
        fitting=predict_fit(config, facts, context_length) if context_length > original else None,
        reading=predict_readings(config, cache, rule, original, context_length, memory, gpus),
        training_options=tuple(rows),
        chosen=chosen,
        sharding=sharding,
        token_budget=budget,
        flops=None
        if not rows
        else training_flops(facts, rows[chosen].run.step, rows[chosen].seq_len, budget, group=rows[chosen].group),
    )
    return _with_speed(made, tokens_per_second, tflops)


def _with_given(run: FinetuneConfig, token_budget: int | None, original: int | None) -> FinetuneConfig:
    """Return the run with what was given of it besides, so that its command says it too."""
    given: dict[str, Any] = {"token_budget": token_budget, "original_max_position_embeddings": original}
    return dataclasses.replace(run, **{name: value for name, value in given.items() if value is not None})


def _block(run: FinetuneConfig, target: int, original: int) -> int:
    """Return the tokens of a block as ``finetune`` chooses them."""
    of_recipe = None if run.recipe is None else get_recipe(run.recipe).block(run.position_schedule, original)
    return run.seq_len or of_recipe or (target if run.position_schedule == "full" else original)


def _all_weights(rows: Sequence[TrainingOption], target: int) -> TrainingOption | None:
    ways = _of_all_weights(rows, target)
    can_be_shared = [row for row in ways if row.run.optim != EIGHT_BIT_ADAMW]
    return next(reversed(can_be_shared or ways), None)


def _of_all_weights(rows: Sequence[TrainingOption], target: int) -> list[TrainingOption]:
    return [row for row in rows if row.seq_len == target and not row.run.lora and row.sharding is None]


def _check(
    context_length: int,
    token_budget: int | None,
    original: int | None,
    tokens_per_second: float | None,
    tflops: float | None,
) -> None:
    check_length(argument("context_length"), context_length)
    for name, length in (("token_budget", token_budget), ("original_max_position_embeddings", original)):
        if length is not None:
            check_length(argument(name), length)
    for name, number in (("tokens_per_second", tokens_per_second), ("tflops", tflops)):
        if number is not None:
            check_number(argument(name), number, above=0)
    if tokens_per_second is not None and tflops is not None:
        raise InvalidRequestError("give tokens_per_second or tflops, not both: each is the speed of training.")


def _known_original(facts: Architecture) -> int:
    if facts.original is None:
        raise InvalidRequestError(
            f"{facts.name} does not say how many tokens it was trained on. Give "
            f"{argument('original_max_position_embeddings')}."
        )
    return facts.original


def _least_predicted(rows: list[TrainingOption], target: int, config: PreTrainedConfig) -> list[TrainingOption]:
    """Return the ways with those predicted whole that need least: of all, and of those at the full length."""
    on_one = [row for row in rows if row.sharding is None]
    at_length = [row for row in on_one if row.seq_len == target]
    least = [min(some, key=lambda row: row.needed) for some in (on_one, at_length) if some]
    return [row.predicted(config) if row.at_least and row in least else row for row in rows]


def _with_speed(made: Plan, tokens_per_second: float | None, tflops: float | None) -> Plan:
    """Return the plan with the speed of training, which the caller knows."""
    if tokens_per_second is not None:
        return dataclasses.replace(made, tokens_per_second=tokens_per_second, rate="as given")
    if tflops is None:
        return made
    assert made.flops is not None  # a speed implies training
    per_token = made.flops.total / made.token_budget
    return dataclasses.replace(made, tokens_per_second=tflops * 1e12 / per_token, rate=f"{tflops:g} TFLOP/s, as given")
