"""Log-probabilities by mlx-lm on the CPU; ``engines.py`` runs this by the Python of an environment that has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model


def main(asked: str, answered: str) -> None:
    mx.set_default_device(mx.cpu)
    request = json.loads(Path(asked).read_text())
    ids, found = mx.array(request["ids"]), {}
    for name, words in request["jobs"].items():
        model, _ = load_model(Path(words[words.index("--model") + 1]))
        logits = model(ids[None])[0, :-1].astype(mx.float32)
        values = mx.take_along_axis(logits, ids[1:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
        found[name] = values.tolist()
    Path(answered).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
