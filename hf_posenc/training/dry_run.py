"""A run gone through on a model without data: what its ``config.json`` rules out is said before weights are loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_posenc.checkpoint.extended import add_to_config
from hf_posenc.checkpoint.manifest import base_of_adapter, find_manifest, is_encoding
from hf_posenc.checkpoint.pretrained import auto_class, is_gguf
from hf_posenc.patching.api import is_patched, unpatch_model
from hf_posenc.planning.shapes import meta_model
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.extending import begin, check_model_levers
from hf_posenc.training.fitting import fit_recipe
from hf_posenc.training.stages import settings_of_stages
from hf_posenc.utils.console import quiet


def dry_run(name: str, config: FinetuneConfig, *, attention: str | None = None) -> None:
    """Extend a model without data as a run will, and each stage of it, and check that its lengths go together.

    Of a ``.gguf`` file, an adapter, a model that reads images or has another encoding than RoPE nothing is said before
    it is loaded; nor where no model can be built from a config, which loading it says.

    Args:
        name: Of the model on the Hub, or its folder.
        config: The run.
        attention: ``attn_implementation``; None leaves it to Transformers.

    Raises:
        ValueError: As ``finetune`` would raise once the weights are loaded.
    """
    path = Path(name).expanduser()
    if is_gguf(name) or base_of_adapter(name) is not None:
        return
    found = find_manifest(name)
    manifest = None if found is None else found[0]
    if manifest is not None and is_encoding(manifest):
        return
    with quiet("hf_posenc", level=logging.ERROR):  # the run itself will say it all
        model = _build(str(path) if path.exists() else name, attention)
        if model is None:
            return
        if manifest is not None:
            add_to_config(model, manifest)
        _go_through(model, config)


def _go_through(model: PreTrainedModel, config: FinetuneConfig) -> None:
    config = fit_recipe(model, config)
    check_model_levers(model, config)
    if config.stages is None:
        begin(model, config)
        return
    for one in settings_of_stages(model, config)[1]:
        begin(model, one)
        if is_patched(model):
            unpatch_model(model)


def _build(source: str, attention: str | None) -> PreTrainedModel | None:
    try:
        config = AutoConfig.from_pretrained(source)
        other = auto_class(source, {"config": config}) is not AutoModelForCausalLM
        return None if other else meta_model(config, attention=attention)
    except (OSError, ImportError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
