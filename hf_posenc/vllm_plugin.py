"""A plugin of vLLM: requests up to the original length are read by the unextended model, longer ones by its extension.

vLLM has one rule for all requests, so a static extension costs short ones quality. Here the tables of cosines and sines
begin with the rows of the unextended model, one for each position of the original length L, and the rows of the rule
follow. All positions of a request that may become longer than L are raised by L, so that it reads rows of the rule
alone. Weights that were trained with the rule are an adapter of such a request. The mode is decided when a request is
admitted, and never changes. No kernel is touched, and blocks of the prefix cache are shared within a mode only.

vLLM finds ``register`` by the entry point group ``vllm.general_plugins``. Nothing of vLLM is imported before it does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc.errors import InvalidRequestError
from hf_posenc.utils.import_hooks import wrap
from hf_posenc.version import VLLM_KEY, VLLM_TESTED

logger = logging.getLogger("vllm.hf_posenc")  # shown by vLLM, whose loggers have a handler

EXTENSION = "extension"  # in a request's extra_args, which are vllm_xargs over HTTP
AUTO, ON, OFF = "auto", "on", "off"
_MARK = "hf_posenc_original_length"  # on a model, whose tables hold both
_SALT = "hf_posenc:extended"
_ADAPTER_ID = 2**30  # of LoRA requests, which vLLM's server counts from 1
_LONGROPE = "long_short_cos_sin_cache"
_NO_TABLES = (
    "hf_posenc's plugin knows no table of cosines and sines in this model ({}). Serve it with its rule for all "
    "requests: start vLLM with VLLM_PLUGINS= in the environment."
)


@dataclass(frozen=True)
class Modes:
    """What a served folder is read with; lengths in tokens.

    Attributes:
        original: The length that the unextended model reads.
        rope: Its ``rope_parameters``.
        adapter: The folder of the adapter that extended requests are read with, if there is one.
    """

    original: int
    rope: Mapping[str, Any]
    adapter: str | None = None

    def admit(self, request: Any) -> None:
        """Decide the mode of a request, and write it into it.

        Raises:
            VLLMValidationError: No such mode, or a request without the extension that may become too long for it.
        """
        params = request.sampling_params
        prompt = len(request.prompt_token_ids if request.prompt_token_ids is not None else request.prompt_embeds)
        most = prompt + (0 if params is None else params.max_tokens)
        wanted = AUTO if params is None else (params.extra_args or {}).get(EXTENSION, AUTO)
        if wanted not in (AUTO, ON, OFF):
            raise _refusal(f"{EXTENSION} must be {AUTO!r}, {ON!r} or {OFF!r}, got {wanted!r}.")
        if wanted == OFF and most > self.original:
            raise _refusal(
                f"{EXTENSION}='off' reads up to {self.original} tokens, and this request may get {most}, {prompt} of "
                f"them in the prompt. Lower max_tokens, or leave {EXTENSION} out."
            )
        is_extended = wanted == ON or (wanted == AUTO and most > self.original)
        if params is not None:
            params.extra_args = {**(params.extra_args or {}), EXTENSION: ON if is_extended else OFF}
        if is_extended:
            request.cache_salt = f"{_SALT}:{request.cache_salt or ''}"
            if self.adapter is not None:
                if request.lora_request is not None:
                    raise _refusal(
                        f"this request may get {most} tokens, for which the server has an adapter, and names another "
                        f"one. Leave that out, or ask for at most {self.original} tokens, prompt and max_tokens."
                    )
                request.lora_request = _adapter_request(self.adapter)

    def is_extended(self, state: Any) -> bool:
        """Say what ``admit`` decided; ``state`` is a worker's ``CachedRequestState``."""
        if state.sampling_params is None:  # of a pooling model
            return bool(state.num_prompt_tokens > self.original)
        return bool((state.sampling_params.extra_args or {}).get(EXTENSION) == ON)  # a warm-up was not admitted

    def put_before(self, model: Any) -> None:
        """Put the rows of the unextended model before those of the rule.

        Raises:
            ValueError: There is no table, or one of a kind that the plugin does not know.
        """
        from vllm.model_executor.layers.rotary_embedding import get_rope

        rotary = [module for module in model.modules() if ".rotary_embedding." in type(module).__module__]
        rotary = [module for module in rotary if dict(module.named_buffers(recurse=False))]
        unknown = {type(module).__name__ for module in rotary if _table_of(module) is None}
        if unknown or not rotary:
            raise InvalidRequestError(_NO_TABLES.format(", ".join(sorted(unknown)) or "the model has none"))
        for module in rotary:
            name = str(_table_of(module))
            rule: torch.Tensor = getattr(module, name)
            rope = {**self.rope, "rope_dim": rule.shape[1]}
            style = getattr(module, "is_neox_style", True)  # of those without, there is no other
            with torch.device(rule.device):
                own = get_rope(module.head_size, self.original, style, rope, rule.dtype).cos_sin_cache
            if name == _LONGROPE:  # the rows of its short list come first
                rule, module.use_long_rope = rule[module.original_max_position_embeddings :], False
            setattr(module, name, torch.cat([own[: self.original].to(rule), rule]))
        setattr(model, _MARK, self.original)

    def raise_positions(self, runner: Any, num_tokens: int) -> None:
        """Raise the positions of the extended requests of a step."""
        requests = [runner.requests[name] for name in runner.input_batch.req_ids]
        offsets = [self.original * self.is_extended(request) for request in requests]
        if any(offsets):
            device = runner.positions.device
            of_request = torch.tensor(offsets, dtype=runner.positions.dtype).to(device, non_blocking=True)
            runner.positions[:num_tokens] += of_request[runner.req_indices.gpu[:num_tokens].long()]


def register() -> None:
    """Let vLLM serve extended folders in both modes; other models are served as before."""
    import vllm
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not vllm.__version__.startswith(VLLM_TESTED):
        logger.warning(
            "hf_posenc's plugin was tested with vLLM %s* and this is %s: extended models are served with their rule "
            "for all requests.",
            VLLM_TESTED,
            vllm.__version__,
        )
        return

    def load_model(call: Callable[..., Any], loader: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = call(loader, vllm_config, *args, **kwargs)
        if (modes := modes_for(vllm_config)) is not None:
            modes.put_before(model)
            # In the key to compiled code, which knows the size of the tables.
            if isinstance(vllm_config.additional_config, dict):
                vllm_config.additional_config[_MARK] = modes.original
        return model

    def process_inputs(call: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
        request = call(processor, *args, **kwargs)
        if (modes := _modes(processor)) is not None:
            modes.admit(request)
        return request

    def preprocess(call: Callable[..., Any], runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if (modes := _modes(runner)) is not None:
            if not hasattr(runner.get_model(), _MARK):
                raise InvalidRequestError(_NO_TABLES.format("it was loaded by another loader"))
            modes.raise_positions(runner, scheduled.total_num_scheduled_tokens)
        return call(runner, scheduled, *args, **kwargs)

    wrap(BaseModelLoader, "load_model", load_model)
    wrap(InputProcessor, "process_inputs", process_inputs)
    wrap(GPUModelRunner, "_preprocess", preprocess)


def _table_of(module: Any) -> str | None:
    """Return the name of a rotary module's table; None if it has one that is not known, or a second copy."""
    return next((name for name in ("cos_sin_cache", _LONGROPE) if set(dict(module.named_buffers())) == {name}), None)


def _adapter_request(path: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(_SALT, _ADAPTER_ID, path)


def _refusal(message: str) -> Exception:
    """Return the error that vLLM answers with the status 400."""
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(message)
    return error


def _modes(owner: Any) -> Modes | None:
    """Return the modes of what an engine or a worker serves, found once: this is asked in every step."""
    if _MARK not in owner.__dict__:
        owner.__dict__[_MARK] = modes_for(owner.vllm_config)
    modes: Modes | None = owner.__dict__[_MARK]
    return modes


def modes_for(vllm_config: Any) -> Modes | None:
    """Return the modes of what is served; None for a model that is not extended, or has one mode.

    Raises:
        ValueError: An adapter is named, and long requests cannot be read with it and its rule.
    """
    against = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "model runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": vllm_config.use_v2_model_runner,
        "multi-head latent attention": vllm_config.model_config.use_mla,
    }
    reasons = [name for name, given in against.items() if given]
    adapter = vllm_config.additional_config.get(VLLM_KEY) if isinstance(vllm_config.additional_config, dict) else None
    if adapter is None:
        return modes_of(str(vllm_config.model_config.model), *reasons)
    from hf_posenc.exports.folder import read_folder

    folder, served = read_folder(adapter), vllm_config.model_config.hf_text_config.rope_parameters
    if vllm_config.lora_config is None:
        reasons.append("a server without --enable-lora")
    elif vllm_config.lora_config.max_loras < 2 and vllm_config.device_config.device_type == "cpu":
        reasons.append("--max-loras 1: on a CPU, short requests beside long ones get the adapter too")
    if folder.adapter is None or {**served, **folder.rope} != dict(served):
        reasons.append("a server without the rule of the adapter")
    modes = modes_of(adapter, *reasons)
    if modes is None:
        raise InvalidRequestError(
            f"--additional-config names {adapter!r} for long requests, and they cannot be read with it; the log says "
            "why. hf-posenc export FOLDER --to vllm prints the command."
        )
    return modes


@functools.cache
def modes_of(path: str, *against: str) -> Modes | None:
    """Return the modes of a folder; None if it is not extended, or all requests are to be read with its rule.

    Args:
        path: What is served: a folder, or a name on the Hub, which has no modes; or the folder of an adapter.
        *against: Why vLLM cannot serve both, if it cannot; it is logged with what the folder says against it.
    """
    from hf_posenc.methods.base import MANIFEST

    if not (Path(path) / MANIFEST).is_file():
        return None
    from hf_posenc.exports.folder import read_folder

    folder = read_folder(path)
    reasons = [*against, *folder.against_two_modes()]
    if reasons:
        logger.warning(
            "hf_posenc: all requests to %s are read with its rule (%s), short ones too, because of %s.",
            path,
            folder.manifest["method"],
            " and ".join(reasons),
        )
        return None
    original, rope = folder.unextended()
    logger.info(
        "hf_posenc: requests to %s whose prompt and max_tokens are at most %d tokens are read without the extension.",
        path,
        original,
    )
    return Modes(original, rope, folder.adapter)
