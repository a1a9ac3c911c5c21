"""Find what is wrong with the positions of a checkpoint or a loaded model, and correct its config."""

from __future__ import annotations

from hf_posenc.doctor.config_meaning import Known
from hf_posenc.doctor.diagnosis import Diagnosis, diagnose, diagnosis_text, write_mended

__all__ = ["Diagnosis", "Known", "diagnose", "diagnosis_text", "write_mended"]
