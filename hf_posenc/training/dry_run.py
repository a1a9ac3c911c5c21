"""A run without weights: everything that is refused before a model is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.checkpoint.extended import add_to_config
from hf_posenc.checkpoint.loading import meta_model
from hf_posenc.checkpoint.manifest import base_of_adapter, find_manifest, is_encoding
from hf_posenc.checkpoint.pretrained import auto_class, is_gguf
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.training.base_model_facts import ModelFacts
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.conflicts import Combination, refuse_conflicts
from hf_posenc.training.data import Documents, make_blocks, read_texts
from hf_posenc.training.extending import check_extended, extend
from hf_posenc.training.launch import Launch
from hf_posenc.training.run_plan import plan_run
from hf_posenc.utils.console import quiet


def dry_run(
    name: str,
    config: FinetuneConfig,
    launch: Launch,
    *,
    attention: str | None = None,
    is_quantised: bool | None = None,
    texts: tuple[PreTrainedTokenizerBase, Documents] | None = None,
) -> None:
    """Plan a run from the model's config.json, and extend a model without weights as the run will.

    Of a ``.gguf`` file, an adapter, a model that reads images or has another encoding than RoPE only the settings and
    the launch are checked, and so where no model can be built from a config, which loading it reports.

    Args:
        name: Name of the model on the Hub, or its folder.
        config: The run.
        launch: How the processes of the run were started.
        attention: ``attn_implementation``; None leaves it to Transformers.
        is_quantised: The weights will be quantised; None if that is not known.
        texts: The tokenizer and the documents, to make blocks of them too; None leaves that to the run.

    Raises:
        ValueError: As ``finetune`` would raise once the weights are loaded.
    """
    with quiet("hf_posenc", level=logging.ERROR):  # the run itself will say it all
        model = _model_without_weights(name, attention)
        if model is None:
            refuse_conflicts(Combination(config, launch, attention, is_quantised, seq_len=config.seq_len))
            return
        rotary = RotaryModel(model)
        plan = plan_run(config, ModelFacts.of(rotary, is_quantised=is_quantised), launch)
        for stage in plan.stages:
            extend(rotary, stage.extension)
            check_extended(rotary, adapters=plan.step.lora is not None, group=stage.group)
        if texts is not None:
            tokenizer, documents = texts
            vocab_size = rotary.text_config.vocab_size
            read = read_texts(tokenizer, documents, None, plan.data, vocab_size)
            for stage in plan.stages:
                make_blocks(tokenizer, read, plan.data, stage, vocab_size)


def _model_without_weights(name: str, attention: str | None) -> PreTrainedModel | None:
    """Return a model on the meta device as it will be loaded; None where only loading it tells."""
    path = Path(name).expanduser()
    if is_gguf(name) or base_of_adapter(name) is not None:
        return None
    manifest_in_folder = find_manifest(name)
    manifest = None if manifest_in_folder is None else manifest_in_folder[0]
    if manifest is not None and is_encoding(manifest):
        return None
    model = _build(str(path) if path.exists() else name, attention)
    if model is not None and manifest is not None:
        add_to_config(model, manifest)
    return model


def _build(source: str, attention: str | None) -> PreTrainedModel | None:
    try:
        config = AutoConfig.from_pretrained(source)
        is_other = auto_class(source, {"config": config}) is not AutoModelForCausalLM
        return None if is_other else meta_model(config, attention=attention)
    except (OSError, ImportError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
