"""llama.cpp's server on a .gguf file, in a process of its own; its Python package is ``xllamacpp``."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCALING = "rope_scaling_type"  # its values are names of xllamacpp.llama_rope_scaling_type
_SECONDS = 120  # that one request, or the start, may take


@contextmanager
def serving(file: Path, context_length: int, rope: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Serve a file with a float32 cache and without flash attention, which rounds to float16; yields the address.

    ``rope`` are settings of positions besides those of the file, as llama-server's flags give them.
    """
    command = [sys.executable, __file__, str(file), str(context_length), json.dumps(rope or {})]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = next((line.split()[1] for line in process.stdout if line.startswith("serving ")), None)
        assert address is not None, process.communicate()[1][-2000:]
        yield address
    finally:
        process.kill()
        process.communicate()


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        return json.loads(answer.read())


def next_token(address: str, ids: list[int], top: int = 10) -> dict[int, float]:
    """Return the log-probabilities of the likeliest tokens after a prompt, by their numbers."""
    body = {"prompt": ids, "n_predict": 1, "n_probs": top, "temperature": 0.0, "cache_prompt": True}
    (step,) = ask(address, "/completion", body)["completion_probabilities"]
    return {one["id"]: one["logprob"] for one in step["top_logprobs"]}


def _serve(file: str, context_length: int, rope: Mapping[str, Any]) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = file, context_length, 1
    params.port, params.warmup = 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    for name, value in rope.items():
        setattr(params, name, getattr(xllamacpp.llama_rope_scaling_type, value) if name == SCALING else value)
    server = xllamacpp.Server(params)
    print("serving", server.listening_address, flush=True)
    sys.stdin.read()  # until the parent ends


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
