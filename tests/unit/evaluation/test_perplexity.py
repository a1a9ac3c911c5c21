"""Perplexities against brute force, token by token; resuming; intervals; what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_posenc.evaluation import Record, perplexity, read_records
from hf_posenc.evaluation.documents import hash_token_ids, hash_tokenizer
from hf_posenc.evaluation.losses import window_losses
from hf_posenc.evaluation.passes import default_bucket
from hf_posenc.evaluation.windows import Window, sliding_windows

VOCAB = 128


def random_documents(count=2, length=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for _ in range(count)]


@torch.no_grad()
def brute_force_loss(model, context, target):
    """The loss of one token after ``context``, from the model's own logits, in float64."""
    logits = model(input_ids=context[None], use_cache=False).logits[0, -1].double()
    return float(torch.logsumexp(logits, 0) - logits[target])


def measure(model, documents, lengths, *args, **kwargs):
    return perplexity(model, documents, lengths, *args, progress=False, **kwargs)


def family(name):
    shared = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shared |= {"intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    if name == "gemma2":
        config = Gemma2Config(
            **shared, num_key_value_heads=1, head_dim=16, sliding_window=8, final_logit_softcapping=0.5
        )
        return Gemma2ForCausalLM(config).eval()
    if name == "gemma3":  # rotary settings for each layer type
        config = Gemma3TextConfig(**shared, num_key_value_heads=1, head_dim=16, sliding_window=8)
        return Gemma3ForCausalLM(config).eval()
    if name == "gpt2":  # no rotary embedding
        config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0)
        return GPT2LMHeadModel(config).eval()
    if name == "mistral":
        config = MistralConfig(**shared, num_key_value_heads=1, head_dim=16, sliding_window=8)
        return MistralForCausalLM(config).eval()
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shared)).eval()


@pytest.mark.parametrize("prefill_chunk", [None, 1, 7, 1000])
def test_truncated_and_last_k_equal_brute_force(tiny_llama, prefill_chunk):
    model, documents = tiny_llama(), random_documents(length=24)
    records = measure(
        model, documents, [5, 24, 17], ["truncated", "last_k"], last_k=3, prefill_chunk=prefill_chunk, logits_chunk=4
    )
    assert [(one.protocol, one.context_length) for one in records] == [
        *[("truncated", length) for length in (5, 17, 24)],
        *[("last_k", length) for length in (5, 17, 24)],
    ]
    losses = [[brute_force_loss(model, ids[:t], ids[t]) for t in range(1, 24)] for ids in documents]
    for record in records:
        start = 1 if record.protocol == "truncated" else record.context_length - 3
        expected = [loss for row in losses for loss in row[start - 1 : record.context_length - 1]]
        assert record.n_tokens == len(expected)
        assert record.nll_sum == pytest.approx(sum(expected), rel=1e-5)
        assert record.perplexity == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)
        assert record.last_k == (3 if record.protocol == "last_k" else None)
        assert (record.num_documents, record.window, record.stride, record.bos) == (2, None, None, "none")


@pytest.mark.parametrize(("width", "lengths"), [(7, [16, 24]), (None, [24, 40])])
def test_loss_by_position_equals_brute_force(tiny_llama, width, lengths):
    model, documents = tiny_llama(), random_documents()
    records = measure(model, documents, lengths, ["truncated", "last_k"], last_k=3, position_bucket=width)
    losses = [[brute_force_loss(model, ids[:t], ids[t]) for t in range(1, max(lengths))] for ids in documents]
    width = width or 16  # a 32nd of 64 would be 2
    for record in records[:2]:
        assert record.position_bucket == width
        for bucket in range(math.ceil(record.context_length / width)):
            inside = range(max(1, bucket * width), min((bucket + 1) * width, record.context_length))
            expected = sum(row[t - 1] for row in losses for t in inside)
            assert record.position_nll[bucket] == pytest.approx(expected, rel=1e-5)
            assert record.position_tokens[bucket] == 2 * len(inside)
        assert len(record.position_nll) == len(record.position_tokens) == bucket + 1
        assert math.fsum(record.position_nll) == pytest.approx(record.nll_sum, rel=1e-12)
        assert sum(record.position_tokens) == record.n_tokens
    assert {(one.position_bucket, *one.position_nll, *one.position_tokens) for one in records[2:]} == {(None,)}


@pytest.mark.parametrize(("original", "width"), [(2048, 64), (8192, 256), (100, 16), (None, 256)])
def test_width_of_a_bucket(original, width):
    assert default_bucket(original) == width


def test_another_bucket_is_measured_and_older_records_are_read(tiny_llama, tmp_path, caplog):
    model, documents, path = tiny_llama(), random_documents(), tmp_path / "results.jsonl"
    (first,) = measure(model, documents, [20], output=path, position_bucket=4)
    (second,) = measure(model, documents, [20], output=path, position_bucket=5)
    assert (first.run_key, first.nll_sum) == (second.run_key, second.nll_sum)
    assert len(second.position_nll) == 4
    assert "already in" not in caplog.text
    assert measure(model, documents, [20], output=path, position_bucket=5) == [second]
    old = {name: value for name, value in vars(first).items() if not name.startswith("position")}
    path.write_text(json.dumps(old) + "\n")
    assert read_records(path) == [replace(first, position_bucket=None, position_nll=[], position_tokens=[])]
    with pytest.raises(ValueError, match=r"position_bucket.*1,.*0"):
        measure(model, documents, [20], position_bucket=0)


@pytest.mark.parametrize("prefill_chunk", [None, 3])
def test_sliding_window_equals_brute_force(tiny_llama, prefill_chunk):
    model, documents = tiny_llama(), random_documents()
    records = measure(model, documents, [6, 11], "sliding_window", stride=4, max_tokens=14, prefill_chunk=prefill_chunk)
    for record in records:
        expected = []
        for ids in documents:
            for window in sliding_windows(14, record.context_length, 4):
                for t in range(window.score_from, window.end):
                    expected.append(brute_force_loss(model, ids[window.start : t], ids[t]))
        assert record.n_tokens == len(expected) == 26
        assert record.perplexity == pytest.approx(math.exp(sum(expected) / 26), rel=1e-5)
        assert (record.window, record.stride) == (record.context_length, 4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "mistral", "gpt_neox"])
@pytest.mark.parametrize("prefill_chunk", [None, 5])
def test_other_families_equal_brute_force(name, prefill_chunk):
    model, (ids,) = family(name), random_documents(1, 16)
    needed = torch.arange(16) > 0
    losses = window_losses(model, ids, [Window(0, 16, 1)], needed, prefill_chunk=prefill_chunk, logits_chunk=3)
    expected = [brute_force_loss(model, ids[:t], ids[t]) for t in range(1, 16)]
    torch.testing.assert_close(losses[needed], torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_models_that_cannot_be_extended_can_be_measured(name):
    (record,) = measure(family(name), random_documents(), [32])
    assert (record.method, record.factor, record.original_max_position_embeddings) == ("none", 1.0, 64)
    assert record.n_tokens == 62


def test_only_asked_positions_reach_the_head_in_small_chunks(tiny_llama):
    model, documents = tiny_llama(), random_documents(1)
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel() // VOCAB))
    measure(model, documents, [40], logits_chunk=8)
    assert max(rows[2:]) == 8  # after the two forwards of check_head
    assert sum(rows[2:]) == 39
    rows.clear()
    measure(model, documents, [20, 40], "last_k", last_k=3, logits_chunk=8, prefill_chunk=16)
    hook.remove()
    assert sum(rows[2:]) == 6


@pytest.mark.parametrize("protocol", ["truncated", "sliding_window"])
def test_no_gradients_are_kept(tiny_llama, protocol):
    model, states = tiny_llama(), []
    model.model.layers[-1].register_forward_hook(lambda module, args, output: states.append(output))
    measure(model, random_documents(), [24], protocol, stride=8 if protocol == "sliding_window" else None)
    assert states
    assert not any(state.requires_grad for state in states)


def test_short_documents_are_left_out_of_every_length(tiny_llama):
    model = tiny_llama()
    documents = [*random_documents(2, 40), random_documents(1, 30, seed=5)[0]]
    with pytest.warns(UserWarning, match=r"1.*3.*40"):
        records = measure(model, documents, [10, 40])
    assert [record.num_documents for record in records] == [2, 2]
    assert records[0].nll_sum == pytest.approx(measure(model, documents[:2], [10])[0].nll_sum, rel=1e-6)
    with pytest.raises(ValueError, match=r"3.*64.*40"):
        measure(model, documents, [64])


def test_cut_uses_all_of_a_long_document(tiny_llama):
    model, (ids,) = tiny_llama(), random_documents(1, 50)
    pieces = [ids[:12], ids[12:24], ids[24:36], ids[36:48]]
    expected = measure(model, pieces, [6, 12])
    records = measure(model, [ids], [6, 12], cut=True)
    assert [record.nll_sum for record in records] == [one.nll_sum for one in expected]
    assert [record.text_hash for record in records] == [one.text_hash for one in expected]
    spread = measure(model, [ids], [12], cut=True, max_documents=2)[0]
    assert spread.text_hash == measure(model, [pieces[0], pieces[2]], [12])[0].text_hash


def test_bos_is_a_token_of_the_context(tiny_llama):
    model, (ids,) = tiny_llama(), random_documents(1)
    record = measure(model, [ids], [10], bos="prepended")[0]
    by_hand = measure(model, [torch.cat([torch.tensor([0]), ids])], [10])[0]
    assert (record.bos, by_hand.bos) == ("prepended", "none")
    assert (record.nll_sum, record.n_tokens) == (by_hand.nll_sum, 9)
    with pytest.raises(ValueError, match="BOS"):
        measure(model, [[0, *ids.tolist()]], [10], bos="prepended")
    with pytest.raises(ValueError, match="unknown bos 'yes'"):
        measure(model, [ids], [10], bos="yes")


def test_texts_need_a_list_a_tokenizer_and_the_right_vocabulary(tiny_llama):
    model = tiny_llama()
    with pytest.raises(TypeError, match="single document"):
        measure(model, "one text", [8])
    with pytest.raises(TypeError, match="single document"):
        measure(model, torch.arange(10), [8])
    with pytest.raises(TypeError, match="single document"):
        measure(model, [1, 2, 3], [2])
    with pytest.raises(TypeError, match="need tokenizer="):
        measure(model, ["one text"], [8])
    for outside in (500, 128, -100):
        with pytest.raises(ValueError, match=f"{outside}.*0.*127"):
            measure(model, [[1] * 8 + [outside]], [8])
    with pytest.raises(TypeError, match=r"torch\.float32"):
        measure(model, [[1.5] * 8], [8])
    with pytest.raises(ValueError, match="nothing to"):
        measure(model, [], [8])
    with pytest.raises(ValueError, match=r"prefill_chunk.*1"):
        measure(model, [[1] * 8], [8], prefill_chunk=0)


def test_texts_are_tokenized_whole_and_the_tokenizer_is_on_record(tiny_llama):
    words = {"[UNK]": 0, **{f"w{i}": i for i in range(1, VOCAB)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=4)
    model, (ids,) = tiny_llama(), random_documents(1)
    text = " ".join(f"w{i}" for i in ids.tolist())
    record = measure(model, [text], [40], tokenizer=tokenizer)[0]
    expected = measure(model, [ids], [40])[0]
    assert (record.nll_sum, record.text_hash) == (expected.nll_sum, expected.text_hash)
    assert expected.tokenizer_hash == ""
    assert measure(model, [text], [40], tokenizer=tokenizer)[0] == replace(record, seconds=ANY, peak_memory_bytes=ANY)
    tokenizer([text], truncation=True, max_length=3)  # leaves its settings in the tokenizer
    assert hash_tokenizer(tokenizer) == record.tokenizer_hash
    del words["w5"]
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")))
    assert measure(model, [ids], [40], tokenizer=other)[0].tokenizer_hash not in ("", record.tokenizer_hash)


def test_the_text_hash_sees_ids_order_and_where_documents_end():
    rows = [[1, 2, 3], [4]]
    texts = [rows, rows[::-1], [[1, 2], [3, 4]], [[1, 2, 3, 4]], [[1, 2, 3], [5]], [[1, 2, 3]]]
    hashes = {hash_token_ids([torch.tensor(row) for row in text]) for text in texts}
    assert len(hashes) == len(texts)


def test_the_model_is_left_as_it_was_and_dropout_is_off(tiny_llama):
    model = tiny_llama(attention_dropout=0.5)
    expected = measure(model, random_documents(), [20])[0].nll_sum
    model.train()
    model.model.layers[0].eval()
    assert measure(model, random_documents(), [20])[0].nll_sum == expected
    assert model.training
    assert not model.model.layers[0].mlp.training
    assert model.model.layers[1].mlp.training


def test_overflowing_losses_are_an_error(tiny_llama):
    model = tiny_llama()
    torch.nn.init.constant_(model.model.norm.weight, float("inf"))
    with pytest.raises(ValueError, match="float32"):
        measure(model, random_documents(), [8])


def dynamic_llama(tiny_llama):
    return tiny_llama(
        max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    )


def longrope_llama(tiny_llama):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return tiny_llama(
        max_position_embeddings=64, rope_parameters={**rope, "factor": 4.0, "original_max_position_embeddings": 16}
    )


@pytest.mark.parametrize("make", [dynamic_llama, longrope_llama])
def test_length_dependent_frequencies_get_a_pass_per_length(tiny_llama, make, caplog):
    documents = random_documents()
    records = measure(make(tiny_llama), documents, [12, 24, 40], ["truncated", "last_k"], last_k=2)
    assert "context length" in caplog.text
    curve = []
    for length in (12, 24, 40):
        model, total = make(tiny_llama), 0.0  # fresh, so nothing remembers another length
        for ids in documents:
            batch = ids[None, :length]
            with torch.no_grad():
                total += float(make(tiny_llama)(input_ids=batch, labels=batch, use_cache=False).loss) * (length - 1)
        curve.append(total)
    assert [record.nll_sum for record in records[:3]] == pytest.approx(curve, rel=1e-5)
    again = measure(model, documents, [40, 12])  # the same model again, now with a history
    assert [one.nll_sum for one in again] == [records[0].nll_sum, records[2].nll_sum]
    mixed = measure(model, documents, [20, 40], ["truncated", "sliding_window"], stride=5)[2]
    alone = measure(make(tiny_llama), documents, [20], "sliding_window", stride=5, max_tokens=40)[0]
    assert (mixed.context_length, mixed.nll_sum) == (20, alone.nll_sum)  # the pass over 40 tokens left nothing behind
    with pytest.raises(ValueError, match=r"prefill_chunk.*rope_type"):
        measure(model, documents, [40], prefill_chunk=8)


def test_records_say_how_they_were_measured(tiny_llama, tmp_path):
    from hf_posenc.patching.api import patched

    model, path = tiny_llama(), tmp_path / "out" / "results.jsonl"
    with patched(model, method="yarn", factor=4):
        (record,) = measure(model, random_documents(), [20], output=path, label="mine", tokens_trained=7)
    assert (record.method, record.factor, record.original_max_position_embeddings) == ("yarn", 4.0, 64)
    assert (record.label, record.tokens_trained, record.dtype) == ("mine", 7, "float32")
    assert record.attn_implementation == "sdpa"
    assert record.versions["torch"] == torch.__version__
    assert record.seconds > 0
    assert record.peak_memory_bytes > 1e7
    (line,) = path.read_text().splitlines()
    assert Record.from_values(json.loads(line)) == record == read_records(path)[0]
    assert set(json.loads(line)) == set(Record.__dataclass_fields__)
    plain = measure(model, random_documents(), [20])[0]
    assert (plain.method, plain.text_hash) == ("none", record.text_hash)
    assert plain.nll_sum != record.nll_sum
    assert measure(model, random_documents(seed=9), [20])[0].text_hash != record.text_hash


def test_a_document_between_the_longest_length_and_max_tokens_makes_no_piece(tiny_llama):
    rows = [torch.arange(1, 16), torch.arange(1, 26)]  # 15 and 25 tokens; pieces have 20
    with pytest.warns(UserWarning, match=r"1.*2.*20"):
        record = perplexity(tiny_llama(), rows, [10], "sliding_window", stride=5, max_tokens=20, cut=True)[0]
    assert (record.num_documents, record.n_tokens) == (1, 19)
