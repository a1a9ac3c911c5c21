"""The ways to train, from what was requested to what needs least memory, each on top of those before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from hf_posenc.planning.gpus import smallest_gpu, usable
from hf_posenc.planning.shapes import text_config
from hf_posenc.planning.training_memory import (
    TrainingMemory,
    computes_in_half,
    least_training_memory,
    predict_training_memory,
)
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.conflicts import EIGHT_BIT_ADAMW, Combination, refuse_conflicts
from hf_posenc.training.launch import Launch
from hf_posenc.training.masks import has_windows
from hf_posenc.training.recipes import get_recipe

# Names of options; the order is that of TRL's guide to long contexts: logits, precision, activations, weights, devices.
AS_REQUESTED, BF16, CHECKPOINTING, NO_MASK = "as requested", "bf16", "gradient checkpointing", "no mask"
STATES_8BIT, LORA, ADAPTERS, LORA_4BIT = "8-bit AdamW", "LoRA+", "LoRA", "4-bit LoRA"
POSE = "PoSE window"
POSE_8BIT, POSE_LORA, POSE_4BIT = (f"{POSE}, {name}" for name in (STATES_8BIT, LORA, LORA_4BIT))
# Number of devices that share a sequence in our accelerate configurations.
SHARED_OVER = (2, 4, 8)
_MOST_DEVICES = 64
_ADAPTER_SETTINGS = ("lora_rank", "lora_alpha", "trainable")


@dataclass(frozen=True)
class TrainingOption:
    """One way to run the training, and what it needs.

    Attributes:
        name: What is new in it.
        run: The settings.
        seq_len: Tokens of a block.
        packed: Attention needs a mask of block x block: blocks hold several documents, or windows meet a skip.
        memory: What it needs on one device.
        load_in_4bit: The weights are loaded so.
        sharding: Over several devices; None for one.
        at_least: ``memory`` is only what it needs at least, as that is too much already.
    """

    name: str
    run: FinetuneConfig
    seq_len: int
    packed: bool
    memory: TrainingMemory
    load_in_4bit: bool = False
    sharding: Sharding | None = None
    at_least: bool = False

    def predicted(self, config: PreTrainedConfig) -> TrainingOption:
        """Return it with what it needs on one device, not only at least."""
        memory = predict_training_memory(
            config, self.run.step, self.seq_len, packed=self.packed, load_in_4bit=self.load_in_4bit
        )
        return dataclasses.replace(self, memory=memory, sharding=None, at_least=False)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the settings that no option changes, JSON-able."""
        own = ("name", "seq_len", "packed", "load_in_4bit", "per_device", "at_least", "smallest_gpu")
        settings = ("lora", "lora_embeddings", "bf16", "gradient_checkpointing", "position_schedule", "optim")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: getattr(self.run, name) for name in settings},
            "sharding": None if self.sharding is None else dataclasses.asdict(self.sharding),
            "memory": {**dataclasses.asdict(self.memory), "peak": self.memory.peak},
        }

    @property
    def group(self) -> int | None:
        """Tokens of a group of shifted sparse attention; None without it."""
        return max(1, round(self.run.group_share * self.seq_len)) if self.run.shifted_sparse_attention else None

    @property
    def label(self) -> str:
        """The name, and what several devices share."""
        if self.sharding is None:
            return self.name
        blocks = "weights and blocks" if self.sharding.context_parallel else "weights"
        return f"{self.name}, {blocks} shared by {self.sharding.num_devices} GPUs"

    @property
    def per_device(self) -> int:
        """Bytes on each device, at the peak."""
        return self.memory.peak if self.sharding is None else self.sharding.per_device

    @property
    def needed(self) -> int:
        """Bytes a device must have: those at the peak, or all weights, which each holds before they are shared out."""
        return self.per_device if self.sharding is None else max(self.per_device, self.memory.weights)

    def fits(self, gpu_memory: int) -> bool:
        """Say whether it fits devices of so many bytes."""
        return self.needed <= usable(gpu_memory)

    @property
    def smallest_gpu(self) -> int | None:
        """The smallest rented GPU it fits, in 10^9 bytes; None: not even the largest."""
        return smallest_gpu(self.needed)


@dataclass(frozen=True)
class Sharding:
    """An estimate for several devices, from the parts of one device; not measured.

    Attributes:
        num_devices: How many; of ``fewest_devices`` a power of two.
        context_parallel: One block has to be spread too, not only weights, gradients and states.
        per_device: Bytes on each.
    """

    num_devices: int
    context_parallel: bool
    per_device: int

    @classmethod
    def of(cls, memory: TrainingMemory, num_layers: int, num_devices: int, context_parallel: bool) -> Sharding:
        """Estimate the bytes on each device.

        FSDP2 and ZeRO-3 spread weights, gradients and states, and gather one layer at a time (two while the next is
        on its way); context parallel spreads the block.
        """
        parts = memory.weights + memory.optimizer + memory.all_gradients
        rest = memory.peak - memory.weights - memory.optimizer - memory.gradients
        gathered = 2 * memory.weights // num_layers
        per_device = parts // num_devices + gathered + (rest // num_devices if context_parallel else rest)
        return cls(num_devices, context_parallel, per_device)


def training_options(
    config: PreTrainedConfig,
    run: FinetuneConfig,
    seq_len: int,
    original: int,
    *,
    gpus: int = 1,
    gpu_memory: int | None = None,
    unmasked: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[TrainingOption]:
    """Yield the ways to train, from what was requested to what needs least; each is predicted when it is reached.

    The loss in chunks, which saves most, is always on. Where ``gpu_memory`` is known, no step is run of a way whose
    weights, states and inputs of layers alone are more than all devices have.

    Args:
        config: The model's.
        run: What was requested.
        seq_len: Tokens of a block: the target length, unless something else was requested.
        original: The original length, that of PoSE's window.
        gpus, gpu_memory: Devices, and bytes of each. Of several, each way for one is followed by those that share
            weights and blocks out to all of them.
        unmasked: What ``unmasked_layers`` says of the model: such layers need whole sequences.
    """
    num_layers = int(text_config(config).num_hidden_layers)
    load_in_4bit = run.recipe is not None and bool(get_recipe(run.recipe).loading.get("load_in_4bit"))

    def option(
        name: str, run: FinetuneConfig, length: int, masked: bool = False, in_4bit: bool = load_in_4bit
    ) -> TrainingOption:
        packed = masked or run.packing
        least = least_training_memory(config, run.step, length, load_in_4bit=in_4bit)
        made = TrainingOption(name, run, length, packed, least, in_4bit, at_least=True)
        too_much = gpu_memory is not None and least.peak > gpus * usable(gpu_memory)
        return made if too_much else made.predicted(config)

    def in_8_bits(name: str, like: TrainingOption) -> TrainingOption:
        run = dataclasses.replace(like.run, optim=EIGHT_BIT_ADAMW)
        if like.at_least:
            return option(name, run, like.seq_len, like.packed)
        states = least_training_memory(config, run.step, like.seq_len).optimizer  # all that is different
        return dataclasses.replace(like, name=name, run=run, memory=dataclasses.replace(like.memory, optimizer=states))

    yield (whole := option(AS_REQUESTED, run, seq_len))
    if not computes_in_half(config, run.step):
        run = dataclasses.replace(run, bf16=True)
        yield (whole := option(BF16, run, seq_len))
    if not run.gradient_checkpointing:
        run = dataclasses.replace(run, gradient_checkpointing=True)
        yield (whole := option(CHECKPOINTING, run, seq_len))
    if run.packing and run.task_mix is None:  # whose blocks have several pieces
        run = dataclasses.replace(run, packing=False)
        yield (whole := option(NO_MASK, run, seq_len))
    if not run.lora and run.optim != EIGHT_BIT_ADAMW:
        yield in_8_bits(STATES_8BIT, whole)
    yield from shared_out(whole, num_layers, gpus, unmasked)
    adapters = dataclasses.replace(run, lora=True)
    where = run.trainable or "attention"  # said, as the recipe says all
    on_4bit = dataclasses.replace(adapters, recipe="qlora", trainable=where, **_settings_on_4bit())
    if not run.lora:
        yield (whole := option(LORA, adapters, seq_len))
        yield from shared_out(whole, num_layers, gpus, unmasked)
    if not load_in_4bit:
        if adapters.lora_embeddings:
            bare = dataclasses.replace(adapters, lora_embeddings=False)
            yield (whole := option(ADAPTERS, bare, seq_len))
            yield from shared_out(whole, num_layers, gpus, unmasked)
        yield option(LORA_4BIT, on_4bit, seq_len, in_4bit=True)
    if original < seq_len and run.position_schedule == "full":
        windows = has_windows(text_config(config))  # in which a skip has to be masked
        if not run.lora:
            window = option(POSE, dataclasses.replace(run, position_schedule="pose"), original, windows)
            yield window
            if run.optim != EIGHT_BIT_ADAMW:
                yield in_8_bits(POSE_8BIT, window)
        yield option(POSE_LORA, dataclasses.replace(adapters, position_schedule="pose"), original, windows)
        if not load_in_4bit:
            yield option(
                POSE_4BIT, dataclasses.replace(on_4bit, position_schedule="pose"), original, windows, in_4bit=True
            )


def _settings_on_4bit() -> dict[str, Any]:
    """Return QLoRA's settings but its adapters, which are on all linear layers and need more than those requested."""
    return {name: value for name, value in get_recipe("qlora").values.items() if name not in _ADAPTER_SETTINGS}


def shared_out(
    option: TrainingOption, num_layers: int, gpus: int, unmasked: Mapping[str, int] = MappingProxyType({})
) -> Iterator[TrainingOption]:
    """Yield a way of one device over several: weights shared out by FSDP2, then blocks too by context parallelism."""
    for context_parallel in (False, True):
        launch = Launch(gpus, fsdp=2, cp_size=gpus if context_parallel else 1)
        known = not context_parallel or (gpus in SHARED_OVER and not option.packed)
        if gpus > 1 and known and _can_start(option, launch, unmasked):
            sharding = Sharding.of(option.memory, num_layers, gpus, context_parallel)
            yield dataclasses.replace(option, sharding=sharding)


def _can_start(option: TrainingOption, launch: Launch, unmasked: Mapping[str, int]) -> bool:
    """Say whether ``finetune`` starts a run so."""
    run = Combination(option.run, launch, is_quantised=option.load_in_4bit, unmasked=unmasked, seq_len=option.seq_len)
    try:
        refuse_conflicts(run)
    except (ValueError, ImportError):
        return False
    return True


def fewest_devices(option: TrainingOption, gpu_memory: int, num_layers: int) -> Sharding | None:
    """Estimate on how many devices a full-length way to train fits (``Sharding.of``); None if not on 64.

    Before they are spread each device holds all weights for a moment, as they are trained
    (``hf_posenc.training.weights``).
    """
    if option.memory.weights > usable(gpu_memory):
        return None
    devices = 2
    while devices <= _MOST_DEVICES:
        for context_parallel in (False, True):
            sharding = Sharding.of(option.memory, num_layers, devices, context_parallel)
            if sharding.per_device <= usable(gpu_memory):
                return sharding
        devices *= 2
    return None
