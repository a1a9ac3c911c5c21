"""What a comparison is of, on how much text and for how long; imports no PyTorch, so that help answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hf_posenc.errors import argument
from hf_posenc.evaluation.config import EvalConfig, OutputConfig
from hf_posenc.patching.extension_config import ExtensionConfig
from hf_posenc.retrieval.config import RetrievalConfig, check_retrieval
from hf_posenc.retrieval.tasks import expand_groups
from hf_posenc.utils.settings import refuse_given, same_field
from hf_posenc.utils.units import ContextLength, Duration


@dataclass
class CompareConfig:
    """What is compared, on how much text, and for how long."""

    HELP_COMMON: ClassVar[tuple[str, ...]] = (
        "context_length",
        "methods",
        "rope_scaling",
        "tasks",
        "output",
        "budget",
        "dry_run",
        "max_documents",
    )

    context_length: ContextLength = field(metadata={"help": "tokens the model is to read (32k = 32768)"})
    methods: list[str] = field(
        default_factory=list,
        metadata={"help": "methods from `hf-posenc list methods`; default: all that suit the model without training"},
    )
    rope_scaling: str | None = same_field(
        ExtensionConfig,
        "rope_scaling",
        help="one more row: a rope_scaling dictionary of Transformers, vLLM or LLaMA-Factory, such as "
        """'{"rope_type": "yarn", "factor": 4.0}'; without a factor it extends to --context-length""",
    )
    tasks: list[str] = same_field(
        RetrievalConfig,
        "tasks",
        help="also measure retrieval in the documents: tasks and groups from `hf-posenc list tasks`",
    )
    depths: list[float] = same_field(RetrievalConfig, "depths")
    samples: int = same_field(RetrievalConfig, "samples")
    output: str | None = same_field(OutputConfig, "output")
    budget: Duration | None = field(
        default=None, metadata={"help": "longest time to take (90s, 20m, 1.5h): the most expensive rows are left out"}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "only show what would be measured, and how long it would take"}
    )
    max_documents: int = same_field(EvalConfig, "max_documents", default=1)
    cut: bool = same_field(EvalConfig, "cut")
    prefill_chunk: ContextLength | None = same_field(EvalConfig, "prefill_chunk")
    original_max_position_embeddings: ContextLength | None = same_field(
        ExtensionConfig, "original_max_position_embeddings"
    )
    sliding_window: str = same_field(ExtensionConfig, "sliding_window")
    on_scaled: Literal["refuse", "replace"] = same_field(ExtensionConfig, "on_scaled")
    model_name: str | None = same_field(OutputConfig, "model_name")
    hide_progress: bool = same_field(OutputConfig, "hide_progress")

    def __post_init__(self) -> None:
        self.tasks = expand_groups(self.tasks)

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
        refuse_given(self, RetrievalConfig(), ("depths", "samples"), "is for --tasks; leave it out, or give --tasks")
