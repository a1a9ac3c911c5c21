"""The text, the tasks and the time of a comparison of methods; imports no PyTorch, so that help answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_posenc.errors import argument
from hf_posenc.retrieving.config import RetrievalConfig, check_retrieval
from hf_posenc.settings import refuse_given


@dataclass(frozen=True)
class CompareConfig:
    """A comparison of the methods that suit a model.

    Attributes:
        context_length: Tokens that the model is to read.
        methods: Names of the methods; empty for all that suit the model without training.
        rope_scaling: A dictionary of Transformers, vLLM or LLaMA-Factory as JSON, which is one more row; without a
            factor it extends to ``context_length``.
        tasks: Retrieval tasks, measured in the documents too.
        budget: Seconds that it may take; the most expensive rows are left out.
        dry_run: Whether to show the plan only.
        command: What was typed, for the records.

    The others are fields of ``EvalConfig``, ``OutputConfig``, ``RetrievalConfig`` and ``ExtensionConfig``.
    """

    context_length: int
    methods: Sequence[str] = ()
    rope_scaling: str | None = None
    tasks: Sequence[str] = ()
    depths: Sequence[float] = field(default_factory=lambda: RetrievalConfig().depths)
    samples: int = RetrievalConfig.samples
    output: str | None = None
    budget: float | None = None
    dry_run: bool = False
    command: str = ""
    max_documents: int | None = 1
    cut: bool = False
    prefill_chunk: int | None = None
    original_max_position_embeddings: int | None = None
    sliding_window: str = "keep"
    on_scaled: str = "refuse"
    model_name: str | None = None
    hide_progress: bool = False

    def check(self) -> None:
        """Check what can be checked before a model is loaded.

        Raises:
            ValueError, TypeError: An unknown method or task, a value out of range, or a flag without a use.
        """
        from hf_posenc.families.sliding_window import check_window
        from hf_posenc.methods.registry import get_method
        from hf_posenc.patching.rope_scaling import read_rope_scaling
        from hf_posenc.spec import check_length

        for name in self.methods:
            if name != "none":
                get_method(name)
        if self.rope_scaling is not None:
            original = self.original_max_position_embeddings
            read_rope_scaling(self.rope_scaling).refuse_other(original_max_position_embeddings=original)
        for name in ("context_length", "max_documents", "original_max_position_embeddings"):
            if getattr(self, name) is not None:
                check_length(argument(name), getattr(self, name))
        check_window(self.sliding_window)
        if self.tasks:
            check_retrieval(self.tasks, [self.context_length], self.depths, self.samples)
            return
        usual = CompareConfig(self.context_length)
        refuse_given(self, usual, ("depths", "samples"), "is for --tasks; leave it out, or give --tasks")
