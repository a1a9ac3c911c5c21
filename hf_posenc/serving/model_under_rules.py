"""The live model of a folder, read under one rule after another."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.checkpoint.loading import load_model
from hf_posenc.errors import HfPosencError
from hf_posenc.evaluation.lm_head import check_head, decoder_body, head_logits, row_chunks
from hf_posenc.exports.folder import ExportFolder
from hf_posenc.exports.nearest import static_without_options
from hf_posenc.methods.registry import get_method
from hf_posenc.patching.api import is_patched, patched, unpatch_model
from hf_posenc.serving.log_probabilities import LogProbs
from hf_posenc.serving.server_verdict import UNSCALED
from hf_posenc.utils.console import quiet

_CHUNK = 1024


@dataclass(frozen=True)
class Rule:
    """A method to put into the live model; to the folder's target, if no factor is given.

    Attributes:
        adapter: Whether the model's adapter, if it has one, is on it.
    """

    method: str
    options: Mapping[str, Any]
    factor: float | None = None
    adapter: bool = True


class LiveModel:
    """The model of a folder, and the rules that it is read under.

    Attributes:
        model: The model, with its adapter if it has one.
        own: The name of the folder's rule.
        rules: The folder's rule first, none, and the folder's in part. The first is None if the model was loaded with
            it.
    """

    def __init__(self, folder: ExportFolder, dtype: str | torch.dtype, device: str | torch.device | None) -> None:
        """Load the model; ``dtype`` and ``device`` as for ``load_model``."""
        self.folder = folder
        self.model: Any = load_model(folder.adapter or folder.path, dtype=dtype, device=device)[0]
        # A rule that only hf_posenc runs, and as_method instead; or of an adapter, whose base model is patched.
        is_put_on = is_patched(self.model)
        if is_put_on:
            unpatch_model(self.model)
        check_head(self._inner)
        self.own = self._named(folder.manifest["method"])
        self.rules: dict[str, Rule | None] = {
            self.own: Rule(folder.manifest["method"], folder.manifest["options"]) if is_put_on else None,
            UNSCALED: Rule("linear", {}, factor=1.0, adapter=False),
            **_parts_of_rule(folder),
        }

    @property
    def _inner(self) -> Any:
        return self.model if self.folder.adapter is None else self.model.get_base_model()

    def under_other_methods(self, ids: list[int], answered: LogProbs) -> dict[str, torch.Tensor]:
        """Return the log-probabilities under all other static methods that suit the model."""
        found = {}
        for name in static_without_options():
            if name != self.folder.manifest["method"]:
                with suppress(HfPosencError):  # a method that does not suit the model
                    found[self._named(name)] = self.log_probabilities(ids, answered, Rule(name, {}))
        return found

    def _named(self, method: str) -> str:
        return f"{method} x{self.folder.manifest['factor']:g}"

    @torch.no_grad()
    def log_probabilities(self, ids: list[int], answered: LogProbs, rule: Rule | None) -> torch.Tensor:
        """Return the log-probabilities at the places where a server answered, float64 ``(n,)`` on the CPU."""
        model = self._inner
        with self._read_with(rule):
            hidden = decoder_body(model)(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
            states = hidden.last_hidden_state[0]
            values = torch.empty(len(answered.rows), dtype=torch.float64)
            for part in row_chunks(len(values), _CHUNK):
                logits = head_logits(model, states[(answered.rows[part] - 1).to(states.device)])
                log_probabilities = logits.double().log_softmax(-1).cpu()
                values[part] = log_probabilities.gather(-1, answered.tokens[part, None])[:, 0]
        return values

    @contextmanager
    def _read_with(self, rule: Rule | None) -> Iterator[None]:
        if rule is None:
            yield
            return
        changed = nullcontext() if rule.adapter or self.folder.adapter is None else self.model.disable_adapter()
        length = {"context_length": self.folder.context_length} if rule.factor is None else {"factor": rule.factor}
        known: dict[str, Any] = {"original_max_position_embeddings": self.folder.original, "on_scaled": "replace"}
        with warnings.catch_warnings(), quiet("hf_posenc.patching.api"):
            warnings.simplefilter("ignore")  # of a method that is applied for one pass
            with changed, patched(self.model, rule.method, **length, **known, **rule.options):
                yield


def _parts_of_rule(folder: ExportFolder) -> dict[str, Rule]:
    """Return the parts of a rule that remain if a server does not read all of it."""
    manifest, rules = folder.manifest, {}
    takes = get_method(manifest["method"])
    if manifest["options"] and not takes.needs_options:
        rules[f"{manifest['method']} without its options"] = Rule(manifest["method"], {})
    if folder.attention_factor != 1 and "attention_factor" in takes.option_fields():
        options = {**manifest["options"], "attention_factor": 1.0}
        rules[f"{manifest['method']} without its attention factor"] = Rule(manifest["method"], options)
    if folder.adapter is not None:
        rules[f"{manifest['method']} without the adapter"] = Rule(
            manifest["method"], manifest["options"], adapter=False
        )
    return rules
