"""The tokenizers that the tests of prompts share, and the maker of prompts from a held-out novel."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_posenc.assets import HELD_OUT_NOVEL, load_novel, tiny_model_path
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.prompts import PromptMaker
from tiny_llama import make_tiny_tokenizer


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """The byte-level BPE of the tiny pretrained Llama."""
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture(scope="module")
def maker(words: PreTrainedTokenizerFast) -> PromptMaker:
    return PromptMaker(words, read_haystack(words, [load_novel(HELD_OUT_NOVEL)[2000:60_000]]), "off")


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer()
