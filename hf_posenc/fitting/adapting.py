"""Low-rank changes of the query and key projections, by which a model attends under a static rule as its teacher.

Each layer alone is matched with the teacher's (``layer_matching``). Then all changes are trained together on short
texts (``short_matching``), because the small errors of many layers add up. The rule is an existing one: ``llama3``
keeps the pairs that rotate within short texts, which is what costs them least.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_posenc.evaluation.model_facts import hash_json
from hf_posenc.fitting.adapter import Adapter, targets, with_low_rank
from hf_posenc.fitting.config import rule_of
from hf_posenc.fitting.layer_matching import match_layers, restore_layer
from hf_posenc.fitting.rule_attention import extended_layers
from hf_posenc.fitting.run import FitRun
from hf_posenc.fitting.short_matching import match_short_texts

# Settings that decide no layer: those of what is done afterwards, and the name of the rule, which is in the identity.
_NOT_OF_LAYERS = ("short_steps", "short_rate", "rule")


def adapt(run: FitRun, seed: int, identity: str) -> Adapter:
    """Fit the changes of all layers in one forward of the teacher, then together; the model is left as it was.

    Layers that were fitted before, for other settings of the steps on short texts too, are not fitted again.

    Args:
        run: The fit.
        seed: Of everything random.
        identity: What the changes depend on besides the settings; files of another one are not read.

    Raises:
        ValueError: There is time for hardly a step, or a loss is not finite.
    """
    from peft import get_peft_model_state_dict

    config = run.config.adapt
    assert config is not None
    texts = [run.taught(ids) for ids in run.texts.fitted]
    of_layers = {name: value for name, value in vars(config).items() if name not in _NOT_OF_LAYERS}
    folder = run.folder / f"adapter-{hash_json([identity, of_layers, run.budget.seconds])}"
    folder.mkdir(parents=True, exist_ok=True)
    match_layers(run, rule_of(config.rule, run.factor), texts, seed, folder)
    modules = targets(run.rotary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        changed = with_low_rank(run.rotary.model, config.rank, modules)
    try:
        errors, steps = zip(*(restore_layer(layer, folder) for layer in extended_layers(run.rotary)), strict=True)
        short = match_short_texts(run, changed, texts, seed, folder)
        weights = {name: weight.cpu().clone() for name, weight in get_peft_model_state_dict(changed).items()}
    finally:
        changed.unload()
    return Adapter(replace(config, steps=steps[0], short_steps=short), modules, weights, errors)
