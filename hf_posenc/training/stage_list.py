"""What ``--stages 16k:500k 32k:500k`` says: target lengths, each with its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.utils.units import ContextLength, TokenCount, length_name


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Attributes:
        number: From 1.
        length: Target length, in tokens.
        token_budget: Tokens it is trained on at most.
    """

    number: int
    length: int
    token_budget: int

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"stage-{self.number}-{length_name(self.length)}"


def parse_stages(words: Sequence[str], token_budget: int) -> list[Stage]:
    """Read target lengths and budgets.

    Args:
        words: Each ``LENGTH:BUDGET``, or ``LENGTH`` for all, which share the budget of the run equally.
        token_budget: Of the run.

    Raises:
        TypeError: Not a list of words.
        ValueError: A word that cannot be read, budgets for some only, or lengths that do not rise.
    """
    if isinstance(words, str) or not all(isinstance(word, str) for word in words) or not words:
        raise InvalidTypeError(
            f'stages must be a list of LENGTH:BUDGET, such as ["16k:500k", "32k:500k"], got {words!r}.'
        )
    pairs = [word.partition(":") for word in words]
    if len({bool(colon) for _, colon, _ in pairs}) > 1:
        raise InvalidRequestError(f"stages: give every stage a budget or none, got {' '.join(words)!r}.")
    stages = []
    for number, (length, colon, budget) in enumerate(pairs, 1):
        try:
            tokens = TokenCount(budget) if colon else token_budget // len(words)
            stages.append(Stage(number, ContextLength(length), tokens))
        except ValueError as error:
            word = words[number - 1]
            raise InvalidRequestError(f"stages: {word!r} is not LENGTH:BUDGET, such as 16k:500k ({error}).") from None
    lengths = [stage.length for stage in stages]
    if lengths != sorted(set(lengths)) or lengths[0] < 1:
        raise InvalidRequestError(f"stages: the lengths must rise, got {', '.join(map(str, lengths))} tokens.")
    return stages


def check_stages(stages: Sequence[Stage], original: int, tokens_per_step: Sequence[int]) -> None:
    """Refuse stages that a model cannot be taken through.

    Args:
        stages: In order.
        original: The model's original length, in tokens.
        tokens_per_step: Of each stage.

    Raises:
        ValueError: A length within the original, or a budget below one step.
    """
    if stages[0].length <= original:
        raise InvalidRequestError(
            f"stages: the model was trained on {original} tokens, and {stages[0].length} are not beyond them. Begin "
            "with a longer one."
        )
    for stage, step in zip(stages, tokens_per_step, strict=True):
        if stage.token_budget < step:
            raise InvalidRequestError(
                f"stages: {stage.token_budget} tokens for the stage of {stage.length} are less than one step, {step} "
                "tokens. Give it more, or lower gradient_accumulation_steps, per_device_train_batch_size or seq_len."
            )
