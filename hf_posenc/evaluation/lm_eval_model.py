"""The model class ``hf_posenc`` of EleutherAI's evaluation harness (lm-eval); importing this module registers it.

``lm_eval.simple_evaluate("hf_posenc", {"pretrained": MODEL, "method": "yarn", "factor": 4}, tasks=["piqa"])``; from a
shell ``hf-posenc lm-eval``. lm-eval has no entry points that would let it find the class by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig

from hf_posenc.checkpoint.extended import load_extended, peft_renamed_attribute
from hf_posenc.checkpoint.loading import check_path, choose_dtype_of, to_device, tokenizer_source, weights_source
from hf_posenc.checkpoint.manifest import find_manifest, is_saved_by_us
from hf_posenc.checkpoint.pretrained import is_gguf, load_weights
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.rows import refuse_extended
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.patching.api import describe, is_patched, patch_model, unpatch_model
from hf_posenc.patching.extension_config import ExtensionConfig, rows_to_measure
from hf_posenc.utils.dtypes import remember_choice
from hf_posenc.utils.units import ContextLength
from hf_posenc.version import __version__

# What HFLM can do and hf_posenc does not, with the reason.
_REFUSED = {
    "trust_remote_code": "a checkpoint's own Python code is not run",
    "tp_plan": "a rotary module split over devices cannot be verified; parallelize=True spreads whole layers",
    "delta": "apply the delta first, and give the folder that is saved then",
    "autogptq": "a checkpoint that is quantised already is loaded without it",
    "gptqmodel": "a checkpoint that is quantised already is loaded without it",
    "gguf_file": "give the .gguf file as pretrained",
}


@register_model("hf_posenc")
class ExtendedLM(HFLM):  # type: ignore[misc]  # lm-eval may not be installed where types are checked
    """``HFLM`` on a model that is extended as requested, or as its folder's manifest says; else as it is.

    Longer texts are cut at the extended length. ``results["config"]["hf_posenc"]`` says what was measured.

    Args:
        pretrained: A name on the Hub, a folder (plain, extended or an adapter's), a ``.gguf`` file, or a loaded model.
        method: As ``patch_model`` takes it, like the following; None or "none" takes the model as it is loaded.
        preset: Instead of a method.
        rope_scaling: Instead of a method too, as JSON.
        factor: How far.
        context_length: Instead of ``factor``, as 32768 or "32k".
        original_max_position_embeddings: If the config does not say it.
        sliding_window: "keep", "off" or tokens.
        on_scaled: "refuse" or "replace".
        options: The method's own.
        device: None takes a GPU if there is one.
        **kwargs: ``HFLM``'s; ``peft`` may be an adapter that ``save_extended`` wrote.

    Raises:
        TypeError, ValueError: As ``patch_model``; or an argument that hf_posenc cannot honour.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        method: str | None = None,
        preset: str | None = None,
        rope_scaling: str | None = None,
        factor: float | None = None,
        context_length: str | int | None = None,
        original_max_position_embeddings: int | None = None,
        sliding_window: str | int = "keep",
        on_scaled: str = "refuse",
        options: dict[str, Any] | None = None,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name in _REFUSED.keys() & {name for name, value in kwargs.items() if value}:
            raise InvalidRequestError(f"lm-eval's model hf_posenc takes no {name}: {_REFUSED[name]}.")
        extension = ExtensionConfig(
            preset=preset,
            rope_scaling=rope_scaling,
            factor=factor,
            context_length=_length(context_length),
            original_max_position_embeddings=_length(original_max_position_embeddings),
            sliding_window=sliding_window,  # type: ignore[arg-type]  # 16384 comes as a number here
            on_scaled=on_scaled,  # type: ignore[arg-type]  # a word here, as lm-eval hands it on
        )
        (self._row,) = rows_to_measure([] if method is None else [method], extension, options or {})
        if self._row is not None and not isinstance(pretrained, str):
            raise InvalidRequestError(
                "pretrained is a loaded model: call patch_model on it yourself, and leave method out."
            )
        self._tokens_trained: int | None = 0
        super().__init__(pretrained, device=str(to_device(device)), **kwargs)
        if describe(self.model)["method"] != "none":
            self.tokenizer.model_max_length = self.max_length  # where truncation=True cuts

    def _get_config(self, pretrained: str, *, revision: str = "main", subfolder: str = "", **kwargs: Any) -> None:
        path = Path(pretrained)
        check_path(path, pretrained)
        where = {"revision": revision, "subfolder": subfolder}
        if is_gguf(pretrained):
            pretrained, where = str(path.parent), {"gguf_file": path.name}
        else:
            pretrained = weights_source(pretrained) or pretrained
        self._config = AutoConfig.from_pretrained(pretrained, **where)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        if isinstance(pretrained, str) and is_gguf(pretrained):
            pretrained, kwargs["gguf_file"] = str(Path(pretrained).parent), Path(pretrained).name
        elif isinstance(pretrained, str):
            pretrained = tokenizer_source(pretrained)
        super()._create_tokenizer(pretrained, tokenizer, **kwargs)

    def _create_model(
        self,
        pretrained: str,
        dtype: str | torch.dtype = "auto",
        peft: str | None = None,
        quantization_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Load as ``load_model`` does, onto the devices that ``HFLM`` would choose, and extend."""
        for name in _REFUSED:
            kwargs.pop(name, None)
        placing = ("parallelize", "device_map", "max_memory_per_gpu", "max_cpu_memory", "offload_folder", "gpus")
        placed = self._get_accelerate_args(**{name: kwargs.pop(name, None) for name in placing})
        if quantization_config is not None:
            kwargs["quantization_config"] = quantization_config
        choice = choose_dtype_of(pretrained, dtype, None if "device_map" in placed else self._device)
        kwargs |= {"dtype": choice.dtype, **placed}
        model: Any = (load_extended if is_saved_by_us(pretrained) else load_weights)(pretrained, **kwargs)
        remember_choice(RotaryModel(model).model, choice)
        if peft is not None:
            model = _with_adapter(model, peft)
        manifests = [found[0] for source in (pretrained, peft) if source and (found := find_manifest(source))]
        counts = [manifest["tokens_trained"] for manifest in manifests]
        self._tokens_trained = None if None in counts else sum(counts)
        if self._row is not None:
            refuse_extended(model, pretrained, str(self._row["on_scaled"]))
            if is_patched(model):
                unpatch_model(model)
            patch_model(model, **self._row)
        self._model, self._config = model, model.config

    @property
    def max_length(self) -> int:
        """Tokens that lm-eval feeds at most: ``max_length`` if given, else the extended length."""
        length = self._max_length or describe(self.model)["context_length"]
        return int(super().max_length if length is None else length)

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts that lm-eval writes about the model into its results, with the extension."""
        facts = {"version": __version__, **describe(self.model), "tokens_trained": self._tokens_trained}
        return {**super().get_model_info(), "hf_posenc": {**facts, "max_length": self.max_length}}


def _with_adapter(base: Any, adapter: str) -> Any:
    if find_manifest(adapter) is not None:
        return load_extended(adapter, base=base)
    from peft import PeftModel

    with peft_renamed_attribute():
        return PeftModel.from_pretrained(base, adapter)


def _length(tokens: int | str | None) -> ContextLength | None:
    return None if tokens is None else ContextLength(tokens)
