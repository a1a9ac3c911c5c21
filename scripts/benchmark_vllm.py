"""The throughput of vLLM with the plugin, which raises positions, as a ratio to vLLM without it.

    VENV_OF_VLLM/bin/python scripts/benchmark_vllm.py longer-model

One engine reads and writes the same prompts in turn with the plugin, where every second request has the extension, and
with what the plugin puts around vLLM's functions taken away, as in a server with one rule. hf_posenc has to be
installed beside vLLM.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

REQUESTS, PROMPT, WRITTEN = 24, 128, 64  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of a static method, as hf-posenc patch writes it")
    parser.add_argument("--rounds", type=int, default=10, help="times that each is measured (default: 10)")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # what is put around its functions is in this process
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    engine = LLM(args.folder, dtype=args.dtype, enable_prefix_caching=False, max_num_seqs=REQUESTS)
    prompts = [
        TokensPrompt(prompt_token_ids=[1 + (7 * at + one) % 500 for at in range(PROMPT)]) for one in range(REQUESTS)
    ]

    def seconds(*extensions: str) -> float:
        wanted: list[Any] = [
            SamplingParams(max_tokens=WRITTEN, ignore_eos=True, temperature=0.0, extra_args={"extension": extension})
            for extension in extensions * (REQUESTS // len(extensions))
        ]
        start = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - start

    hooked = ((InputProcessor, "process_inputs"), (GPUModelRunner, "_preprocess"))
    put_around = {(owner, name): getattr(owner, name) for owner, name in hooked}
    found: dict[str, list[float]] = {"with": [], "without": []}
    seconds("on", "off")  # warms up
    for _ in range(args.rounds):
        found["with"].append(seconds("on", "off"))
        for (owner, name), function in put_around.items():
            setattr(owner, name, function.__wrapped__)
        found["without"].append(seconds("off"))
        for (owner, name), function in put_around.items():
            setattr(owner, name, function)
    for name, times in found.items():
        print(f"{name} the plugin: {REQUESTS * (PROMPT + WRITTEN) / statistics.median(times):.0f} tokens a second")
    ratios = [without / with_it for with_it, without in zip(found["with"], found["without"], strict=True)]
    print(f"throughput with the plugin / without, median of {args.rounds}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
