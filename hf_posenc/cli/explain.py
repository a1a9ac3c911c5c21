"""``hf-posenc explain``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.shared_arguments import OptionArguments, parse, parse_options
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.methods.registry import get_method, make_method
from hf_posenc.patching.extension_config import ExtensionConfig, ExtensionRequest, check_request
from hf_posenc.utils.console import text_width
from hf_posenc.utils.files import writable_folder

if TYPE_CHECKING:
    from hf_posenc.explain.sections import Explanation
    from hf_posenc.explain.subject import Subject

# Times its length that a model is shown with an encoding, where no length is given.
_SHOWN_FACTOR = 4.0


@dataclass
class ExplainArguments:
    """Which model it is explained on, and where pictures go."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "name on the Hub, folder or .gguf file, of which only the config is read; default: the numbers of "
            "Llama 2 7B"
        },
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "folder for explain.html and the pictures; default: words only"}
    )


def explain(argv: Sequence[str]) -> None:
    """Explain in words and pictures what a method does to a model, or how an encoding works; reads the config only.

    Examples:
        hf-posenc explain yarn --model MODEL --factor 4 --output-dir yarn-in-pictures
        hf-posenc explain alibi
    """
    positional = {"name": "a method from `hf-posenc methods`, or rope, xpos, sinusoidal, learned, alibi, t5_bias, ..."}
    known = (ExplainArguments, ExtensionConfig, OptionArguments)
    given, what, extension, flags = parse("explain", explain.__doc__, argv, known, positional)
    options = parse_options(flags.option)
    if extension.rope_scaling is not None:
        raise InvalidRequestError("--rope-scaling: give explain the method by its name, and how far by --factor.")
    from hf_posenc.explain.subject import read_subject
    from hf_posenc.methods.explained import InPlaceOfRope

    instead_of_rope = issubclass(get_method(given.name), InPlaceOfRope)
    for name in ("preset", "original_max_position_embeddings") if instead_of_rope else ():
        if getattr(extension, name) is not None:
            raise InvalidRequestError(
                f"{argument(name)} is for methods that extend a model; {given.name!r} is an encoding."
            )
    check_request([] if extension.preset is not None else [given.name], extension, options)
    if what.output_dir is not None:
        writable_folder(what.output_dir)
    subject = read_subject(what.model)
    explanation = (_encoding if instead_of_rope else _method)(given.name, subject, extension, options)
    print(explanation.text(text_width()))
    if what.output_dir is not None:
        print("\n".join(["", *map(str, explanation.write(what.output_dir))]))


def _method(name: str, subject: Subject, extension: ExtensionConfig, options: dict[str, Any]) -> Explanation:
    from hf_posenc.explain.explanations import explain_method
    from hf_posenc.families.family_data import attention_capabilities
    from hf_posenc.families.refusals import TAKE_STATIC
    from hf_posenc.patching.request import resolve

    request = {**vars(extension), "rope_scaling": None}
    resolved = resolve(subject.config, ExtensionRequest.of(method=get_method(name).name, **request, **options))
    refusal = attention_capabilities().get(subject.config.model_type)
    if resolved.method.needs_hf_posenc and refusal is not None:
        raise refusal.error(resolved.method.name, TAKE_STATIC)
    return explain_method(subject, resolved)


def _encoding(name: str, subject: Subject, extension: ExtensionConfig, options: dict[str, Any]) -> Explanation:
    from hf_posenc.explain.explanations import explain_encoding

    factor = _SHOWN_FACTOR if extension.factor is None else extension.factor
    target = round(factor * subject.length) if extension.context_length is None else int(extension.context_length)
    return explain_encoding(subject, make_method(name, options=options), target)
