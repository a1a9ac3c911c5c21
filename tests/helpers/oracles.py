"""Solvers that read retrieval prompts, and hooks that let a model of one token a character answer by them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from task_solvers import BEGUN, solve_by_definition

# How each task begins the answer, with no chat template.
_BEGUN = re.compile(
    r"The pass key (?:of .+ )?is|The secret (?:number|code)s? of .+ in the text above (?:is|are:)"
    r"|Answer: The 5 variables with the value \d+ are:|Answer: The 10 words that occur most often in the list are:"
    r"|Answer: The three words that occur most often are:"
    rf"|{BEGUN}"
)


def solve(prompt: str) -> list[str]:
    """Return the answers to a prompt, from nothing but its text (questions and worked examples included)."""
    *above, question = prompt.strip().split("\n\n")
    text = "\n\n".join(above)
    if (found := solve_by_definition(text, question)) is not None:
        return found
    if named := re.findall(r"What is the pass key of (\S+)\?", question):
        (name,) = named
        return re.findall(rf"The pass key of {name} is (\d{{5}})\. Remember", text)
    if "pass key" in question:
        return re.findall(r"The pass key is (\d{5})\. Remember", text)[:1]
    if "secret" in question:
        said = re.findall(r"One of the secret (?:number|code)s of (\S+) is ([\da-f-]+)\.", text)
        asked = re.split(r", | and ", question.partition(" of ")[2].partition(" in the text")[0])
        return [number for key in asked for name, number in said if name == key]
    if "variables" in question:
        return _variables(text, re.findall(r"value (\d{5})", question)[0])
    if "10 words" in question:
        words = re.findall(r"\d+\. (\w+)", text.rpartition("numbered list")[2])
        return [word for word, _ in Counter(words).most_common(10)]
    counts = Counter(above[-1].split())
    return [word for word, _ in counts.most_common(4) if word != "..."]


def _variables(text: str, value: str) -> list[str]:
    known: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        known[name] = known.get(source, source)
    return [name for name, its in known.items() if its == value]


class Oracle:
    """Hooks that let a model answer from what it has been fed, whatever its weights.

    ``lead`` is what it writes before an answer that has not begun, ``tail`` what it writes behind it.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, lead: str = " ", tail: str = "."
    ) -> None:
        self.tokenizer, self.lead, self.tail = tokenizer, lead, tail
        self.fed: list[int] = []
        self.most_at_once = 0
        model.base_model.register_forward_pre_hook(self.read, with_kwargs=True)
        model.base_model.register_forward_hook(self.think)
        model.lm_head.register_forward_hook(self.speak)

    def read(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache, ids = kwargs.get("past_key_values"), kwargs["input_ids"][0].tolist()
        self.start = cache.get_seq_length() if cache is not None else 0
        self.fed = self.fed[: self.start] + ids
        mask = kwargs.get("attention_mask")
        self.masked = mask if mask is not None and mask.dim() == 4 else None
        self.most_at_once = max(self.most_at_once, len(ids))

    def think(self, module: Any, args: Any, output: Any) -> Any:
        """Replace each hidden state by the id of what comes next."""
        text = self.tokenizer.decode(self.fed)
        for row in range(len(self.fed) - self.start):
            seen = text[: self.start + row + 1]
            if self.masked is not None:
                seen = "".join(text[at] for at in (self.masked[0, 0, row] == 0).nonzero().flatten().tolist())
            output.last_hidden_state[0, row, 0] = self.next_id(seen)
        return output

    def next_id(self, text: str) -> int:
        above, _, line = text.rpartition("\n")
        begun = _BEGUN.match(line)
        for lead in (self.lead, " ") if begun else ():
            answer = f"{lead}{', '.join(solve(above))}{self.tail}"
            written = line[begun.end() :] if begun else ""
            if answer.startswith(written) and written != answer:
                return int(self.tokenizer(answer[len(written)]).input_ids[0])
        return int(self.tokenizer.eos_token_id)

    def speak(self, module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        ids = args[0][..., 0].round().long().clamp(0, logits.shape[-1] - 1)
        return torch.nn.functional.one_hot(ids, logits.shape[-1]).to(logits.dtype) * 50
