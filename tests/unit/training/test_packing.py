"""Packing against a hand-written table and a slow token-by-token reading of the same rules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from tokenizers.processors import TemplateProcessing
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hf_posenc.attention.shifted import make_groups
from hf_posenc.data.packing import PackedDocuments, check_ids
from hf_posenc.data.reading import added_bos
from hf_posenc.data.tokens import MaskedTokens
from hf_posenc.training.blocks import PackedBlocks
from hf_posenc.training.data import upsample
from hf_posenc.training.positions import PositionSchedule
from tiny_llama import make_tiny_tokenizer
from tiny_runs import make_tokenizer
from training_blocks import blocks_of, blocks_of_a_run

EOS = 0
PLAIN: dict[str, Any] = {"wants_distances": True, "group": None}


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


def test_blocks_by_hand():
    packed = blocks_of(PackedDocuments([ids(11, 12, 13, 14, 15, 16)], seq_len=4, eos_token_id=EOS))
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
    packed = blocks_of(PackedDocuments(documents, seq_len=8, eos_token_id=EOS, seed=3))
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
    assert len(PackedDocuments([ids(5, EOS)], 2, eos_token_id=EOS)) == 1
    assert blocks_of(PackedDocuments([ids(5, 6)], 2, eos_token_id=None))[0]["input_ids"].tolist() == [5, 6]


def test_a_text_begins_with_bos_where_the_tokenizer_puts_one():
    documents = [ids(5, 6), ids(1, 7)]  # the second has it already
    packed = PackedDocuments(documents, 2, eos_token_id=EOS, bos_token_id=1, seed=0)
    assert sorted(packed.stream.tolist()) == sorted([1, 5, 6, EOS, 1, 7, EOS])
    dialogue = MaskedTokens(ids(8, 9), torch.tensor([False, True]))
    assert PackedDocuments([dialogue], 2, eos_token_id=EOS, bos_token_id=1).stream.tolist() == [8, 9]


def test_which_tokenizers_put_one():
    tokenizer = make_tiny_tokenizer()
    assert added_bos(tokenizer) is None
    tokenizer.bos_token = "~"
    assert added_bos(tokenizer) is None  # it has one, and does not put it there
    one = [("~", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=one)
    assert added_bos(tokenizer) == tokenizer.bos_token_id
    assert added_bos(make_tokenizer()) is None  # it does not know "A", and its token for that is BOS


def test_the_seed_decides_the_order():
    documents = [torch.full((4,), i + 1) for i in range(20)]

    def order(seed: int) -> list[int]:
        return PackedDocuments(documents, 5, eos_token_id=EOS, seed=seed).stream.tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    prints = {PackedDocuments(documents, 5, eos_token_id=EOS, seed=seed).fingerprint() for seed in (1, 1, 2)}
    assert len(prints) == 2


def scheduled(
    documents: list[torch.Tensor], seq_len: int, num_blocks: int, kind: str = "full", **changes: Any
) -> PackedBlocks:
    """Blocks for a model trained on 16 tokens and extended to 64."""
    positions = PositionSchedule(kind, 16, 64, **changes)
    return blocks_of_a_run(documents, seq_len, num_blocks, positions=positions)


def test_summary_counts_what_is_trained_on(caplog: pytest.LogCaptureFixture):
    documents = [torch.arange(1, 11), torch.arange(1, 31)]  # 40 tokens: blocks of 16, 16 and 8 + 8 again
    schedule = scheduled(documents, 16, 2)
    summary = schedule.summary()
    assert (summary.num_documents, summary.num_tokens) == (2, 40)
    assert (summary.num_blocks, summary.num_trained, summary.num_short) == (2, 32, 0)
    unread = set(range(40)) - {index % 40 for block in schedule.order for index in range(block * 16, block * 16 + 16)}
    assert summary.num_unused == len(unread) > 0
    assert summary.num_pieces == sum(int((schedule[i]["position_ids"] == 0).sum()) for i in range(2))
    with caplog.at_level(logging.INFO):
        schedule.log_summary(**PLAIN)
    assert f"({100 * len(unread) / 40:.1f} %) are in none of these blocks" in caplog.text
    assert "2 documents, 40 tokens; trained on: 32 tokens in 2 blocks, " in caplog.text
    assert "0.0 %" in caplog.text
    caplog.clear()
    twice = scheduled(documents, 16, 7, short_share=0.5)
    whole = twice.summary()
    assert (whole.num_blocks, whole.num_unused, whole.num_short) == (7, 0, 3)
    with caplog.at_level(logging.INFO):
        twice.log_summary(**PLAIN)
    assert "in 7 blocks, 3 of them as windows of 16 tokens, " in caplog.text
    assert "in none of these blocks" not in caplog.text


def test_the_share_of_long_distances_of_data_of_a_known_share(caplog: pytest.LogCaptureFixture):
    # A document of 64 tokens in a block of 64: the last 48 are past the original 16.
    assert scheduled([torch.ones(64, dtype=torch.int64)] * 5, 64, 10).summary().share_beyond_original == 0.75
    # Half of the blocks in windows of 16; of the others three quarters.
    half = scheduled([torch.ones(64, dtype=torch.int64)] * 5, 64, 10, short_share=0.5)
    assert half.summary().share_beyond_original == 0.375
    # Documents of 20 in blocks of 64, three and a part of 4: only 4 tokens of each whole one.
    packed = scheduled([torch.ones(20, dtype=torch.int64)] * 16, 64, 1)
    assert packed.summary().share_beyond_original == 4 * 3 / 64
    with caplog.at_level(logging.WARNING):
        half.log_summary(**PLAIN)
    assert not caplog.records
    short = scheduled([torch.ones(16, dtype=torch.int64)] * 20, 64, 5)
    assert short.summary().share_beyond_original == 0
    short.log_summary(**PLAIN)
    assert "0.00 %" in caplog.text


def seen_in_groups(positions: torch.Tensor, group: int) -> torch.Tensor:
    """The farthest that each token of a block sees in the groups that LongLoRA's attention makes of it."""
    documents, first = (positions == 0).cumsum(0), torch.arange(len(positions))
    for stretch in (group, group // 2):
        for rows in make_groups(documents[None], group, stretch).rows(
            torch.arange(len(positions))[None, None, :, None]
        ):
            for row in rows.flatten(1).tolist():
                first[row] = first[row].clamp(max=min(row))
    return positions - positions[first]


@pytest.mark.parametrize("kind", ["full", "pose"])
def test_the_share_of_long_distances_in_groups(caplog: pytest.LogCaptureFixture, kind: str):
    documents = [torch.ones(n, dtype=torch.int64) for n in (64, 30, 20, 50, 64)]
    schedule = scheduled(documents, 64 if kind == "full" else 48, 40, kind)
    for group in (9, 16, 21, 32):
        shares = [(seen_in_groups(block["position_ids"], group) >= 16).double().mean() for block in schedule]
        summary = schedule.summary(group)
        assert summary.share_beyond_original == pytest.approx(float(torch.stack(shares).mean()))
        assert (summary.share_beyond_original == 0) == (kind == "full" and group <= 16)
    assert schedule.summary(16).share_beyond_original < schedule.summary().share_beyond_original
    schedule.log_summary(wants_distances=True, group=9)
    assert ("no layer compares tokens that are farther apart than its groups of 9" in caplog.text) == (kind == "full")


def test_the_share_of_long_distances_under_pose():
    documents = [torch.ones(16, dtype=torch.int64)] * 3
    share = scheduled(documents, 16, 1200, "pose").summary().share_beyond_original
    # By hand: the first chunk has 1 to 8 of 16 tokens, the bias is 0 to 48; token t of the second is at t + bias.
    cases = [(border, bias) for border in range(1, 9) for bias in range(49)]
    expected = sum(sum(t + bias >= 16 for t in range(border, 16)) for border, bias in cases) / 16 / len(cases)
    assert share == pytest.approx(expected, rel=0.05)
    assert expected > 0.5
    kept = scheduled(documents, 16, 1200, "pose", short_share=0.25).summary().share_beyond_original
    assert kept == pytest.approx(0.75 * expected, rel=0.05)


def test_positions_are_drawn_anew_in_every_pass_and_text_and_labels_stay():
    documents = [torch.arange(1, 40), torch.arange(40, 90)]
    plain, skipped = scheduled(documents, 16, 18), scheduled(documents, 16, 18, "pose")
    assert len(skipped.packed) == 6
    seen: dict[int, list[list[int]]] = {}
    for index in range(18):
        one, other = plain[index], skipped[index]
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])
        assert torch.equal(one["position_ids"] == 0, other["position_ids"] == 0)
        seen.setdefault(skipped.order[index], []).append(other["position_ids"].tolist())
    assert all(len({*map(tuple, drawn)}) == 3 for drawn in seen.values())


def test_windows_of_short_blocks_predict_nothing_from_the_window_before():
    block = scheduled([torch.arange(1, 41)], 40, 1, short_share=1.0)[0]
    assert block["position_ids"].tolist() == [*range(16), *range(16), *range(8)]
    assert block["labels"].tolist() == [-100, *range(2, 17), -100, *range(18, 33), -100, *range(34, 41)]


@pytest.mark.parametrize("kind", ["full", "pose", "random"])
def test_any_number_of_processes_and_a_resumed_run_read_the_same(kind: str):
    documents = [torch.arange(1, 40), torch.arange(40, 90)]

    def read(processes: int, batch: int, first_step: int = 0) -> list[tuple[int, ...]]:
        """The blocks in the order in which accelerate hands batches of a DataLoader to processes."""
        blocks: list[tuple[int, ...]] = []
        for process in range(processes):
            schedule = scheduled(documents, 16, 24, kind, short_share=0.25)  # made anew in each process
            batches = BatchSampler(SequentialSampler(schedule), batch, drop_last=False)
            shard = BatchSamplerShard(batches, processes, process)
            loader = skip_first_batches(DataLoader(schedule, batch_sampler=shard), first_step)
            for step, rows in enumerate(loader):
                for row in range(batch):
                    offset = ((first_step + step) * processes + process) * batch + row
                    fields = [*rows["input_ids"][row].tolist(), *rows["position_ids"][row].tolist()]
                    blocks.append((offset, *fields, *rows["labels"][row].tolist()))
        return sorted(blocks)

    alone = read(1, 1)
    assert len({block[1:] for block in alone}) > 5
    assert read(2, 2) == read(4, 1) == read(2, 1) == alone
    assert read(2, 2, first_step=3) == alone[12:]


def test_long_documents_come_more_often(caplog: pytest.LogCaptureFixture):
    documents = [torch.full((length,), index) for index, length in enumerate([5, 17, 16, 40, 30, 18])]
    with caplog.at_level(logging.INFO):
        twice = upsample(documents, 16, 2.5, seed=0)
    counts = [sum(int(document[0]) == index for document in twice) for index in range(6)]
    assert (counts[0], counts[2]) == (1, 1)
    assert sorted(counts[i] for i in (1, 3, 4, 5)) == [2, 2, 3, 3]
    assert "4 of 6 documents are longer than 16 tokens and are read 2.5 times as often" in caplog.text
    assert upsample(documents, 16, 1.0, seed=0) == documents
    assert "changes nothing" not in caplog.text
    assert upsample(documents, 40, 2.5, seed=0) == documents
    assert "length_upsampling 2.5" in caplog.text
    third = [sum(len(d) > 16 for d in upsample(documents, 16, 3.0, seed=seed)) for seed in (0, 1)]
    assert third == [12, 12]


def masked(tokens: list[int], counted: str) -> MaskedTokens:
    """Token ids, and a ``1`` for each that counts."""
    return MaskedTokens(ids(*tokens), torch.tensor([mark == "1" for mark in counted]))


def test_masked_tokens_have_no_label():
    packed = blocks_of(PackedDocuments([masked([11, 12, 13, 14, 15], "10011")], seq_len=4, eos_token_id=EOS))
    # No EOS is added to them. The second block would be 15, predicted from nothing, and the masked 11, 12 and 13.
    assert [block["input_ids"].tolist() for block in packed] == [[11, 12, 13, 14]]
    assert packed[0]["labels"].tolist() == [-100, -100, -100, 14]


def test_blocks_of_masked_tokens_are_left_out(caplog: pytest.LogCaptureFixture):
    document = masked(list(range(1, 33)), "0" * 8 + "00000001" + "0" * 12 + "1100")
    packed = PackedDocuments([document], 8, eos_token_id=None)
    assert [block["input_ids"][0].item() for block in blocks_of(packed)] == [9, 25]
    assert [(block["labels"] != -100).sum().item() for block in blocks_of(packed)] == [1, 2]
    assert "2 of 4 blocks of 8 tokens hold none that counts in the loss, and are left out" in caplog.text
    schedule = PackedBlocks(packed, PositionSchedule("full", 8, 8), 4, seed=0)
    assert {block["input_ids"][0].item() for block in schedule} == {9, 25}
    summary = schedule.summary()
    assert (summary.num_trained, summary.num_masked, summary.num_unused) == (32, 26, 16)
    with caplog.at_level(logging.INFO):
        schedule.log_summary(**PLAIN)
    assert "(18.8 %)" in caplog.text
    prints = {PackedDocuments([other], 8, eos_token_id=None).fingerprint() for other in (document, document.ids)}
    assert len(prints | {packed.fingerprint()}) == 2
    with pytest.raises(ValueError, match="none of the 32 tokens to train on counts in the loss"):
        PackedDocuments([masked(list(range(32)), "1" + "0" * 31)], 8, eos_token_id=None)


def test_masks_stay_with_their_tokens_whatever_the_positions():
    documents = [masked(list(range(1, 40)), "001" * 13), torch.arange(40, 90), masked([*range(90, 100)], "0" * 9 + "1")]
    counted = {token for token in range(1, 40) if token % 3 == 0} | set(range(40, 90)) | {99}
    for kind, short_share in (("full", 0.0), ("pose", 0.25), ("random", 0.0)):
        schedule = scheduled(documents, 16, 18, kind, short_share=short_share)  # type: ignore[arg-type]  # masked too
        assert len(schedule.packed) == 7
        for block in schedule:
            expected = [
                token if token in counted and position else -100
                for token, position in zip(block["input_ids"].tolist(), block["position_ids"].tolist(), strict=True)
            ]
            assert block["labels"].tolist() == expected


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
        PackedDocuments(documents, seq_len, eos_token_id=EOS)


def test_ids_the_model_has_no_embedding_for():
    check_ids([ids(0, 5), ids(9)], vocab_size=10)
    with pytest.raises(ValueError, match=r"1.*10,.*10.*0.*9"):
        check_ids([ids(0, 5), ids(9, 10)], 10, "text")
    with pytest.raises(TypeError, match=r"0.*\(int64\),.*torch.float32"):
        check_ids([torch.ones(3)], 10)


def test_one_document_a_block_by_hand():
    """Of 4 tokens with their EOS 11 to 15: two blocks, the second of which ends with the document; 21 is padded."""
    packed = PackedDocuments([ids(11, 12, 13, 14, 15), ids(21)], seq_len=4, eos_token_id=EOS, one_document=True)
    found = sorted(blocks_of(packed), key=lambda block: block["input_ids"].tolist())
    assert [block["input_ids"].tolist() for block in found] == [
        [11, 12, 13, 14],
        [13, 14, 15, EOS],
        [21, EOS, EOS, EOS],
    ]
    assert [block["labels"].tolist() for block in found] == [
        [-100, 12, 13, 14],
        [-100, 14, 15, EOS],
        [-100, EOS, -100, -100],
    ]
    assert all(block["position_ids"].tolist() == [0, 1, 2, 3] for block in found)  # no border, so no mask


@pytest.mark.parametrize("masked", [False, True])
def test_no_token_is_left_out_and_no_block_has_two_documents(masked: bool):
    lengths = [8, 1, 31, 9, 16, 17, 2]
    documents: list[Any] = [torch.arange(1, n + 1) + 100 * i for i, n in enumerate(lengths)]
    if masked:
        documents = [MaskedTokens(document, document % 2 == 0) for document in documents]
    packed = PackedDocuments(documents, 8, eos_token_id=None, seed=3, one_document=True)
    seen: set[int] = set()
    for index, block in enumerate(blocks_of(packed)):
        real = len(packed.where(index))
        tokens = block["input_ids"][:real]
        assert len({int(token) // 100 for token in block["input_ids"]}) == 1
        assert (tokens.diff() == 1).all()
        counted = [int(token) for token in tokens[1:] if not masked or token % 2 == 0]
        assert block["labels"][block["labels"] != -100].tolist() == counted != []
        seen |= set(tokens.tolist())
    # A token alone predicts nothing; of the masked ones neither does a pair whose second token does not count.
    expected = {int(token) for i, n in enumerate(lengths) for token in torch.arange(1, n + 1) + 100 * i if n > 1}
    assert seen == expected


def test_padding_is_counted_and_much_of_it_is_a_warning(caplog: pytest.LogCaptureFixture):
    blocks = blocks_of_a_run([torch.arange(1, 7), torch.arange(11, 23)], 8, 6, one_document=True)
    twice = blocks.summary()
    assert (twice.num_blocks / 2, twice.num_trained, twice.num_padding) == (3, 48, 4)
    assert (twice.num_tokens, twice.num_pieces, twice.num_unused) == (18, 6, 0)
    with caplog.at_level(logging.INFO):
        blocks.log_summary(**PLAIN)
    (line,) = [record for record in caplog.records if "padding" in record.message]
    assert line.levelno == logging.INFO
    assert "(8.3 %)" in line.message
    caplog.clear()
    blocks_of_a_run([torch.arange(1, 4)], 8, 1, one_document=True).log_summary(**PLAIN)
    (line,) = [record for record in caplog.records if "padding" in record.message]
    assert (line.levelno, "a smaller seq_len" in line.message) == (logging.WARNING, True)


def test_another_cut_of_the_same_documents_is_other_data():
    documents = [torch.arange(1, 33)]
    cuts = [PackedDocuments(documents, 8, eos_token_id=None, one_document=one) for one in (False, True)]
    assert cuts[0].fingerprint() != cuts[1].fingerprint()
