"""A method is its class: other files name one only where there is a reason."""

from __future__ import annotations

from pathlib import Path

import hf_posenc

PACKAGE = Path(hf_posenc.__file__).parent
_EXAMPLE = "an example of a request or of a rope_scaling dictionary, in a docstring or message"
ALLOWED = {
    "methods/yarn.py": "the method",
    "methods/registry.py": "the default method",
    "patching/api.py": _EXAMPLE,
    "patching/extension_config.py": _EXAMPLE,
    "patching/rope_scaling.py": "the rules that such dictionaries can name, in the order of messages; examples",
    "evaluation/lm_eval_model.py": _EXAMPLE,
    "evaluation/protocols.py": "the name of a protocol of evaluation, after the paper's",
    "fitting/config.py": "the methods that a fitted one is compared with",
    "fitting/grid.py": "the methods that a fit may begin at",
    "training/recipes.py": "the methods of the papers' recipes",
    "cli/demo.py": "the methods that the demo shows",
    "reporting/looks.py": "the colours of methods in charts",
    "doctor/transformers_readers.py": "the rules of Transformers, by rope_type",
}


def test_methods_are_named_only_where_there_is_a_reason() -> None:
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if '"yarn"' in file.read_text(encoding="utf-8")
    }
    assert found == ALLOWED.keys()
