"""Weights, tokenizers and single files of a checkpoint, before anything is extended.

From a name on the Hugging Face Hub, a folder or a ``.gguf`` file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_posenc.checkpoint.plain_loading import plain_loading
from hf_posenc.errors import InvalidRequestError, MissingFileError, MissingPackageError
from hf_posenc.families.rotary_model import RotaryModel

if TYPE_CHECKING:
    from gguf import GGUFReader

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_HUB_SECONDS = 5.0  # that the Hub may take to answer at all
_WHERE = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
_NO_ERRORS_FOR = ("missing_entries", "connection_errors", "gated_repo")


def hub_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``from_pretrained``'s arguments that say where on the Hub a checkpoint is, and who asks."""
    return {key: kwargs[key] for key in _WHERE if kwargs.get(key) is not None}


def folder_with(source: str | Path, names: Sequence[str], kwargs: Mapping[str, Any] | None = None) -> Path | None:
    """Return the folder that holds files of a checkpoint; those of one on the Hub are downloaded to the cache.

    Args:
        source: A folder, or a name on the Hub.
        names: The files. Missing ones are no error.
        kwargs: ``from_pretrained``'s; ``revision``, ``token``, ``cache_dir``, ``subfolder`` and ``local_files_only``
            are read.

    Returns:
        The folder; None if it has none of the files, or if there is no such folder and no such name.
    """
    where = hub_arguments(kwargs or {})
    local = Path(source).expanduser()
    if local.exists():
        folder = local / where.get("subfolder", "")
        return folder if any((folder / name).is_file() for name in names) else None
    from transformers.utils.hub import cached_files

    quietly: Any = {f"_raise_exceptions_for_{what}": False for what in _NO_ERRORS_FOR}
    try:
        files = cached_files(str(source), list(names), **where, **quietly)
    except (OSError, ValueError):  # no name on the Hub
        return None
    return Path(files[0]).parent if files else None


def check_may_read(source: str | Path, kwargs: Mapping[str, Any]) -> None:
    """Raise what keeps a checkpoint from being read, if it is no folder here: why the Hub does not give it.

    Args:
        source: A folder, or a name on the Hub.
        kwargs: ``from_pretrained``'s, as for ``folder_with``.

    Raises:
        FileNotFoundError: It is the path of a folder that is not there.
        HubAccessError: There is no such repository, or the token may not read it.
        HubUnreachableError: The Hub cannot be asked, and the config was not downloaded before.
        ValueError: The repository has no such revision.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import RemoteEntryNotFoundError

    from hf_posenc.utils.hub import hub_errors, is_repo_id

    name, revision, subfolder = str(source), kwargs.get("revision"), kwargs.get("subfolder") or None
    if Path(name).expanduser().exists():
        return
    if not is_repo_id(name):
        raise MissingFileError(f"there is no folder {name!r}, and it is no name on the Hugging Face Hub (OWNER/NAME).")
    configs = [f"{subfolder}/{one}" if subfolder else one for one in (CONFIG, ADAPTER_CONFIG)]
    if any(
        isinstance(hub.try_to_load_from_cache(name, config, kwargs.get("cache_dir"), revision), str)
        for config in configs
    ):
        return
    url = hub.hf_hub_url(name, CONFIG, subfolder=subfolder, revision=revision)
    advice = "There is no such folder here either. A folder has config.json and *.safetensors; or give a .gguf file."
    with hub_errors(name, "read", advice):
        try:
            hub.get_hf_file_metadata(url, token=kwargs.get("token"), timeout=_HUB_SECONDS)
        except RemoteEntryNotFoundError:
            return  # the repository is there, and holds something else


# llama.cpp writes Llama 3.1's and LongRoPE's divisors as tensors, not as metadata.
SCALING_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def is_gguf(source: str | Path) -> bool:
    """Return whether a model's name is that of a ``.gguf`` file."""
    return str(source).endswith(".gguf")


def load_weights(source: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model as its checkpoint says, from safetensors or a ``.gguf`` file only.

    Args:
        source: What ``from_pretrained`` takes, or the path of a ``.gguf`` file, whose weights are dequantised.
        **kwargs: ``from_pretrained``'s.

    Raises:
        ValueError: Weights are missing or damaged, or a ``.gguf`` is scaled (see ``refuse_gguf_scaling``).
        ImportError: A ``.gguf`` file, and the package that reads it is not installed.
    """
    if is_gguf(source):
        return _load_gguf(Path(source), kwargs)
    return _from_pretrained(source, **{"use_safetensors": True, **kwargs})


@contextmanager
def expecting_keys(pattern: str) -> Iterator[None]:
    """While open, Transformers does not report weights of such names, which no class of its own has."""
    before = PreTrainedModel._keys_to_ignore_on_load_unexpected
    PreTrainedModel._keys_to_ignore_on_load_unexpected = [*(before or ()), pattern]
    try:
        yield
    finally:
        PreTrainedModel._keys_to_ignore_on_load_unexpected = before


def load_tokenizer(source: str | Path, model: PreTrainedModel | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is with a model; one that does not know its length gets that of the model, if given."""
    if not is_gguf(source):
        # The config at hand: that of a model with another encoding than RoPE, read again, would be complained of.
        return AutoTokenizer.from_pretrained(str(source), **({} if model is None else {"config": model.config}))
    path = Path(source)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if model is not None and tokenizer.model_max_length > 1e9:  # Transformers' word for "unknown"
        tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    return tokenizer


def _from_pretrained(source: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Load weights; Transformers makes up those that are missing, with a log line, which is no use here."""
    try:
        with plain_loading():
            loaded: Any = auto_class(source, kwargs).from_pretrained(source, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise InvalidRequestError(
            f"the weights of {str(source)!r} cannot be read ({error}): a file is damaged or was cut off. Get it again."
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise InvalidRequestError(
            f"{str(source)!r} lacks {len(missing)} of the model's weights, such as {missing[0]}. "
            "The download or the conversion is incomplete: get it again."
        )
    return model  # type: ignore[no-any-return]  # from_pretrained is untyped


def auto_class(source: str | Path, kwargs: dict[str, Any]) -> Any:
    """Return the class that loads a checkpoint as it was saved: a classifier with its head, a vision tower with it.

    Args:
        source: What ``from_pretrained`` takes.
        kwargs: ``from_pretrained``'s; a ``config`` in them is taken instead of the checkpoint's.

    Returns:
        An auto class for models that predict tokens, else the class itself.
    """
    if "gguf_file" in kwargs:
        return AutoModelForCausalLM
    where = hub_arguments(kwargs)
    config = kwargs.get("config") or AutoConfig.from_pretrained(source, **where)
    return _class_that_loads((getattr(config, "architectures", None) or [None])[0])


def auto_class_of(model: PreTrainedModel) -> str:
    """Return the name of what loads a model of this class, as ``auto_class`` has it."""
    return str(_class_that_loads(type(RotaryModel(model).model).__name__.removeprefix("FSDP")).__name__)


def _class_that_loads(name: str | None) -> Any:
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return AutoModelForCausalLM
    if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        return AutoModelForImageTextToText
    return model_class(name) or AutoModelForCausalLM


def model_class(name: str | None) -> type[PreTrainedModel] | None:
    """Return Transformers' model class of a name; None if it has none."""
    loader = getattr(transformers, name, None) if name else None
    return loader if isinstance(loader, type) and issubclass(loader, PreTrainedModel) else None


def refuse_without_tokens(source: str | Path) -> None:
    """Refuse a checkpoint that predicts no tokens, before its weights are loaded.

    Raises:
        OSError: There is no config.
        ValueError: It is a classifier, a reward model, a bare decoder or the like.
    """
    if is_gguf(source):
        return
    loader = auto_class(source, {})
    if loader not in (AutoModelForCausalLM, AutoModelForImageTextToText):
        raise InvalidRequestError(
            f"{str(source)!r} holds a {loader.__name__}, which predicts no tokens, so there is no perplexity, no text "
            "and no training on text. Give a causal language model; load_extended loads this one."
        )


def _load_gguf(path: Path, kwargs: dict[str, Any]) -> PreTrainedModel:
    refuse_gguf_scaling(path)
    if kwargs.get("dtype", "auto") == "auto":
        kwargs = {**kwargs, "dtype": torch.float32}  # the weights' scales are float16 times small integers
    if hasattr(transformers, "GgufConfig"):  # 5.0 has none: it always dequantises
        kwargs = {**kwargs, "quantization_config": transformers.GgufConfig(dequantize=True)}
    model: Any = _from_pretrained(path.parent, gguf_file=path.name, **kwargs)
    # The weights are plain tensors now; with these marks left, save_pretrained and training refuse.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.name_or_path = model.config._name_or_path = str(path)  # not the folder: adapters and results name their base
    return model  # type: ignore[no-any-return]  # from_pretrained is untyped


def open_gguf(path: Path) -> GGUFReader:
    """Return a reader of a ``.gguf`` file, whose tensors stay on the disk until they are used.

    Raises:
        ImportError: The gguf package is not installed.
        ValueError: It is no GGUF file, was cut off, or is a part of one.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingPackageError(
            "reading a .gguf file needs more packages: pip install 'hf_posenc[smollm2]'"
        ) from error
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise InvalidRequestError(f"{str(path)!r} is not a GGUF file: {error}") from error
    parts = reader.fields.get("split.count")
    if parts is not None and parts.contents() > 1:
        first = shlex.quote(re.sub(r"-\d{5}-of-", "-00001-of-", str(path)))
        raise InvalidRequestError(
            f"{path.name} is one of {parts.contents()} parts. Join them: llama-gguf-split --merge {first} whole.gguf"
        )
    return reader


def gguf_rope(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a ``.gguf`` file under ``rope.scaling.``, and the names of its tensors of divisors.

    Raises:
        ImportError: The gguf package is not installed.
        ValueError: It is no GGUF file.
    """
    reader = open_gguf(path)
    declared = {
        name.split(".rope.scaling.")[1]: field.contents()
        for name, field in reader.fields.items()
        if ".rope.scaling." in name
    }
    return declared, [tensor.name for tensor in reader.tensors if tensor.name in SCALING_TENSORS]


def refuse_gguf_scaling(path: Path) -> None:
    """Raise if a ``.gguf`` file declares a RoPE scaling: Transformers 5.23 drops it for all but gpt-oss.

    Raises:
        ImportError: The gguf package is not installed.
        ValueError: It is scaled, or is no GGUF file.
    """
    declared, tensors = gguf_rope(path)
    scaled = declared.get("type", "none") != "none" or declared.get("factor", 1.0) not in (0.0, 1.0)
    if scaled or tensors:
        what = ", ".join([*(f"{key}={value}" for key, value in declared.items()), *tensors])
        raise InvalidRequestError(
            f"{path.name} has scaled rotary positions ({what}), which Transformers would silently drop. "
            "Use the original safetensors checkpoint instead."
        )
