"""Windows of equal length fed together: the losses of single windows, fewer forwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_posenc import patch_model
from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.data.reading import tokenize_text
from hf_posenc.evaluation import perplexity
from hf_posenc.evaluation.losses import default_batch_size, window_losses
from hf_posenc.evaluation.windows import Window, sliding_windows

Make = Callable[..., LlamaForCausalLM]
WINDOWS = [*sliding_windows(100, 24, 7), Window(0, 90, 80), Window(3, 93, 91)]


def test_batches_give_the_losses_of_single_windows(tiny_llama: Make) -> None:
    ids = torch.randint(1, 128, (100,))
    needed = torch.ones(100, dtype=torch.bool)
    needed[40:52] = False  # a window with nothing to score, and one with a gap
    needed[70] = False
    for method in (None, "yarn", "dynamic_yarn"):
        model = tiny_llama()
        if method is not None:
            patch_model(model, method, 4)
        alone = window_losses(model, ids, WINDOWS, needed, batch_size=1)
        assert alone.isnan().tolist() == [True, *(~needed[1:]).tolist()]
        for settings in ({"batch_size": 3}, {"batch_size": 100}, {}, {"batch_size": 4, "prefill_chunk": 10}):
            found = window_losses(model, ids, WINDOWS, needed, logits_chunk=9, **settings)
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_batches_on_a_trained_model(dtype: str, tolerance: float) -> None:
    model, tokenizer = load_model(tiny_model_path(), dtype=dtype, device="cpu")
    ids = tokenize_text(tokenizer, load_novel(HELD_OUT_NOVEL)[:6000])[:512]
    needed = torch.ones(512, dtype=torch.bool)
    windows = sliding_windows(512, 128, 64)
    alone = window_losses(model, ids, windows, needed, batch_size=1)[1:]
    found = window_losses(model, ids, windows, needed, batch_size=4)[1:]
    assert (found - alone).abs().max() <= tolerance * (1 if dtype == "bfloat16" else alone.abs().max())
    assert found.mean().item() == pytest.approx(alone.mean().item(), rel=1e-6 if dtype == "float32" else 2e-3)


def test_short_windows_share_a_forward_and_long_ones_do_not(tiny_llama: Make) -> None:
    model = tiny_llama()
    assert [default_batch_size(model, window) for window in (64, 512, 1024, 4096)] == [16, 2, 1, 1]
    shapes: list[tuple[int, ...]] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda module, args, output: shapes.append(args[0].shape))
    document = torch.arange(200) % 127
    perplexity(model, [document], [64], "sliding_window", stride=8, max_tokens=200, progress=False)
    assert [tuple(shape) for shape in shapes[2:]] == [(16, 64), (2, 64)]  # after check_head
    shapes.clear()
    perplexity(model, [document], [64], "sliding_window", stride=8, max_tokens=200, progress=False, batch_size=5)
    hook.remove()
    assert [tuple(shape) for shape in shapes[2:]] == [(5, 64), (5, 64), (5, 64), (3, 64)]
    with pytest.raises(ValueError, match=r"batch_size.*1,.*0"):
        perplexity(model, [document], [64], batch_size=0)
