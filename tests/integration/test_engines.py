"""vLLM and mlx-lm on the folders and commands of ``hf-posenc export``, against the live model.

The environments take up to 40 minutes (vLLM) and 4 minutes (mlx-lm) to install, and the tests 10 and 4 minutes beside
other work on two cores. ``engines.py`` says how to name environments that are there already.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from adapted_models import fit_adapted
from engines import log_probabilities
from hf_posenc import patch_model, save_extended
from hf_posenc.assets import load_novel, tiny_model_path
from hf_posenc.exports import export_command
from tiny_models import STATIC_METHODS, load_tiny, method_options

pytestmark = pytest.mark.slow

ORIGINAL, TARGET, LENGTH = 256, 1024, 400
# Its rotary embedding takes no number for these: export refuses them, with the reason.
NOT_BY_MLX = {"yarn-paper", "yarn-harmonic", "yarn-options", "nope", "ntk_rcd-constant"}


class Extended:
    """Folders of every static method, with what the live models say of one text.

    Attributes:
        root: The folder of the folders; ``base`` in it is the unextended model.
        ids: The text.
        live: By method, the log-probability of each token after the first one.
    """

    def __init__(self, root: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model_path())
        self.root, self.live = root, {}
        self.ids = tokenizer(load_novel("persuasion")[:3000], verbose=False)["input_ids"][:LENGTH]
        base = load_tiny()
        base.save_pretrained(root / "base")
        tokenizer.save_pretrained(root / "base")
        for key in STATIC_METHODS:
            model = load_tiny()
            method, options = method_options(key, model)
            if "short_factor" in options:  # two lists are refused
                options["short_factor"] = options["long_factor"]
            patch_model(model, method, TARGET / ORIGINAL, **options)
            save_extended(model, root / key, tokenizer, base_model=str(root / "base"))
            self.live[key] = self._values(model)
        fit, wrapped = fit_adapted(tokenizer, TARGET)
        save_extended(wrapped, root / "adapter", tokenizer, base_model=str(root / "base"), fitted_on=fit.facts)
        with wrapped.disable_adapter():
            self.live["rule alone"] = self._values(wrapped)
        model = wrapped.merge_and_unload().eval()
        save_extended(model, root / "adapted", tokenizer, base_model=str(root / "base"), fitted_on=fit.facts)
        self.live["adapted"] = self._values(model)

    @torch.no_grad()
    def _values(self, model: PreTrainedModel) -> torch.Tensor:
        ids = torch.tensor(self.ids)
        said = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        return said.gather(-1, ids[1:, None])[:, 0]

    def commands(self, key: str, stack: str) -> list[list[str]]:
        """Return the words of the commands, each without the name of the program."""
        lines = export_command(self.root / key, stack).splitlines()
        start = {"vllm": 2, "mlx": 1}[stack]
        return [shlex.split(line)[start:] for line in lines if not line.startswith("#")]

    def mean(self, key: str, served: torch.Tensor) -> float:
        """Return the mean absolute difference from the live model, of the half up to or past the original length."""
        apart = (served - self.live[key]).abs()
        return float(max(apart[:ORIGINAL].mean(), apart[ORIGINAL:].mean()))


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Extended:
    return Extended(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def by_vllm(extended: Extended, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What vLLM says of each folder by the first printed command, and of the base model by the second one."""
    jobs = {"unscaled": [str(extended.root / "base"), "--max-model-len", str(ORIGINAL * 2)]}
    jobs["unscaled"] += ["--hf-overrides", f'{{"max_position_embeddings": {TARGET}}}']
    for key in STATIC_METHODS:
        jobs[f"{key}, folder"], jobs[f"{key}, override"] = extended.commands(key, "vllm")
        assert jobs[f"{key}, override"][0] == str(extended.root / "base")
    (jobs["adapted"],) = extended.commands("adapted", "vllm")
    jobs["base and adapter"], _ = extended.commands("adapter", "vllm")  # the second one needs the plugin
    return log_probabilities("vllm", tmp_path_factory.mktemp("vllm"), jobs, extended.ids)


@pytest.fixture(scope="module")
def by_mlx(extended: Extended, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    jobs = {key: ["--model", str(extended.root / key)] for key in (*STATIC_METHODS, "base")}
    return log_probabilities("mlx", tmp_path_factory.mktemp("mlx"), jobs, extended.ids)


@pytest.mark.parametrize("key", STATIC_METHODS)
def test_vllm_runs_every_static_method(key: str, extended: Extended, by_vllm: dict[str, torch.Tensor]) -> None:
    assert extended.mean(key, by_vllm[f"{key}, folder"]) < 1e-4
    assert extended.mean(key, by_vllm[f"{key}, override"]) < 1e-4
    assert extended.mean(key, by_vllm["unscaled"]) > 0.1  # the same comparison with the rule left out


@pytest.mark.parametrize("way", ["adapted", "base and adapter"])
def test_vllm_runs_a_model_whose_projections_were_changed(
    way: str, extended: Extended, by_vllm: dict[str, torch.Tensor]
) -> None:
    assert extended.mean("adapted", by_vllm[way]) < 1e-4
    assert extended.mean("rule alone", by_vllm[way]) > 1e-3


@pytest.mark.parametrize("key", STATIC_METHODS)
def test_mlx_runs_what_is_exported_and_misreads_what_is_refused(
    key: str, extended: Extended, by_mlx: dict[str, torch.Tensor]
) -> None:
    if key in NOT_BY_MLX:
        with pytest.raises(ValueError, match="mlx-lm cannot express"):
            extended.commands(key, "mlx")
        assert extended.mean(key, by_mlx[key]) > 1e-2
    else:
        assert extended.commands(key, "mlx") == [["--model", str(extended.root / key)]]
        assert extended.mean(key, by_mlx[key]) < 1e-4
    assert extended.mean(key, by_mlx["base"]) > 0.1  # the same comparison with the rule left out
