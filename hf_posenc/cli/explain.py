"""``hf-posenc explain``."""

from __future__ import annotations

from typing import Any

from hf_posenc.cli.explain_arguments import ExplainArguments
from hf_posenc.errors import InvalidRequestError
from hf_posenc.explain.explanations import explain_encoding, explain_method
from hf_posenc.explain.sections import Explanation, check_output_folder
from hf_posenc.explain.subject import Subject, read_subject
from hf_posenc.families.discovery import door_capabilities
from hf_posenc.families.refusals import TAKE_STATIC
from hf_posenc.methods.explained import InPlaceOfRope
from hf_posenc.methods.registry import get_method, make_method
from hf_posenc.patching.extension_config import ExtensionConfig, check_request
from hf_posenc.patching.request import resolve

# Times its length that a model is shown with an encoding, where no length is given.
_LOOKED_AT = 4.0


def run_explain(
    name: str, what: ExplainArguments, extension: ExtensionConfig, options: dict[str, Any], width: int = 100
) -> str:
    """Return what the command prints; with an output folder, write a page and its pictures too.

    Args:
        name: A method, or an encoding in place of RoPE.
        what: Which model, and the folder.
        extension: How far.
        options: Of the method.
        width: Columns of the text.

    Raises:
        ValueError, TypeError: The name is unknown, the request does not fit the model, or the folder is a file.
    """
    if extension.rope_scaling is not None:
        raise InvalidRequestError("--rope-method: give explain the method by its name, and how far by --factor.")
    in_place_of_rope = issubclass(get_method(name), InPlaceOfRope)
    if in_place_of_rope:
        for field in ("preset", "original_max_position_embeddings"):
            if getattr(extension, field) is not None:
                flag = field.replace("_", "-")
                raise InvalidRequestError(f"--{flag} is for methods that extend a model; {name!r} is an encoding.")
    check_request([] if extension.preset is not None else [name], extension, options)
    folder = None if what.output_dir is None else check_output_folder(what.output_dir)
    subject = read_subject(what.model)
    explanation = (_encoding if in_place_of_rope else _method)(name, subject, extension, options)
    text = explanation.text(width)
    return text if folder is None else "\n".join([text, "", *map(str, explanation.write(folder))])


def _method(name: str, subject: Subject, extension: ExtensionConfig, options: dict[str, Any]) -> Explanation:
    resolved = resolve(
        subject.config,
        get_method(name).name,
        extension.factor,
        options,
        context_length=extension.context_length,
        original_max_position_embeddings=extension.original_max_position_embeddings,
        preset=extension.preset,
        sliding_window=extension.sliding_window,
        on_scaled=extension.on_scaled,
    )
    refusal = door_capabilities().get(subject.config.model_type)
    if resolved.method.runs_in_attention and refusal is not None:
        raise refusal.error(resolved.method.name, TAKE_STATIC)
    return explain_method(subject, resolved)


def _encoding(name: str, subject: Subject, extension: ExtensionConfig, options: dict[str, Any]) -> Explanation:
    factor = _LOOKED_AT if extension.factor is None else extension.factor
    target = round(factor * subject.length) if extension.context_length is None else int(extension.context_length)
    return explain_encoding(subject, make_method(name, options=options), target)
