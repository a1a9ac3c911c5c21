"""The rule that a running server computes, by its log-probabilities and those of the live model under several rules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel
from hf_posenc.checkpoint.loading import load_model, tokenizer_source
from hf_posenc.checkpoint.pretrained import load_tokenizer
from hf_posenc.errors import HfPosencError, InvalidRequestError, argument
from hf_posenc.evaluation.lm_head import check_head, decoder_body, head_logits, row_chunks
from hf_posenc.exports.folder import ExportFolder, read_folder, refuse_adapter
from hf_posenc.exports.nearest import as_static, refuse_attention_rule, static_without_options
from hf_posenc.methods.registry import get_method
from hf_posenc.patching.api import is_patched, patched, unpatch_model
from hf_posenc.serving.http_json import Endpoint
from hf_posenc.serving.log_probabilities import LogProbs, ModelServer, find_server
from hf_posenc.utils.console import quiet
from hf_posenc.utils.units import aligned


@dataclass(frozen=True)
class Precision:
    """The largest distance of a server that runs the right rule from the live model, by the numbers it computes in.

    Attributes:
        words: For people.
        measured: The mean difference in nats that was measured, and on what.
        limit: The largest mean difference that is taken for rounding.
    """

    words: str
    measured: str
    limit: float


# Measured with yarn on 500 to 1000 tokens, the live model in float32: the tiny model x4, SmolLM2-135M x2.
PRECISIONS: dict[str, Precision] = {
    "float32": Precision("float32, cache too", "measured 7e-6 and 1.3e-4", 1e-3),
    "float16": Precision("float16 weights or cache", "measured 1e-3 and 8e-3", 3e-2),
    "bfloat16": Precision("bfloat16", "measured 5e-3", 5e-2),
    "quantised": Precision("quantised weights", "measured 6e-2 for Q4_1, 9e-2 for Q8_0", 4e-1),
}
# The share of the way to another rule at which a server is no longer taken to run the folder's.
_NEAR = 0.1
_PAST = 1 / 8  # of the original length, by which the probe is longer
_AT_LEAST_PAST = 256
_ROWS = 24  # positions of servers that answer one position a request
_CHUNK = 1024
_TOKENIZED = 2000  # characters by which tokenizers are compared
UNSCALED = "unscaled"


@dataclass(frozen=True)
class Difference:
    """The distance of a server from the live model under one rule.

    Attributes:
        mean: Mean absolute difference of the log-probabilities, in nats.
        largest: The largest one.
        past: The mean where more than the original length was read; None if nothing was.
        share: Where the server is on the way from the folder's rule (0) to this one (1): the least-squares coefficient
            of its difference from the folder's rule on the difference of the two rules. None for the folder's own.
        error: The standard error of ``share``, with positions as clusters; None for the folder's own.
    """

    mean: float
    largest: float
    past: float | None
    share: float | None = None
    error: float | None = None


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
    precision = _precision(server, server_dtype)

    model, _ = load_model(folder.adapter or folder.path, dtype=dtype, device=device)
    # A rule that only hf_posenc runs, and as_method instead; or of an adapter, whose base model is patched.
    is_put_on = is_patched(model)
    if is_put_on:
        unpatch_model(model)
    check_head(_inner(model, folder))
    own_rule = _Rule(folder.manifest["method"], folder.manifest["options"]) if is_put_on else None
    own_name = f"{folder.manifest['method']} x{folder.manifest['factor']:g}"
    live = {own_name: _live(model, folder, ids, answered, own_rule)}
    near = {UNSCALED: _Rule("linear", {}, factor=1.0, adapter=False), **_parts_of_rule(folder)}
    live |= {name: _live(model, folder, ids, answered, other) for name, other in near.items()}
    comparison = _compare(answered, live, folder.original)
    verdict, rule = judge(comparison, precision.limit)
    if verdict == "differs":
        for name in static_without_options():
            if name != folder.manifest["method"]:
                with suppress(HfPosencError):  # a method that does not suit the model
                    label = f"{name} x{folder.manifest['factor']:g}"
                    live[label] = _live(model, folder, ids, answered, _Rule(name, {}))
        comparison = _compare(answered, live, folder.original)
        verdict, rule = judge(comparison, precision.limit)
    sentence = _sentence(verdict, rule, comparison, precision)
    short_rule = None
    if len(ids) > folder.original:
        few = ids[: folder.original // 2]
        said = server.log_probabilities(few, _rows(folder.original, len(few)))
        both = {own_name: own_rule, UNSCALED: near[UNSCALED]}
        of_short = _compare(said, {name: _live(model, folder, few, said, one) for name, one in both.items()}, len(few))
        _, short_rule = judge(of_short, precision.limit)
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
        f"original length of {folder.original} tokens; live model in {str(model.dtype).removeprefix('torch.')}",
    ]
    lines = (*head, *_table(comparison), *notes, sentence)
    return ServerCheck(verdict, rule, comparison, sentence, lines, short_rule)


@dataclass(frozen=True)
class _Rule:
    """A method to put into the live model; to the folder's target, if no factor is given.

    Attributes:
        adapter: Whether the model's adapter, if it has one, is on it.
    """

    method: str
    options: Mapping[str, Any]
    factor: float | None = None
    adapter: bool = True


def _parts_of_rule(folder: ExportFolder) -> dict[str, _Rule]:
    """Return the parts of a rule that remain if a server does not read all of it."""
    manifest, rules = folder.manifest, {}
    takes = get_method(manifest["method"])
    if manifest["options"] and not takes.needs_options:
        rules[f"{manifest['method']} without its options"] = _Rule(manifest["method"], {})
    if folder.attention_factor != 1 and "attention_factor" in takes.option_fields():
        options = {**manifest["options"], "attention_factor": 1.0}
        rules[f"{manifest['method']} without its attention factor"] = _Rule(manifest["method"], options)
    if folder.adapter is not None:
        rules[f"{manifest['method']} without the adapter"] = _Rule(
            manifest["method"], manifest["options"], adapter=False
        )
    return rules


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


def _precision(server: ModelServer, given: str | None) -> Precision:
    if given is not None:
        return PRECISIONS[given]
    bits = server.weight_bits
    if bits is None:
        return PRECISIONS["bfloat16"]
    # A file of float32 weights is served with a float16 cache, unless a flag says otherwise.
    return PRECISIONS["float16" if bits >= 16 else "quantised"]


def _inner(model: Any, folder: ExportFolder) -> Any:
    return model if folder.adapter is None else model.get_base_model()


@contextmanager
def _with_rule(model: Any, folder: ExportFolder, rule: _Rule | None) -> Iterator[None]:
    if rule is None:
        yield
        return
    changed = nullcontext() if rule.adapter or folder.adapter is None else model.disable_adapter()
    length = {"context_length": folder.context_length} if rule.factor is None else {"factor": rule.factor}
    known: dict[str, Any] = {"original_max_position_embeddings": folder.original, "on_scaled": "replace"}
    with warnings.catch_warnings(), quiet("hf_posenc.patching.api"):
        warnings.simplefilter("ignore")  # of a method that is applied for one pass
        with changed, patched(model, rule.method, **length, **known, **rule.options):
            yield


@torch.no_grad()
def _live(wrapped: Any, folder: ExportFolder, ids: list[int], answered: LogProbs, rule: _Rule | None) -> torch.Tensor:
    """Return the live model's log-probabilities at the places where a server answered, float64 ``(n,)`` on the CPU."""
    model = _inner(wrapped, folder)
    with _with_rule(wrapped, folder, rule):
        hidden = decoder_body(model)(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        states = hidden.last_hidden_state[0]
        values = torch.empty(len(answered.rows), dtype=torch.float64)
        for part in row_chunks(len(values), _CHUNK):
            logits = head_logits(model, states[(answered.rows[part] - 1).to(states.device)])
            log_probabilities = logits.double().log_softmax(-1).cpu()
            values[part] = log_probabilities.gather(-1, answered.tokens[part, None])[:, 0]
    return values


def _compare(answered: LogProbs, live: Mapping[str, torch.Tensor], original: int) -> dict[str, Difference]:
    """Return the distance of a server from each rule; the first is the folder's own."""
    own = next(iter(live.values()))
    past = answered.rows > original
    distances = {}
    for name, values in live.items():
        apart = (answered.values - values).abs()
        share, error = (None, None) if values is own else share_of(answered, own, values)
        past_mean = float(apart[past].mean()) if past.any() else None
        distances[name] = Difference(float(apart.mean()), float(apart.max()), past_mean, share, error)
    return distances


def share_of(answered: LogProbs, own: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return where a server is between two rules, 0 at the first and 1 at the second, and the standard error.

    Rounding hardly goes in the direction from one rule to the other, so this decides between them even where the mean
    difference from either is mostly rounding. Infinite error: the two rules give the same numbers.
    """
    apart, way = answered.values - own, other - own
    square = float((way * way).sum())
    if square == 0:
        return 0.0, float("inf")
    share = float((apart * way).sum()) / square
    _, position = torch.unique(answered.rows, return_inverse=True)
    moments = torch.zeros(int(position.max()) + 1, dtype=torch.float64)
    moments.index_add_(0, position, way * (apart - share * way))
    return share, float((moments * moments).sum().sqrt()) / square


def judge(found: Mapping[str, Difference], limit: float) -> tuple[str, str | None]:
    """Return the verdict on a server and the rule that it runs; see ``ServerCheck``.

    Args:
        found: The folder's rule first; ``"unscaled"`` among the others.
        limit: The largest mean difference that is taken for rounding.
    """
    own = next(iter(found))
    nearest = min(found, key=lambda name: found[name].mean)
    if found[nearest].mean > limit:
        return "differs", None
    share, error = _share(found[nearest]) if nearest != own else (0.0, 0.0)
    if share - 3 * error > 0.5:  # else the two cannot be told apart
        if abs(share - 1) > _NEAR + 3 * error:
            return "differs", None
        return ("unscaled" if nearest == UNSCALED else "another"), nearest
    share, error = _share(found[UNSCALED])
    if 3 * error > 0.5:  # the rule changes less than the server rounds
        return "undecided", None
    if found[own].mean <= limit and abs(share) <= _NEAR + 3 * error:
        return "agrees", own
    return "differs", None


def _share(other: Difference) -> tuple[float, float]:
    assert other.share is not None
    assert other.error is not None
    return other.share, other.error


def _sentence(verdict: str, rule: str | None, found: Mapping[str, Difference], precision: Precision) -> str:
    own = next(iter(found))
    nearest = min(found, key=lambda name: found[name].mean)
    share, error = _share(found[UNSCALED])
    limit = f"{precision.words}: at most {precision.limit:g} is taken for rounding ({precision.measured})"
    mean = f"the mean difference from {own} is {found[own].mean:.1e}"
    way = f"and the server is {share:.2f} ± {error:.2f} of the way from there (0) to the unscaled model (1)"
    if verdict == "agrees":
        return f"agrees: the server runs {own}; {mean}, {way}. {limit}"
    if verdict == "unscaled":
        advice = "It was started without the rule: hf-posenc export --to prints the command with it"
        return f"unscaled: the server runs the unscaled model; {mean}, {way}. {limit}. {advice}"
    if verdict == "another":
        assert rule is not None
        return f"another rule: the server runs {rule}, not {own}; {mean}, from {rule} {found[rule].mean:.1e}. {limit}"
    if verdict == "undecided":
        return (
            f"undecided: {own} changes the log-probabilities of this text less than the server rounds; {mean}, {way}. "
            "Compare more tokens, or serve the model in a higher precision"
        )
    return (
        f"differs: the server runs neither {own} nor any rule that was compared; {mean}, {way}; the nearest is "
        f"{nearest}, {found[nearest].mean:.1e} off. {limit}. Are weights, precision and lengths those of the folder?"
    )


def _table(found: Mapping[str, Difference]) -> list[str]:
    rows = [["difference in log-probability from", "mean", "largest", "past original"]]
    for name, one in found.items():
        rows.append([name, f"{one.mean:.1e}", f"{one.largest:.1e}", "-" if one.past is None else f"{one.past:.1e}"])
    return aligned(rows, left=(0,))
