"""The facts of a record besides its number: the model, the texts, the software; and the keys made of these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_posenc.attention.inner import inner_name
from hf_posenc.patching.extension import describe_rule
from hf_posenc.utils.dtypes import dtype_name, dtype_of_checkpoint
from hf_posenc.version import __version__

_ROW_BYTES = 8192
_ROWS_AT_ONCE = 1024  # 8 MB: what is computed on the way needs no more memory than a few of these


# For the reader; they do not decide a number, so the key leaves them out.
_NOT_IN_KEY = ("rope", "command", "checkpoint_dtype", "max_tokens")


def model_facts(
    model: PreTrainedModel, model_name: str | None, tokens_trained: int | None, label: str, command: str = ""
) -> dict[str, Any]:
    """Return the fields of a record that belong to the model and the software."""
    from hf_posenc.patching.api import rule_of

    rule = rule_of(model)
    config = model.config.get_text_config(decoder=True)
    description = describe_rule(None, config) if rule is None else rule.describe()
    shared = ("method", "factor", "options", "original_max_position_embeddings")
    trained_with = ("rotary_dim", "rope_theta", "unrotated_pairs")
    return {
        "model": model_name or model.config.name_or_path or type(model).__name__,
        **{name: description[name] for name in shared},
        "tokens_trained": tokens_trained,
        "dtype": dtype_name(model.dtype),
        "checkpoint_dtype": dtype_name(dtype_of_checkpoint(model)),
        "attn_implementation": inner_name(str(model.config._attn_implementation)),
        "versions": {
            "hf_posenc": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        "label": label,
        "rope": {} if rule is None else {name: getattr(rule.spec, name) for name in trained_with},
        "command": command,
    }


def make_run_key(identity: dict[str, Any], settings: Any) -> str:
    """Return a hash of a record's fields except its results, and of what else decides these."""
    return hash_json([{name: value for name, value in identity.items() if name not in _NOT_IN_KEY}, settings])


@torch.no_grad()
def hash_weights(model: PreTrainedModel) -> str:
    """Return a hash of all parameters and buffers: training, patching or editing in place changes it.

    An adapter of PEFT that is disabled does not count: the hash is that of the model without it.

    Every bit counts, by exact sums that are the same on every device and take 0.2 s for 540 MB on two CPU cores. Of
    a tensor on the meta device (offloaded) only name, shape and dtype count; of a quantised model what its library
    keeps as parameters and buffers, so not scales that are plain attributes.
    """
    digest = hashlib.sha256()
    named = [*model.named_parameters(), *model.named_buffers()]
    off = [f"{path}." for path, module in model.named_modules() if getattr(module, "disable_adapters", None) is True]
    for name, tensor in sorted(_counted(named, off), key=lambda pair: pair[0]):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if not tensor.is_meta and tensor.numel():
            for part in _checksums(tensor.detach()):
                digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _counted(named: Iterable[tuple[str, torch.Tensor]], disabled: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Leave out what is of a disabled adapter, and give what it was put around the name that it had before."""
    for name, tensor in named:
        path = next((path for path in disabled if name.startswith(path)), None)
        if path is None:
            yield name, tensor
        elif (own := name.removeprefix(path).partition("."))[0] in ("base_layer", "original_module"):
            yield path + own[2], tensor


def _checksums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return sums that change with any bit of a tensor: by row and by column, and of the values that fill no row.

    The bytes are laid out in rows and read as 32-bit numbers, summed without overflow. A change that leaves all sums
    as they were would have to be made for it: four numbers at least, at the corners of a rectangle.
    """
    raw = tensor.contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 8:  # a view as int64 has to start at a whole one
        raw = raw.clone()
    whole = len(raw) // _ROW_BYTES * _ROW_BYTES
    words = raw[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8)
    columns, rows = words.new_zeros(2, words.shape[1]), []
    for chunk in torch.split(words, _ROWS_AT_ONCE):
        # Sums of the 64 bits as they are would wrap, so that two changed signs, the top bits, cancel.
        for half, numbers in enumerate((chunk & 0xFFFFFFFF, chunk >> 32)):
            rows.append(numbers.sum(1))
            columns[half] += numbers.sum(0)
    return [torch.cat([columns.flatten(), *rows]), raw[whole:]]


def hash_json(value: Any) -> str:
    """Return a short hash of anything JSON can write, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
