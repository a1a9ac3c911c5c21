"""Packing against a hand-written table and a slow token-by-token reading of the same rules."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_posenc.training.packing import PackedDataset, check_ids, log_summary

EOS = 0


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


def test_blocks_by_hand():
    packed = PackedDataset([ids(11, 12, 13, 14, 15, 16)], seq_len=4, eos_token_id=EOS)
    assert len(packed) == 2
    assert packed[0]["input_ids"].tolist() == [11, 12, 13, 14]
    assert packed[0]["position_ids"].tolist() == [0, 1, 2, 3]
    assert packed[0]["labels"].tolist() == [-100, 12, 13, 14]
    # the end of the document, its EOS, then the start of the stream again to fill the block
    assert packed[1]["input_ids"].tolist() == [15, 16, EOS, 11]
    assert packed[1]["position_ids"].tolist() == [0, 1, 2, 0]
    assert packed[1]["labels"].tolist() == [-100, 16, EOS, -100]


def test_every_token_is_there_once_and_none_is_predicted_from_another_document():
    lengths = [7, 1, 30, 12, 3, 18]
    documents = [torch.arange(n) + 1000 * (i + 1) for i, n in enumerate(lengths)]
    packed = PackedDataset(documents, seq_len=8, eos_token_id=EOS, seed=3)
    fed = torch.cat([packed[i]["input_ids"] for i in range(len(packed))])
    total = sum(lengths) + len(lengths)
    assert len(fed) == -(-total // 8) * 8
    seen = fed[:total]
    for document in documents:
        start = int((seen == document[0]).nonzero())
        assert seen[start : start + len(document)].tolist() == document.tolist()
        assert seen[start + len(document)] == EOS
    assert fed[total:].tolist() == fed[: len(fed) - total].tolist()
    for block in packed:
        position = 0
        for i in range(8):
            before, token = (int(block["input_ids"][i - 1]), int(block["input_ids"][i])) if i else (EOS, -1)
            position = 0 if before == EOS else position + 1
            assert block["position_ids"][i] == position
            expected = -100 if position == 0 else token
            assert block["labels"][i] == expected


def test_an_eos_already_there_is_not_doubled_and_none_can_be_asked_for():
    assert len(PackedDataset([ids(5, EOS)], 2, eos_token_id=EOS)) == 1
    assert PackedDataset([ids(5, 6)], 2, eos_token_id=None)[0]["input_ids"].tolist() == [5, 6]


def test_the_seed_decides_the_order():
    documents = [torch.full((4,), i + 1) for i in range(20)]

    def order(seed: int) -> list[int]:
        return PackedDataset(documents, 5, eos_token_id=EOS, seed=seed).stream.tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    prints = {PackedDataset(documents, 5, eos_token_id=EOS, seed=seed).fingerprint() for seed in (1, 1, 2)}
    assert len(prints) == 2


def test_summary_counts(caplog: pytest.LogCaptureFixture):
    packed = PackedDataset([torch.arange(1, 10), torch.arange(1, 4)], seq_len=8, eos_token_id=EOS, seed=0)
    summary = packed.summary(original_length=4)
    assert (summary.num_documents, summary.num_tokens, summary.num_blocks, summary.num_repeated) == (2, 14, 2, 2)
    fed = torch.cat([packed[i]["position_ids"] for i in range(2)])
    assert summary.share_beyond_original == sum(p >= 4 for p in fed.tolist()) / 16
    assert summary.num_pieces == fed.tolist().count(0)
    with caplog.at_level(logging.INFO):
        log_summary(summary, 4)
    assert "none dropped" in caplog.text
    assert "hardly sees" not in caplog.text


def test_short_documents_are_reported_as_teaching_nothing_long(caplog: pytest.LogCaptureFixture):
    packed = PackedDataset([torch.arange(1, 5)] * 20, seq_len=32, eos_token_id=EOS)
    log_summary(packed.summary(original_length=16), 16)
    assert "only 0.00 % of the training tokens stand past the original 16 tokens" in caplog.text


@pytest.mark.parametrize(
    ("documents", "seq_len", "message"),
    [
        ([], 8, "no documents"),
        ([ids(1), torch.tensor([], dtype=torch.int64)], 8, "document 1 must be a 1-D"),
        ([torch.ones(2, 3, dtype=torch.int64)], 8, "document 0 must be a 1-D"),
        ([ids(1, 2)], 1, "at least 2"),
    ],
)
def test_bad_input(documents: list[torch.Tensor], seq_len: int, message: str):
    with pytest.raises(ValueError, match=message):
        PackedDataset(documents, seq_len, eos_token_id=EOS)


def test_ids_the_model_has_no_embedding_for():
    check_ids([ids(0, 5), ids(9)], vocab_size=10)
    with pytest.raises(ValueError, match="text 1 holds token id 10, but the model's vocabulary has 10 ids, 0 to 9"):
        check_ids([ids(0, 5), ids(9, 10)], 10, "text")
    with pytest.raises(TypeError, match=r"document 0 must hold token ids \(int64\), got torch.float32"):
        check_ids([torch.ones(3)], 10)
