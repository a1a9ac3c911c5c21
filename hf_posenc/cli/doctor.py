"""``hf-posenc doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hf_posenc.cli.shared_arguments import parse
from hf_posenc.utils.units import ContextLength


@dataclass
class DoctorArguments:
    """Where the corrected config goes, and facts that the config lacks."""

    live: bool = field(
        default=False, metadata={"help": "also load the model, and compare its modules with what the config means"}
    )
    fix: str | None = field(
        default=None,
        metadata={
            "help": "write a corrected config to this folder or .json file; if that is the input, a .bak is kept"
        },
    )
    original_max_position_embeddings: ContextLength | None = field(
        default=None, metadata={"help": "tokens the model was trained on, if the config lacks it"}
    )
    rope_theta: float | None = field(
        default=None, metadata={"help": "base of the rotary frequencies, if the config lacks it"}
    )
    ramp: Literal["code", "paper", "harmonic"] | None = field(
        default=None, metadata={"help": "ramp that a YaRN model was trained with; models of PoSE: harmonic"}
    )
    trained_length: ContextLength | None = field(
        default=None,
        metadata={"help": "tokens that a merged LongLoRA model was tuned to, if its config lacks linear scaling"},
    )


def doctor(argv: Sequence[str]) -> int:
    """Find what is wrong with a checkpoint's positions, and how each Transformers reads its config; --fix corrects it.

    Examples:
        hf-posenc doctor longer-model
        hf-posenc doctor longer-model --fix corrected

    Returns:
        1 if something is wrong, 0 if the checkpoint is sound or was corrected.
    """
    positional = {"path": "folder, config.json, .gguf file or name on the Hub"}
    given, chosen = parse("doctor", doctor.__doc__, argv, (DoctorArguments,), positional)
    from hf_posenc.doctor import Known, diagnose, diagnosis_text, write_mended

    known = Known(chosen.original_max_position_embeddings, chosen.rope_theta, chosen.ramp, chosen.trained_length)
    diagnosis = diagnose(given.path, known, live=chosen.live)
    print(diagnosis_text(diagnosis))
    if chosen.fix is not None:
        print("\n".join(f"written: {path}" for path in write_mended(diagnosis, chosen.fix)))
        return 0
    return 0 if diagnosis.sound else 1
