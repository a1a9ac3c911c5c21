"""The base class of a kind of training data: it makes a block of tokens from the block's number alone."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from hf_posenc.data.examples import ExampleTokenizer
from hf_posenc.data.packing import PackedDocuments
from hf_posenc.data.retained_texts import RetainedTexts
from hf_posenc.data.tokens import MaskedTokens, joined
from hf_posenc.errors import InvalidRequestError, argument

# Of a block. More answers teach more, and Xiong et al. ask one in 4k tokens; but one in 128 instead of 256 did not make
# SmolLM2 find more after 250k tokens of an earlier mix (right of 100 passkeys, one seed: 68 and 68 at 8k, 36 and 47
# at 16k): a block then holds less that is asked about.
_TOKENS_PER_QUESTION = 256
_MOST_QUESTIONS = 64  # each is rendered by the chat template together with all before it


@dataclass(frozen=True)
class Material:
    """The material from which kinds of data are made.

    Attributes:
        tokenizer: The model's.
        documents: Token ids of each document that is trained on, int64 ``(num_tokens,)``, without BOS and EOS.
        packed: The same, one after the other, in blocks of the run's length.
        seed: Seed of everything random.
        retained_texts: Texts with what the model predicted there before, by the kinds that need them.
    """

    tokenizer: PreTrainedTokenizerBase
    documents: Sequence[torch.Tensor]
    packed: PackedDocuments
    seed: int
    retained_texts: Mapping[str, RetainedTexts] = field(default_factory=dict)

    @property
    def seq_len(self) -> int:
        """Tokens of a block."""
        return self.packed.seq_len

    @property
    def num_questions(self) -> int:
        """Questions that a dialogue over a whole block has."""
        return max(1, min(_MOST_QUESTIONS, self.seq_len // _TOKENS_PER_QUESTION))

    def rng(self, name: str, index: int) -> Random:
        """Return the random generator of the block ``index`` of a kind."""
        return Random(f"{name} {index} {self.seed}")

    def in_turn(self, name: str, index: int, count: int) -> int:
        """Return which one of ``count`` a kind takes at ``index``, in random order; none twice before all came once."""
        passes, position = divmod(index, count)
        order = list(range(count))
        self.rng(f"{name} pass", passes).shuffle(order)
        return order[position]

    def stretch(self, num_tokens: int, rng: Random) -> torch.Tensor:
        """Return consecutive tokens of the packed documents from a random one on, int64 ``(num_tokens,)``."""
        stream = self.packed.stream
        start = rng.randrange(len(stream))
        return stream[torch.arange(start, start + num_tokens) % len(stream)]

    def filled(self, made: MaskedTokens, rng: Random) -> MaskedTokens:
        """Return an example with a piece of the documents behind it, which fills the block up and counts in no loss.

        Nothing before the piece sees it, so it is part of the example: two documents would need an attention mask.
        """
        room = self.seq_len - len(made)
        if room == 0:
            return made
        return joined([made, MaskedTokens.uniform(self.stretch(room, rng), counted=False)])


class Kind(abc.ABC):
    """One kind of training data.

    Attributes:
        name: As ``--task-mix`` has it.
        counts_answers: Only the answers to questions count in the loss.
        reads_texts: It is made of free text, so that the documents must not be chats or prompts with answers.
        is_short: Its blocks are read as windows of the original length.
        needs_retained_texts: It is made of texts that the model read before the training: short ones before it was
            extended, long ones when it was.
    """

    name: ClassVar[str]
    counts_answers: ClassVar[bool] = False
    reads_texts: ClassVar[bool] = False
    is_short: ClassVar[bool] = False
    needs_retained_texts: ClassVar[bool] = False

    def __init__(self, material: Material) -> None:
        """Prepare.

        Args:
            material: What blocks are made from.

        Raises:
            ValueError: A block is too short for this kind, or the documents are.
        """
        self.material = material

    @abc.abstractmethod
    def block(self, index: int) -> list[MaskedTokens]:
        """Return the documents, or parts of documents, of a block: together as many tokens as a block has.

        The same whenever it is asked for, so that a resumed run reads what one that was not stopped reads.

        Args:
            index: Number of the block among those of its kind, in the order of training, from 0.
        """

    def targets(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return more arguments of the loss of a block (``chunked_causal_lm_loss``), ``(num_tokens, ...)`` each."""
        return {}


class Dialogues(Kind):
    """A kind whose blocks are a text and a dialogue about it, and whose answers alone count in the loss."""

    counts_answers: ClassVar[bool] = True
    # How much of what fills a block there has to be at least, and how many tokens one of it is, about.
    least: ClassVar[int]

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        if not material.tokenizer.is_fast:
            raise InvalidRequestError(
                f"{argument('task_mix')}: {self.name!r} needs to know which tokens are those of the answers, which "
                f"{type(material.tokenizer).__name__}, a slow tokenizer, does not say. Take the fast one."
            )
        self._tokenize = ExampleTokenizer.of_dialogues(material.tokenizer)
        # Of several and of twice the least, so that no later block, of longer values, does not fit.
        shortest = max(len(self.example(index, 2 * self.least)) for index in range(16))
        if shortest > material.seq_len:
            raise InvalidRequestError(
                f"{argument('task_mix')}: the shortest example of {self.name!r} has about {shortest} tokens, and a "
                f"block has {material.seq_len}. Give a longer {argument('seq_len')}, or leave {self.name} out."
            )

    @abc.abstractmethod
    def turns(self, rng: Random, count: int) -> list[tuple[str, str]]:
        """Return questions with their answers; the first question holds the text that all of them are about.

        Args:
            rng: What it is drawn from.
            count: How much of what fills a block the text holds.
        """

    def example(self, index: int, count: int) -> MaskedTokens:
        """Return the dialogue of a block as tokens, with ``count`` of what fills it."""
        turns = self.turns(self.material.rng(self.name, index), count)
        roles = ("user", "assistant")
        messages = [{"role": role, "content": text} for pair in turns for role, text in zip(roles, pair, strict=True)]
        made = self._tokenize({"messages": messages}, f"{argument('task_mix')} {self.name}")
        assert isinstance(made, MaskedTokens)  # as chats are
        return made

    def block(self, index: int) -> list[MaskedTokens]:
        example = cache(partial(self.example, index))  # the last is often one that was tried before
        room = self.material.seq_len
        shortest, count = len(example(self.least)), 64 * self.least
        for _ in range(3):  # with another count, other values are drawn, so that the tokens of each change a little
            several = max(count, 8 * self.least)  # longer than the least, whatever their values
            tokens_each = (len(example(several)) - shortest) / (several - self.least)
            count = self.least + max(0, int((room - shortest) / tokens_each))
        while len(made := example(count)) > room and count > self.least:
            count = max(self.least, count - math.ceil((len(made) - room) / tokens_each))
        if len(made) > room:
            raise InvalidRequestError(f"{self.name}: example {index} has {len(made)} tokens, a block has {room}.")
        return [self.material.filled(made, self.material.rng(f"{self.name} filling", index))]
