"""A copy of a GGUF file with the rule of a folder in it.

The file format is documented at ggml's ``docs/gguf.md``: metadata, then name, shape and place of each tensor, then the
tensors' data. Metadata and data that stay are copied as bytes, so that any quantisation passes unchanged.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hf_posenc.checkpoint.pretrained import SCALING_TENSORS, is_gguf, open_gguf
from hf_posenc.errors import InvalidRequestError, MissingFileError
from hf_posenc.exports.folder import ExportFolder, command, notes_for_servers, read_folder
from hf_posenc.exports.llama_cpp import ARCHITECTURES, LLAMA_SERVER, metadata_of, notes_on_lists, tensors_of
from hf_posenc.exports.stacks import STACKS, checked_for, title_of
from hf_posenc.utils.console import Progress
from hf_posenc.utils.units import size_name

if TYPE_CHECKING:
    from gguf import GGUFReader

_PIECE = 64 * 2**20  # bytes that are copied at once
# Of gguf.GGUFValueType and gguf.GGMLQuantizationType.
_TYPES = {int: (4, "<I"), float: (6, "<f"), str: (8, "")}
_F32 = 0


def gguf_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file that make llama.cpp run the rule of a folder of ``save_extended``.

    Where llama.cpp has no keys for a rule, or does not read them from a file, its tensors are returned by
    ``gguf_tensors``. Metadata has floats in 32 bits.

    Returns:
        ``{arch}.context_length`` and ``{arch}.rope.scaling.original_context_length`` in tokens (int),
        ``{arch}.rope.scaling.type`` (str), the others float.

    Raises:
        FileNotFoundError: There is no manifest, or no config.json.
        ValueError: llama.cpp cannot express the rule, or its reading of the family was not checked.
    """
    return metadata_of(checked_for(STACKS["llama.cpp"], read_folder(path))[0])


def gguf_tensors(path: str | Path) -> dict[str, list[float]]:
    """Return the divisors per pair that the GGUF file needs as float32 tensors; empty if metadata say the rule.

    ``rope_freqs.weight`` is plain / scaled frequency of each pair, for every rule that metadata cannot say; longrope
    with two lists is two tensors, of which llama.cpp takes one by the length that a server is started with. Errors are
    those of ``gguf_metadata``.
    """
    return tensors_of(checked_for(STACKS["llama.cpp"], read_folder(path))[0])


def export_gguf(
    path: str | Path, output: str | Path, *, base: str | Path | None = None, as_method: str | None = None
) -> str:
    """Write a GGUF file that llama.cpp, Ollama and LM Studio run with the rule of a folder of ``save_extended``.

    Tensors and vocabulary are copied from another file; its own rule, if it has one, is left out. Memory does not grow
    with the file.

    Args:
        path: The folder.
        output: The file to write; it must not exist.
        base: A GGUF file of the same model, in any quantisation: converted from the folder, or, if the weights were
            not trained since, of the base model.
        as_method: As for ``export_command``.

    Returns:
        The command that serves the file, and comments; lines for a POSIX shell.

    Raises:
        FileNotFoundError: There is no manifest, no config.json, or no such base.
        ValueError: llama.cpp cannot express the rule, the base is none, another model's or in parts, or the disk is too
            small. Nothing is left of the output.
        ImportError: The gguf package is not installed.
    """
    folder, comments = checked_for(STACKS["llama.cpp"], read_folder(path), as_method)
    metadata = metadata_of(folder)
    target = _check_output(output)
    if base is None:
        raise InvalidRequestError(
            "--to gguf needs --base (base=...): a GGUF file of the same model, to copy tensors and vocabulary from. "
            f"llama.cpp's converter makes one: {command('python', 'convert_hf_to_gguf.py', folder.path)} --outfile "
            f"base.gguf. If the weights were not trained since, a published GGUF of {folder.base_model} will do."
        )
    source = Path(base).expanduser()
    if not source.is_file():
        raise MissingFileError(f"there is no file {str(base)!r} to take the tensors from (--base).")
    reader = open_gguf(source)
    _check_base(folder, source, reader)
    _copy(reader, target, metadata, tensors_of(folder))
    trained = folder.manifest["tokens_trained"]
    may_be = "may have been" if trained is None else "was"
    weights = [f"# the weights are those of {source.name}; this model {may_be} fine-tuned: is that its own file?"]
    return "\n".join(
        [
            f"{title_of(folder)}checked with {LLAMA_SERVER}",
            *comments,
            *notes_on_lists(folder),
            *(weights if trained != 0 else []),
            command("llama-server", "-m", str(target), "-c", folder.context_length),
            *notes_for_servers(folder),
        ]
    )


def _check_output(output: str | Path) -> Path:
    target = Path(output).expanduser()
    if not is_gguf(target):
        raise InvalidRequestError(f"--output takes the name of a .gguf file to write, got {str(output)!r}.")
    if target.exists():
        raise InvalidRequestError(f"{str(output)!r} exists already: give another --output, or remove it.")
    if not target.parent.is_dir():
        raise MissingFileError(f"there is no folder {str(target.parent)!r} to write {target.name} to.")
    return target


def _check_base(folder: ExportFolder, source: Path, reader: GGUFReader) -> None:
    """Raise unless a file holds the whole of a model of the same sizes.

    Raises:
        ValueError: With what differs.
    """
    if reader.byte_order == "S":
        raise InvalidRequestError(f"{source.name} is in the other byte order than this machine's. Convert it again.")
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    arch, config = ARCHITECTURES[folder.model_type], folder.config
    rows = {tensor.name: int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"}
    sizes = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads") or config["num_attention_heads"],
    }
    wanted = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in sizes.items()}}
    values = {key: metadata[key] for key in wanted if key in metadata}
    wanted["rows of token_embd.weight"], values["rows of token_embd.weight"] = (
        config["vocab_size"],
        rows.get("token_embd.weight"),
    )
    differ = [
        f"{key} is {values[key]} there and {value} in the folder"
        for key, value in wanted.items()
        if key in values and values[key] != value
    ]
    if differ:
        raise InvalidRequestError(f"{source.name} holds another model than {folder.path!r}: {'; '.join(differ)}.")


def _copy(reader: GGUFReader, target: Path, metadata: dict[str, Any], added: dict[str, list[float]]) -> None:
    """Write a file with other metadata and tensors of a rule, whole or not at all."""
    arch = next(iter(metadata)).partition(".")[0]
    # All of an earlier rule, in today's keys and in the one before (rope.scale_linear).
    old = (f"{arch}.rope.scaling.", f"{arch}.rope.scale_linear")
    kept = [field for name, field in reader.fields.items() if not name.startswith(("GGUF.", *old))]
    keys = [_raw(reader, field) for field in kept if field.name not in metadata]
    keys += [_key(name, value) for name, value in metadata.items()]
    tensors = [tensor for tensor in reader.tensors if tensor.name not in SCALING_TENSORS]
    data = {name: struct.pack(f"<{len(values)}f", *values) for name, values in added.items()}

    infos, end = [], 0
    alignment = int(reader.alignment)  # in files that state it, a number of numpy's with 32 bits
    sizes = [(_raw(reader, tensor.field)[:-8], int(tensor.n_bytes)) for tensor in tensors]  # without the place
    sizes += [(_string(name) + struct.pack("<IQI", 1, len(added[name]), _F32), len(raw)) for name, raw in data.items()]
    for info, size in sizes:
        infos.append(info + struct.pack("<Q", end))
        end += -(-size // alignment) * alignment
    version = int(reader.fields["GGUF.version"].contents())
    head = struct.pack("<4sIQQ", b"GGUF", version, len(infos), len(keys)) + b"".join([*keys, *infos])
    head += bytes(-len(head) % alignment)
    with _written(target, len(head) + end) as file:
        file.write(head)
        pieces: list[Any] = [reader.data[tensor.data_offset :][: tensor.n_bytes] for tensor in tensors] + list(
            data.values()
        )
        with Progress(f"writing {target.name}", end, unit="bytes") as progress:
            for raw in pieces:
                for start in range(0, len(raw), _PIECE):
                    file.write(raw[start : start + _PIECE])
                file.write(bytes(-len(raw) % alignment))
                progress.update(len(raw))


@contextmanager
def _written(target: Path, size: int) -> Iterator[BinaryIO]:
    """Open a file beside ``target`` that takes its name at the end; of one that is not finished nothing is left.

    Raises:
        ValueError: The disk is too small, or became full.
    """
    free = shutil.disk_usage(target.parent).free
    needs = f"{target.name} takes {size_name(size)}"
    if free < size:
        raise InvalidRequestError(f"{needs}, and {size_name(free)} are free in {str(target.parent)!r}.")
    partial = target.with_name(f"{target.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems say only here that they are full
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidRequestError(
            f"{str(target)!r} could not be written ({(error.strerror or str(error)).lower()}): {needs}. "
            "Nothing is left of it."
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _raw(reader: GGUFReader, field: Any) -> bytes:
    """Return the bytes of a key with its value, or of what a file says of a tensor."""
    return reader.data[field.offset : field.offset + sum(int(part.nbytes) for part in field.parts)].tobytes()


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _key(name: str, value: int | float | str) -> bytes:
    number, layout = _TYPES[type(value)]
    packed = _string(value) if isinstance(value, str) else struct.pack(layout, value)
    return _string(name) + struct.pack("<I", number) + packed
