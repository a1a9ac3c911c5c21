"""The flags of ``hf-posenc compare``; imports no PyTorch, so that help answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hf_posenc.cli.eval_arguments import TASKS, RetrievalArguments
from hf_posenc.errors import argument
from hf_posenc.utils.units import ContextLength, Duration


@dataclass
class CompareArguments:
    """What is compared, on how much text, and for how long."""

    context_length: ContextLength = field(metadata={"help": "tokens the model is to read (32k = 32768)"})
    methods: list[str] = field(
        default_factory=list, metadata={"help": "from `hf-posenc methods`; default: all that suit the model zero-shot"}
    )
    rope_scaling: str | None = field(
        default=None,
        metadata={
            "help": "one more row: a dictionary as vLLM, LLaMA-Factory and Transformers take it, such as "
            """'{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'; without a factor """
            "it goes as far as --context-length"
        },
    )
    tasks: list[str] = field(
        default_factory=list,
        metadata={"help": f"measure retrieval in the documents too: one or more of {', '.join(TASKS)}"},
    )
    depths: list[float] = field(
        default_factory=lambda: [0.0, 25.0, 50.0, 75.0, 100.0],
        metadata={"help": "where it is hidden, in percent of the text before it"},
    )
    samples: int = field(default=1, metadata={"help": "prompts of each task, length and depth"})
    output: str | None = field(
        default=None, metadata={"help": "append results to this .jsonl file, and resume from it"}
    )
    budget: Duration | None = field(
        default=None, metadata={"help": "time to take at most (90s, 20m, 1.5h): the dearest rows are left out"}
    )
    dry_run: bool = field(default=False, metadata={"help": "only say what would be measured, and how long it takes"})
    max_documents: int = field(default=1, metadata={"help": "at most so many documents, evenly spread"})
    cut: bool = field(default=False, metadata={"help": "cut long documents into pieces of the context length"})
    prefill_chunk: ContextLength | None = field(
        default=None, metadata={"help": "feed so many tokens at a time over a KV cache: same numbers, less memory"}
    )
    original_max_position_embeddings: int | None = field(
        default=None, metadata={"help": "tokens the model was trained on; default: what its config says"}
    )
    sliding_window: str = field(
        default="keep", metadata={"help": "what becomes of a window that every layer has: keep, off or tokens (16k)"}
    )
    on_scaled: Literal["refuse", "replace"] = field(
        default="refuse", metadata={"help": "what to do with a model that is scaled already"}
    )
    model_name: str | None = field(default=None, metadata={"help": "the model's name in results; default: as given"})
    hide_progress: bool = field(default=False, metadata={"help": "no progress bar"})


def check_comparison(what: CompareArguments) -> None:
    """Check what can be said of a comparison before a model is loaded.

    Raises:
        ValueError, TypeError: An unknown method or task, a value out of range, or a flag without a use.
    """
    from hf_posenc.cli.request_checks import refuse_given
    from hf_posenc.families.sliding_window import check_window
    from hf_posenc.methods.registry import get_method
    from hf_posenc.patching.rope_scaling import read_rope_scaling
    from hf_posenc.retrieval.measuring import check_retrieval
    from hf_posenc.spec import check_length

    for name in what.methods:
        if name != "none":
            get_method(name)
    if what.rope_scaling is not None:
        original = what.original_max_position_embeddings
        read_rope_scaling(what.rope_scaling).refuse_other(original_max_position_embeddings=original)
    check_length(argument("context_length"), what.context_length)
    check_length(argument("max_documents"), what.max_documents)
    if what.original_max_position_embeddings is not None:
        check_length(argument("original_max_position_embeddings"), what.original_max_position_embeddings)
    check_window(what.sliding_window)
    if what.tasks:
        check_retrieval(what.tasks, [what.context_length], what.depths, what.samples)
    else:
        refuse_given(what, RetrievalArguments(), ("depths", "samples"), "is for --tasks; leave it out, or ask")
