"""The rule that a running server computes, by its log-probabilities and those of the live model under several rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel
from hf_posenc.checkpoint.loading import tokenizer_source
from hf_posenc.checkpoint.pretrained import load_tokenizer
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.exports.folder import ExportFolder, read_folder, refuse_adapter
from hf_posenc.exports.nearest import as_static, refuse_attention_rule
from hf_posenc.serving.http_json import Endpoint
from hf_posenc.serving.log_probabilities import ModelServer, find_server
from hf_posenc.serving.model_under_rules import LiveModel
from hf_posenc.serving.server_verdict import (
    PRECISIONS,
    UNSCALED,
    Difference,
    compare,
    judge,
    precision_of,
    sentence_of,
    table_of,
)

_PAST = 1 / 8  # of the original length, by which the probe is longer
_AT_LEAST_PAST = 256
_ROWS = 24  # positions of servers that answer one position a request
_TOKENIZED = 2000  # characters by which tokenizers are compared


@dataclass(frozen=True)
class ServerCheck:
    """The rule that a server was found to run.

    Attributes:
        verdict: ``"agrees"``, ``"unscaled"``, ``"another"`` (known) rule, ``"differs"`` from all, or ``"undecided"``.
        rule: The rule that it was found to run; None if it differs from all or is undecided.
        differences: From the live model under each rule that was compared, the folder's first.
        sentence: The verdict with its numbers.
        lines: The whole report.
        short_rule: The rule that it runs for a request of half the original length: the folder's or ``"unscaled"``;
            None if that could not be told, or nothing longer was compared.
    """

    verdict: str
    rule: str | None
    differences: Mapping[str, Difference]
    sentence: str
    lines: tuple[str, ...]
    short_rule: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether it runs the rule of the folder."""
        return self.verdict == "agrees"

    def __str__(self) -> str:
        return "\n".join(self.lines)


def check_server(
    path: str | Path,
    url: str,
    *,
    as_method: str | None = None,
    probe_length: int | None = None,
    server_model: str | None = None,
    server_dtype: str | None = None,
    api_key: str | None = None,
    timeout: float = 600.0,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
) -> ServerCheck:
    """Find which rule a running server computes, with one text on the server and on the live model.

    The text is the beginning of a novel, given as token numbers. The live model reads it once for each rule that is
    compared: the folder's, none, the folder's in part, and the other static methods if it is none of these. Then a
    short part of it is put to the server, which may run no rule for short requests (``hf_posenc.vllm_plugin``).

    Args:
        path: A folder of ``save_extended``.
        url: The address of vLLM, SGLang, llama-server or another server with OpenAI's API that scores prompts.
        as_method: The static method that the server runs instead, as for ``export_command``.
        probe_length: Tokens of the text; None for the original length and an eighth more, as far as the server goes.
        server_model: The model's name on the server; needed if it has several.
        server_dtype: What the server computes in, a key of ``PRECISIONS``; None for what it says, or bfloat16.
        api_key: Sent to the server as a bearer token.
        timeout: Seconds that one answer may take.
        dtype: As for ``load_model``.
        device: As for ``load_model``.

    Raises:
        FileNotFoundError: There is no manifest, or no config.json.
        ValueError: The folder's rule is one that no server has; the server does not answer, has another model or gives
            no log-probabilities.
    """
    folder = read_folder(path)
    if as_method is not None:
        refuse_adapter(folder)
        folder = as_static(folder, as_method)
    refuse_attention_rule(folder, "a server")
    if server_dtype is not None and server_dtype not in PRECISIONS:
        raise InvalidRequestError(
            f"{argument('server_dtype')} is one of {', '.join(PRECISIONS)}, got {server_dtype!r}."
        )
    server = find_server(Endpoint(url, api_key=api_key, timeout=timeout), server_model)
    _check_size(folder, server)
    text = load_novel(HELD_OUT_NOVEL)
    tokenizer = load_tokenizer(tokenizer_source(folder.path))
    notes = _tokenizer_notes(server, tokenizer, text)
    length = _probe_length(folder, server, probe_length)
    ids = tokenizer(text, verbose=False)["input_ids"][:length]
    answered = server.log_probabilities(ids, _rows(folder.original, len(ids)))
    precision = precision_of(server, server_dtype)

    live = LiveModel(folder, dtype, device)
    values = {name: live.log_probabilities(ids, answered, rule) for name, rule in live.rules.items()}
    comparison = compare(answered, values, folder.original)
    verdict, rule = judge(comparison, precision.limit)
    if verdict == "differs":
        values |= live.under_other_methods(ids, answered)
        comparison = compare(answered, values, folder.original)
        verdict, rule = judge(comparison, precision.limit)
    sentence = sentence_of(verdict, rule, comparison, precision)
    short_rule = None
    if len(ids) > folder.original:
        few = ids[: folder.original // 2]
        said = server.log_probabilities(few, _rows(folder.original, len(few)))
        both = {name: live.log_probabilities(few, said, live.rules[name]) for name in (live.own, UNSCALED)}
        _, short_rule = judge(compare(said, both, len(few)), precision.limit)
        notes.append(f"short requests (a probe of {len(few)} tokens): the server runs {short_rule or 'neither rule'}")
    past = int((answered.rows > folder.original).sum())
    if not past:
        notes.append(
            f"note: nothing past the original length of {folder.original} tokens was compared; start the server with a "
            "longer context"
        )
    context = "not said" if server.context_length is None else f"{server.context_length} tokens"
    head = [
        f"server: {server.title} at {server.endpoint.url}, model {server.model}, context {context}; {precision.words}",
        f"probe: {len(ids)} tokens of a novel, {len(answered.values)} log-probabilities, {past} of them past the "
        f"original length of {folder.original} tokens; live model in {str(live.model.dtype).removeprefix('torch.')}",
    ]
    lines = (*head, *table_of(comparison), *notes, sentence)
    return ServerCheck(verdict, rule, comparison, sentence, lines, short_rule)


def _check_size(folder: ExportFolder, server: ModelServer) -> None:
    hidden = folder.config.get("hidden_size")
    if server.hidden_size is not None and hidden is not None and server.hidden_size != hidden:
        raise InvalidRequestError(
            f"the server runs another model ({server.model}): its hidden size is {server.hidden_size}, and "
            f"{hidden} in {folder.path!r}."
        )


def _tokenizer_notes(server: ModelServer, tokenizer: Any, text: str) -> list[str]:
    """Return a note if the server splits a text in another way; its log-probabilities are of token numbers."""
    start = text[:_TOKENIZED]
    theirs = server.tokenize(start)
    if theirs is None:
        return ["note: the server does not say how it splits a text into tokens, so its tokenizer was not compared"]
    ours = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
    if theirs == ours:
        return []
    index = next(
        (i for i, (one, other) in enumerate(zip(theirs, ours, strict=False)) if one != other),
        min(len(theirs), len(ours)),
    )
    return [
        f"warning: the server's tokenizer is another one: of a text it makes {len(theirs)} tokens and the folder's "
        f"{len(ours)}, which differ from token {index} on. Texts will be read differently from what was compared."
    ]


def _probe_length(folder: ExportFolder, server: ModelServer, wanted: int | None) -> int:
    longer = max(int(folder.original * (1 + _PAST)), folder.original + _AT_LEAST_PAST)
    length = min(longer, folder.context_length) if wanted is None else wanted
    limit = None if server.context_length is None else server.context_length - 1  # one token is generated
    if limit is not None and wanted is not None and wanted > limit:
        raise InvalidRequestError(
            f"the server's context is {server.context_length} tokens, so a probe has at most {limit}, got {wanted}."
        )
    return length if limit is None else min(length, limit)


def _rows(original: int, length: int) -> list[int]:
    """Return the numbers of tokens that are read before each comparison: half past the original length, if possible."""
    half = _ROWS // 2
    parts = [(max(1, min(original, length) // 8), min(original, length))]
    parts += [(original + 1, length)] if length > original else []
    share = half if len(parts) == 2 else _ROWS
    return sorted({round(value) for start, end in parts for value in torch.linspace(start, end, share).tolist()})
