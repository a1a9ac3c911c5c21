"""The throughput of vLLM with the plugin, which raises positions, as a ratio to the static server.

    VENV_OF_VLLM/bin/python scripts/benchmark_vllm.py longer-model --rounds 3

Both servers get the same mixed load, one after the other in processes of their own, some times in turn. For the plugin,
every second request has the extension; the static server has it for all. hf_posenc has to be installed beside vLLM.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

REQUESTS, PROMPT, WRITTEN = 24, 128, 64  # tokens


def tokens_a_second(folder: str, dtype: str) -> float:
    """Return how many tokens an engine in this process reads and writes in a second: the best of three times."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(folder, dtype=dtype, enable_prefix_caching=False, max_num_seqs=REQUESTS)
    prompts = [
        TokensPrompt(prompt_token_ids=[1 + (7 * at + one) % 500 for at in range(PROMPT)]) for one in range(REQUESTS)
    ]
    wanted = [
        SamplingParams(
            max_tokens=WRITTEN, ignore_eos=True, temperature=0.0, extra_args={"extension": ("on", "off")[one % 2]}
        )
        for one in range(REQUESTS)
    ]
    seconds = []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return REQUESTS * (PROMPT + WRITTEN) / min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of a static method, as hf-posenc patch writes it")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each server (default: 3)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(f"tokens a second: {tokens_a_second(args.folder, args.dtype)}")
        return
    found: dict[str, list[float]] = {"static": [], "plugin": []}
    for _ in range(args.rounds):
        for server, rates in found.items():
            env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
            env |= {"VLLM_PLUGINS": ""} if server == "static" else {}
            words = [sys.executable, __file__, args.folder, "--dtype", args.dtype, "--one"]
            done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
            rates.append(float(done.stdout.rsplit("tokens a second:", 1)[1].split()[0]))
            print(f"{server}: {rates[-1]:.0f} tokens a second", flush=True)
    ratio = statistics.median(found["plugin"]) / statistics.median(found["static"])
    print(f"with the plugin / static: {ratio:.3f}")


if __name__ == "__main__":
    main()
