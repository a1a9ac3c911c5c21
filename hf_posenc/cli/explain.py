"""``hf-posenc explain``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_posenc.cli.explain_arguments import ExplainArguments
from hf_posenc.cli.request_checks import check_request
from hf_posenc.cli.shared_arguments import ExtensionArguments
from hf_posenc.explaining.encoding_sections import encoding_sections
from hf_posenc.explaining.encodings_facts import ENCODING_FACTS, encoding_of, encoding_options
from hf_posenc.explaining.method_sections import method_sections, method_title
from hf_posenc.explaining.sections import Section, section_panels, section_text
from hf_posenc.explaining.subject import Subject, read_subject
from hf_posenc.families.discovery import door_capabilities
from hf_posenc.families.refusals import TAKE_STATIC
from hf_posenc.gallery.pages import check_output_folder, write_page
from hf_posenc.methods.registry import get_method, methods
from hf_posenc.patching.request import resolve
from hf_posenc.spec import check_length, check_number, unknown_name
from hf_posenc.utils.units import length_name

# Times its length that a model is looked at with an encoding, where nothing is asked.
_LOOKED_AT = 4.0


def run_explain(
    name: str, what: ExplainArguments, extension: ExtensionArguments, options: dict[str, Any], width: int = 100
) -> str:
    """Return what the command prints; with an output folder, write a page and its pictures too.

    Args:
        name: A method or an encoding.
        what: Which model, and the folder.
        extension: How far.
        options: Of the method or the encoding.
        width: Columns of the text.

    Raises:
        ValueError, TypeError: The name is unknown, the request does not fit the model, or the folder is a file.
    """
    if extension.rope_scaling is not None:
        raise ValueError("--rope-method: explain is told the method by its name, and how far by --factor.")
    encoding = encoding_of(name)
    if encoding is None:
        _check_method(name, extension, options)
    else:
        options = encoding_options(encoding, options)
        _check_encoding(encoding, extension)
    folder = None if what.output_dir is None else check_output_folder(what.output_dir)
    subject = read_subject(what.model)
    title, sections = (
        _method(name, subject, extension, options)
        if encoding is None
        else _encoding(encoding, subject, extension, options)
    )
    parts = [title, subject.sentence, "", *(section_text(section, width) + "\n" for section in sections)]
    text = "\n".join(parts).rstrip()
    return text if folder is None else "\n".join([text, "", *map(str, _write(folder, title, subject, sections))])


def _check_method(name: str, extension: ExtensionArguments, options: dict[str, Any]) -> None:
    known = {other for method in methods().values() for other in (method.name, *method.aliases)}
    key = name.lower().replace("-", "_")
    if key not in known:
        raise unknown_name("method or encoding", name, sorted(known | ENCODING_FACTS.keys()), key)
    check_request([] if extension.preset is not None else [name], extension, options)


def _check_encoding(name: str, extension: ExtensionArguments) -> None:
    """Refuse what says how to stretch: of an encoding only the length to look at is asked for."""
    for field in ("preset", "original_max_position_embeddings"):
        if getattr(extension, field) is not None:
            raise ValueError(
                f"--{field.replace('_', '-')} is for methods that extend a model; {name!r} is an encoding."
            )
    if extension.factor is not None and extension.context_length is not None:
        raise ValueError(f"give --factor or --context-length, not both (got {extension.factor:g} and more).")


def _method(
    name: str, subject: Subject, extension: ExtensionArguments, options: dict[str, Any]
) -> tuple[str, list[Section]]:
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
    return method_title(resolved), method_sections(subject, resolved)


def _encoding(
    name: str, subject: Subject, extension: ExtensionArguments, options: dict[str, Any]
) -> tuple[str, list[Section]]:
    if extension.context_length is not None:
        target = check_length("context_length", extension.context_length)
    else:
        factor = _LOOKED_AT if extension.factor is None else check_number("factor", extension.factor, at_least=1)
        target = round(factor * subject.length)
    title = f"{ENCODING_FACTS[name].title}, looked at to {length_name(target)} tokens"
    return title, encoding_sections(name, subject, options, target)


def _write(folder: Path, title: str, subject: Subject, sections: Sequence[Section]) -> list[Path]:
    panels = [panel for section in sections for panel in section_panels(section)]
    return write_page(folder, "explain.html", f"{title} ({subject.name})", panels)
