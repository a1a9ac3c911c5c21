"""The lengths that a config states: what the model was trained on, and the limits that other programs read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.families.family_data import family_of
from hf_posenc.methods.registry import method_of_rope_type
from hf_posenc.patching.presets import checkpoints, known_checkpoint
from hf_posenc.utils.warning import warn_user

# What a config, a model's or an adapter's, says of its extension to those who have only it.
MARK = "context_extension"
DECLARED = "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
# Keys of a text config that servers take for the longest text. vLLM (derive_max_model_len_and_key in
# vllm/transformers_utils/model_arch_config_convertor.py) takes the smallest of them, and model_max_length before any
# other; SGLang (CONTEXT_LENGTH_KEYS in python/sglang/srt/utils/hf_transformers_utils.py) the first of five of them.
LENGTH_KEYS = (
    DECLARED,
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_UNLIMITED = 1e9  # larger numbers stand for "no limit"
_PHI3_ORIGINAL = 4096  # of Phi-3's config class, and of its relatives'


@dataclass(frozen=True)
class StatedLength:
    """A length, in tokens, and what states it."""

    tokens: int
    by: str

    def __str__(self) -> str:
        return f"{self.tokens} ({self.by})"


@dataclass(frozen=True)
class OriginalLength:
    """The tokens that a model was trained on before any scaling, and what else its config states.

    Attributes:
        tokens: The length that factors are counted from; None if nothing states it.
        by: What states it.
        others: Statements of other lengths, which are less specific.
        decided: False if keys of equal weight contradict each other: ``tokens`` is then only what Transformers reads.
    """

    tokens: int | None
    by: str
    others: tuple[StatedLength, ...] = ()
    decided: bool = True

    @property
    def stated(self) -> str:
        """All statements in words."""
        return " and ".join(map(str, (StatedLength(self.tokens or 0, self.by), *self.others)))

    @property
    def longest(self) -> int:
        """The longest length that is stated, in tokens; 0 for none."""
        return max((self.tokens or 0, *(stated.tokens for stated in self.others)))

    def counted_from(self) -> int | None:
        """Return ``tokens`` for a request that counts from them, with a warning where something states another length.

        Raises:
            InvalidRequestError: The statements contradict each other, and none is more specific.
        """
        if not self.others:
            return self.tokens
        if not self.decided:
            raise InvalidRequestError(
                f"the config states more than one length, {self.stated}, and nothing says which of them the model was "
                f"trained on. Pass {argument(ORIGINAL)}."
            )
        warn_user(
            f"more than one original length is stated: {self.stated}. Factors are counted from {self.tokens}; to count "
            f"from {self.others[0].tokens}, pass {argument(ORIGINAL, self.others[0].tokens)}."
        )
        return self.tokens


def original_length_of(
    values: Mapping[str, Any],
    parameters: Mapping[str, Any],
    head_dim: int | None,
    *,
    mark: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> OriginalLength:
    """Return the length that a model was trained on, by the most specific statement.

    The order is: what ``patch_model`` noted; for a scaled config the length that its rule starts from; what is known of
    a published checkpoint of this name; the original length of another part of the config, such as
    ``dual_chunk_attention_config``; published checkpoints of the same shape; what an unscaled config has beside its
    rule; ``model_max_length`` (Command-R) where it is larger; ``max_position_embeddings``. In a scaled config the
    lengths of servers and ``max_position_embeddings`` are targets and state nothing, except for Transformers'
    ``dynamic``.

    Args:
        values: Those of the text config; the declared length is under ``max_position_embeddings``.
        parameters: Its rotary settings for full attention, flat, with Transformers' ``rope_type``.
        head_dim: Features of a head; None if that is not known.
        mark: What ``patch_model`` noted in the config.
        name: On the Hugging Face Hub; None to take ``_name_or_path``.
    """
    if mark and mark.get(ORIGINAL):
        return OriginalLength(int(mark[ORIGINAL]), MARK)
    statements: list[StatedLength] = []
    for tokens, by in _statements(values, parameters, head_dim, name or values.get("_name_or_path")):
        if is_length(tokens) and int(tokens) not in {stated.tokens for stated in statements}:
            statements.append(StatedLength(int(tokens), by))
    if not statements:
        return OriginalLength(None, "nothing: it is not recorded")
    first, *others = statements
    decided = is_scaled(parameters) or first.by != DECLARED or not others
    return OriginalLength(first.tokens, first.by, tuple(others), decided)


def _statements(
    values: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int | None, name: Any
) -> Iterator[tuple[Any, str]]:
    """Yield each statement of an original length with what makes it, the most specific first."""
    declared, scaled = values.get(DECLARED), is_scaled(parameters)
    # Their config class has a default for the key, so that it says something of a scaled config alone.
    longrope_only = family_of(values.get("model_type")).longrope_only
    own = (parameters.get(ORIGINAL), ORIGINAL)
    beside = (values.get(ORIGINAL), f"config.{ORIGINAL}")
    if scaled:
        yield from (beside, own) if longrope_only else (own, beside)
        if longrope_only and not own[0] and not beside[0]:
            yield _PHI3_ORIGINAL, "the family"
        if parameters["rope_type"] == "dynamic":
            yield declared, DECLARED
    if (known := known_checkpoint(name or "")) is not None:
        yield known.trained_length, f"the published {known.name}"
    for key, part in values.items():
        if isinstance(part, Mapping) and key not in ("rope_parameters", "rope_scaling", MARK):
            yield part.get(ORIGINAL), f"{key}.{ORIGINAL}"
    yield from _published(values, parameters, head_dim)
    if scaled:
        return
    if "llama_4_scaling_beta" not in parameters:  # which scales queries from that length on, whatever the rule
        yield own
    if not longrope_only:
        yield beside
    yield values.get("initial_context_length"), "initial_context_length"  # gpt-oss
    longer = values.get("model_max_length")
    if is_length(longer) and is_length(declared) and longer > declared:
        yield longer, "model_max_length"
    for key in LENGTH_KEYS:
        yield values.get(key), key


def _published(
    values: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int | None
) -> Iterator[tuple[int, str]]:
    """Yield the trained length of published checkpoints of a config's shape and rule, if they agree."""
    rule = None
    if is_scaled(parameters):
        method = method_of_rope_type(parameters["rope_type"])
        rule = {"method": "linear" if method is None else method.name, "factor": parameters.get("factor")}
    published = {
        facts.trained_length: facts.name
        for facts in reversed(checkpoints().values())
        if values.get("model_type") in (facts.model_type, f"{facts.model_type}_text")
        and (facts.declared_length, facts.head_dim, facts.rope_theta, facts.scaled)
        == (values.get(DECLARED), head_dim, parameters.get("rope_theta"), rule)
    }
    if len(published) == 1:
        [(tokens, name)] = published.items()
        yield tokens, f"published checkpoints of this shape, such as {name}"


def is_scaled(parameters: Mapping[str, Any]) -> bool:
    """Return whether flat ``rope_parameters`` are those of a rule of Transformers that scales."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "proportional":  # some pairs never rotate; a factor divides the others
        return bool((parameters.get("factor") or 1.0) > 1)
    return method_of_rope_type(rope_type) is not None


def is_length(value: Any) -> TypeGuard[int]:
    """Return whether a value of a config is a number of tokens."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _UNLIMITED


def limits_below(values: Mapping[str, Any], target: int) -> dict[str, int]:
    """Return the length keys that a config has, under the names it keeps them by, with values below a target."""
    return {key: values[key] for key in LENGTH_KEYS if is_length(values.get(key)) and values[key] < target}
