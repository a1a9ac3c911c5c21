"""The needs of a fit, before anything is computed: memory at its peak, and room on disk for the recordings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_posenc.evaluation.memory import MemoryNeed, ModelShape, predict_memory, shape_of
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.fitting.objectives import get_objective
from hf_posenc.fitting.recording import RECORDED_QUERIES
from hf_posenc.fitting.short_matching import ROWS_OF_LOGITS, TOKENS_IN_STRETCHES
from hf_posenc.methods.base import Extension
from hf_posenc.patching.extension import plain_spec
from hf_posenc.patching.extension_config import NO_METHOD, ExtensionRequest
from hf_posenc.patching.request import resolve
from hf_posenc.utils.units import size_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posenc.fitting.config import FitConfig

_FLOAT32 = 4


@dataclass(frozen=True)
class FitCost:
    """The needs of a fit.

    Attributes:
        teacher: Bytes of memory while the teacher reads a text; None where no objective needs one.
        step: Bytes while a step is taken, the model included.
        measuring: Bytes while a text of the target length is measured, the model included; 0 if none is.
        disk: Bytes of all recordings.
    """

    teacher: MemoryNeed | None
    step: int
    measuring: int
    disk: int

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return max(self.step, self.measuring, 0 if self.teacher is None else self.teacher.peak)


def fit_cost(shape: ModelShape, config: FitConfig, *, texts: int, original: int, teacher: Extension | None) -> FitCost:
    """Predict what a fit needs.

    Counted is what a LLaMA-like layer holds. ``attention_matching`` holds one layer's recorded keys and values, the
    rotated keys with what their gradients need in float32, and a mask of its queries. A block over a recorded prefix
    holds the rotated keys and the values of all layers, and a text of full length the activations of every layer.
    Hidden numbers are asked for over the KV cache of a text, which is held beside the activations of its last layer.

    Args:
        shape: The model's numbers.
        config: The settings, checked.
        texts: How many are recorded.
        original: The original length, in tokens.
        teacher: What the teacher's model is patched with; None for the unextended model.
    """
    kinds = {name: get_objective(name) for name in config.weights()} if config.adapt is None else {}
    target, queries, block = int(config.context_length), config.queries, config.block
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    number, layers = shape.number_bytes, shape.num_layers
    step = 0
    if "attention_matching" in kinds:
        of_keys = target * kv * (2 * number + 6 * _FLOAT32)
        of_mask = 2 * target * queries * (shape.num_heads // shape.num_kv_heads) * (1 + number)
        step = max(step, of_keys + of_mask)
    if any(kind.reads_on for kind in kinds.values()):
        of_keys = target * kv * (3 * number + 2 * _FLOAT32)
        of_block = block * (12 * shape.hidden_size + 4 * shape.intermediate_size + 4 * q) * number
        step = max(step, layers * (of_keys + of_block) + block * shape.vocab_size * 4 * _FLOAT32)
    if "full_length" in kinds:
        of_text = target * (12 * shape.hidden_size + 4 * shape.intermediate_size + 4 * q) * number
        step = max(step, layers * of_text + target * shape.vocab_size * 4 * _FLOAT32)
    texts_at_once = 1
    if (adapt := config.adapt) is not None:  # the teacher reads all texts at once, each twice, and a layer is stopped
        texts_at_once = 2 * texts
        # Keys of a whole text with the inputs of their change in float32, queries that are left out as zeros that the
        # layer rotates, and what the unchanged weights make of all texts.
        of_states = target * (3 * kv * (2 * number + 2 * _FLOAT32) + shape.hidden_size * _FLOAT32 + 4 * q * number)
        of_states += texts * target * 2 * kv * number
        of_mask = 2 * target * adapt.queries * (shape.num_heads // shape.num_kv_heads) * (1 + number)
        step = max(step, of_states + of_mask + texts_at_once * target * (3 * shape.hidden_size + q) * number)
        of_layer = (12 * shape.hidden_size + 4 * shape.intermediate_size + 4 * q) * number
        if adapt.short_steps:  # the inputs of all layers, what gradients need of one, and some rows of logits
            of_logits = ROWS_OF_LOGITS * shape.vocab_size * 4 * _FLOAT32
            tokens = max(original, TOKENS_IN_STRETCHES)
            step = max(step, tokens * (layers * shape.hidden_size * number + of_layer) + of_logits)
    recorded = any(kind.needs_teacher for kind in kinds.values())
    read = predict_memory(shape, target)
    taught = predict_memory(shape, target, batch_size=texts_at_once, extension=teacher)
    asked = 2 * target * kv * layers * number if config.held_out_numbers else 0
    return FitCost(
        teacher=taught if recorded or adapt is not None else None,
        step=shape.weight_bytes + step,
        measuring=read.peak + asked if config.held_out else 0,
        disk=texts * layers * (2 * target * kv + 2 * RECORDED_QUERIES * q) * number if recorded else 0,
    )


def teacher_extension(rotary: RotaryModel, config: FitConfig) -> Extension | None:
    """Return the extension of the teacher's model; None for the unextended model.

    Raises:
        ValueError: The teacher is not for this model.
    """
    if (request := config.teacher_request()) is None:
        return None
    return resolve(rotary.text_config, ExtensionRequest.of(**request))


def cost_in_words(model: PreTrainedModel, config: FitConfig, num_texts: int, output: str) -> str:
    """Return the needs of a fit of a loaded model, in words.

    Args:
        model: Not extended.
        config: The settings, checked.
        num_texts: Texts that are fitted on.
        output: The folder that the model goes to, beside which the recordings are kept.
    """
    rotary = RotaryModel(model)
    original = config.original(plain_spec(rotary.text_config).original_max_position_embeddings)
    teacher = teacher_extension(rotary, config)
    cost = fit_cost(shape_of(rotary.model), config, texts=num_texts, original=original, teacher=teacher)
    first = ""
    if cost.teacher is not None:
        reader = "the model as it is" if config.teacher == NO_METHOD else config.teacher
        once = " once, then " if config.adapt is None else ", with "
        first = f"{reader} reads {num_texts} text{'s' * (num_texts > 1)}{once}"
    room = f", {size_name(cost.disk)} on disk in {output}.work" if cost.disk else ""
    steps = f"{config.steps} steps on {', '.join(config.weights())}"
    if (adapt := config.adapt) is not None:
        most = config.most_rounds * adapt.steps
        again = f" (up to {most} where its error stays large)" if most > adapt.steps else ""
        steps = f"{adapt.steps} steps in each layer{again} for changes of rank {adapt.rank}"
        steps += f", and {adapt.short_steps} steps on short texts" if adapt.short_steps else ""
    return f"{first}{steps}: about {size_name(cost.peak)} of memory for weights and tensors{room}"
