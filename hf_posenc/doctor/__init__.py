"""What a checkpoint or a live model declares of its positions, who reads it how, what is wrong, and how to mend it."""

from __future__ import annotations

from hf_posenc.doctor.config_meaning import Known
from hf_posenc.doctor.diagnosis import Diagnosis, diagnose, diagnosis_text, write_mended

__all__ = ["Diagnosis", "Known", "diagnose", "diagnosis_text", "write_mended"]
