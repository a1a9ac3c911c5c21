"""What ``hf-posenc patch`` does once its words are read: load, extend, verify, save."""

from __future__ import annotations

from typing import Any

from hf_posenc.checkpoint.extended import save_extended
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.shared_arguments import ModelArguments
from hf_posenc.evaluation.rows import refuse_extended
from hf_posenc.patching.api import is_patched, patch_model, unpatch_model, verify_model
from hf_posenc.patching.extension_config import ExtensionConfig
from hf_posenc.patching.verification import extension_words
from hf_posenc.utils.console import quiet
from hf_posenc.utils.dtypes import AUTO, CHECKPOINT


def run_patch(
    name: str,
    output: str,
    method: str | None,
    extension: ExtensionConfig,
    options: dict[str, Any],
    loading: ModelArguments,
    tokens_trained: int | None,
) -> None:
    """Save a model extended, and print how far and how well it agrees with the closed form.

    Args:
        name: Of the model on the Hub, its folder or .gguf file.
        output: Folder to write.
        method: The rule; None where there is a preset.
        extension: How far.
        options: Of the rule.
        loading: How the model is loaded.
        tokens_trained: Tokens it was fine-tuned on before; None if that is not known.

    Raises:
        ValueError, TypeError: The model and the request do not go together.
    """
    if loading.dtype == AUTO:
        loading.dtype = CHECKPOINT  # nothing is computed here but positions
    model, tokenizer = load_model(name, **vars(loading))
    refuse_extended(model, name, extension.on_scaled)
    if is_patched(model):
        unpatch_model(model)
    with quiet(patch_model.__module__):  # it is printed below
        patch_model(model, method, **vars(extension), **options, tokenizer=tokenizer)
    verification = verify_model(model)
    save_extended(model, output, tokenizer, tokens_trained=tokens_trained, base_model=name)
    print(f"{extension_words(verification.extension)}\nverified: {verification.found}\nsaved: {output}")
