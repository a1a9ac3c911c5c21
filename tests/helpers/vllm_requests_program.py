"""Requests to vLLM on the CPU, one batch after the other; ``engines.py`` runs this by an environment that has it."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt


def answer(output: Any, ids: list[int]) -> dict[str, Any]:
    """Return the log-probabilities of the prompt after its first token, if they were requested, and of the answer."""
    written = output.outputs[0]
    prompt = zip((output.prompt_logprobs or [])[1:], ids[1:], strict=bool(output.prompt_logprobs))
    tokens = [*prompt, *zip(written.logprobs, written.token_ids, strict=True)]
    return {
        "log_probabilities": [found[token].logprob for found, token in tokens],
        "cached": output.num_cached_tokens,
    }


def main(asked: str, answered: str) -> None:
    found: dict[str, Any] = {}
    for name, job in json.loads(Path(asked).read_text()).items():
        engine = LLM(**job["engine"], dtype="float32", enforce_eager=True, disable_log_stats=False)
        batches = []
        for batch in job["batches"]:
            wanted = [
                SamplingParams(
                    max_tokens=one["max_tokens"],
                    temperature=0.0,
                    logprobs=0,
                    prompt_logprobs=0 if one["scored"] else None,  # such a prompt is not read from the prefix cache
                    extra_args=one["extra_args"],
                )
                for one in batch
            ]
            prompts = [TokensPrompt(prompt_token_ids=one["ids"]) for one in batch]
            outputs = engine.generate(prompts, wanted, use_tqdm=False)
            batches.append([answer(output, one["ids"]) for output, one in zip(outputs, batch, strict=True)])
        metrics = {one.name: one.value for one in engine.get_metrics() if hasattr(one, "value")}
        found[name] = {"batches": batches, "preemptions": metrics["vllm:num_preemptions"]}
        del engine, outputs
        cleanup_dist_env_and_memory()
        gc.collect()
    Path(answered).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
