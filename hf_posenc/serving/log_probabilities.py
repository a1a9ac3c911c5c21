"""Log-probabilities from the servers that give them, each in its own way."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.serving.http_json import Endpoint

_TOP = 10  # tokens a position, where a server gives the likeliest ones


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of tokens of a text.

    Attributes:
        rows: int64 ``(n,)``: how many tokens of the text came before.
        tokens: int64 ``(n,)``: the token that may follow.
        values: float64 ``(n,)``, in nats.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, found: Sequence[tuple[int, int, float]]) -> LogProbs:
        """Take triples of row, token and value."""
        rows, tokens, values = zip(*found, strict=True)
        return cls(torch.tensor(rows), torch.tensor(tokens), torch.tensor(values, dtype=torch.float64))


@dataclass(frozen=True)
class ModelServer(abc.ABC):
    """A server of one model.

    Attributes:
        endpoint: Where it is.
        title: What it is, for people.
        model: The model's name there.
        context_length: Tokens that a text and its continuation may have; None if it does not say.
        weight_bits: Bits of a weight, on average; None if it does not say.
        hidden_size: None if it does not say.
    """

    endpoint: Endpoint
    title: str
    model: str
    context_length: int | None = None
    weight_bits: float | None = None
    hidden_size: int | None = None

    @abc.abstractmethod
    def tokenize(self, text: str) -> list[int] | None:
        """Return the tokens of a text, none added; None if the server does not say."""

    @abc.abstractmethod
    def log_probabilities(self, ids: list[int], rows: Sequence[int]) -> LogProbs:
        """Return log-probabilities of tokens that may follow the first tokens of a text.

        Args:
            ids: The text.
            rows: How many of them come first, ascending. A server that scores every token of a text scores all.

        Raises:
            ValueError: It gives none.
        """


class LlamaServer(ModelServer):
    """llama-server: the likeliest next tokens of ``/completion``; a prompt's own tokens are not scored there."""

    def tokenize(self, text: str) -> list[int] | None:
        answer = self.endpoint.post("/tokenize", {"content": text, "add_special": False}, or_none=True)
        return None if answer is None else list(answer["tokens"])

    def log_probabilities(self, ids: list[int], rows: Sequence[int]) -> LogProbs:
        answers = []
        # The cache keeps what the prompts have in common, so that the text is read once.
        common = {"n_predict": 1, "n_probs": _TOP, "temperature": 0.0, "post_sampling_probs": False}
        for row in rows:
            body = {"model": self.model, "prompt": ids[:row], "cache_prompt": True, **common}
            steps = self.endpoint.post("/completion", body).get("completion_probabilities")
            if not steps or "top_logprobs" not in steps[0]:
                raise InvalidRequestError(f"{self.title} gives no log-probabilities: update it (n_probs).")
            answers += [(row, int(one["id"]), float(one["logprob"])) for one in steps[0]["top_logprobs"]]
        return LogProbs.of(answers)


class OpenAIServer(ModelServer):
    """vLLM, SGLang and others with OpenAI's ``/v1/completions``: the tokens of a prompt of token numbers, by ``echo``.

    vLLM also has ``prompt_logprobs``, a dictionary of tokens for each position.
    """

    def tokenize(self, text: str) -> list[int] | None:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        answer = self.endpoint.post("/tokenize", body, or_none=True)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return [int(token) for token in tokens] if isinstance(tokens, list) else None

    def log_probabilities(self, ids: list[int], rows: Sequence[int]) -> LogProbs:
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        choice = self._choice(
            self.endpoint.post("/v1/completions", {**body, "echo": True, "logprobs": 1}, or_none=True)
        )
        scored = ((choice or {}).get("logprobs") or {}).get("token_logprobs") or []
        if len(scored) < len(ids):  # of the continuation alone
            choice = self._choice(self.endpoint.post("/v1/completions", {**body, "prompt_logprobs": 0}))
            dictionaries = (choice or {}).get("prompt_logprobs") or []
            scored = [
                None if one is None else one.get(str(token), {}).get("logprob")
                for one, token in zip(dictionaries, ids, strict=False)
            ]
        answers = [
            (row, ids[row], float(scored[row])) for row in range(1, len(scored[: len(ids)])) if scored[row] is not None
        ]
        if len(scored) < len(ids) or not answers:
            raise InvalidRequestError(
                f"{self.title} gives no log-probabilities for the tokens of a prompt (echo with logprobs, "
                "prompt_logprobs), so that nothing can be compared. Those that do: vLLM, SGLang, llama-server. Serve "
                "the same file or folder with one of these to check it."
            )
        return LogProbs.of(answers)

    @staticmethod
    def _choice(answer: Any) -> dict[str, Any] | None:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        return choices[0] if choices else None


def find_server(endpoint: Endpoint, model: str | None = None) -> ModelServer:
    """Return the server that answers at an address.

    Args:
        endpoint: The address.
        model: The name of the model there; needed where it has several.

    Raises:
        ValueError: Nothing answers, or nothing that serves language models, or not this model.
    """
    listing = endpoint.get("/v1/models", or_none=True)
    models = listing.get("data") if isinstance(listing, dict) else None
    if not models:
        raise InvalidRequestError(
            f"{endpoint.url} has no list of models (/v1/models), so it is no server with OpenAI's API, or it "
            "has loaded no model."
        )
    names = [str(one.get("id")) for one in models]
    if model is None and len(names) > 1:
        raise InvalidRequestError(
            f"the server has several models: {', '.join(names)}. Name one with {argument('server_model')}."
        )
    if model is not None and model not in names:
        raise InvalidRequestError(f"the server has no model {model!r}. It has: {', '.join(names)}.")
    chosen = models[0 if model is None else names.index(model)]
    owner, name = str(chosen.get("owned_by", "")), str(chosen["id"])
    if owner == "llamacpp":
        props = endpoint.get("/props", or_none=True) or {}
        facts = chosen.get("meta") or {}
        context = props.get("default_generation_settings", {}).get("n_ctx", facts.get("n_ctx"))
        bits = 8 * facts["size"] / facts["n_params"] if facts.get("n_params") and facts.get("size") else None
        return LlamaServer(endpoint, "llama-server", name, context, bits, facts.get("n_embd"))
    titles = {"vllm": "vLLM", "sglang": "SGLang", "library": "Ollama"}
    return OpenAIServer(endpoint, titles.get(owner, "the server"), name, chosen.get("max_model_len"))
