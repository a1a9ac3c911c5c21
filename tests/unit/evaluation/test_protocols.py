"""Every published protocol next to a plain loop over what its authors' code does, with full logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from hf_posenc.cli.main import main
from hf_posenc.evaluation import PROTOCOLS, KeyTokens, Record, perplexity, read_records
from hf_posenc.evaluation.protocols import RULES
from hf_posenc.evaluation.windows import Window, stepping_windows, whole_windows
from hf_posenc.reporting.comparable import make_tables
from tiny_runs import make_tokenizer

Make = Callable[..., LlamaForCausalLM]
BOS = 0


def make_texts(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 128, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, ids: Sequence[int], num_scored: int | None = None) -> float:
    """The model's own loss, of the last tokens where a number is given: labels of -100 are not scored."""
    row = torch.tensor([list(ids)])
    labels = row.clone()
    if num_scored is not None:
        labels[:, :-num_scored] = -100
    return float(model(input_ids=row, labels=labels, use_cache=False).loss)


def measure(model: Any, documents: Any, lengths: Sequence[int], protocol: Any, **settings: Any) -> list[Record]:
    return perplexity(model, documents, lengths, protocol, progress=False, **settings)


def restated_yarn(
    model: LlamaForCausalLM, texts: list[list[int]], max_length: int, step: int, bos: bool, truncate: bool = False
) -> list[tuple[float, int]]:
    """jquesnelle/yarn, eval/perplexity.py, compute_perplexity: the loss of each window and the tokens it scores."""
    room = max_length - 1 if bos else max_length
    if truncate:
        texts, step = [text[:room] for text in texts], room
    found = []
    for text in texts:
        done = 0
        for begin in range(0, len(text), step):
            end = min(begin + room, len(text))
            new, done = end - done, end
            found.append((loss_of(model, [BOS] * bos + text[begin:end], new), new))
            if end == len(text):
                break
    return found


@pytest.mark.parametrize("bos", [True, False])
def test_yarn_reads_the_beginning_once_whatever_its_captions_say(tiny_llama: Make, bos: bool) -> None:
    model, texts = tiny_llama(bos_token_id=BOS if bos else None), make_texts(40, 53, 40)
    for record in measure(model, texts, [16, 40], "yarn"):
        windows = restated_yarn(model, texts, record.context_length, 256, bos, truncate=True)
        assert len(windows) == record.num_documents == 3
        assert record.perplexity == pytest.approx(math.exp(np.mean([loss for loss, _ in windows])), rel=1e-5)
        assert record.n_tokens == 3 * (record.context_length - 1)
        assert (record.bos, record.average) == ("prepended" if bos else "none", "tokens")
        assert math.fsum(record.position_nll) == pytest.approx(record.nll_sum)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("stride", [5, 9])
def test_govreport_averages_windows_however_short(
    tiny_llama: Make, bos: bool, stride: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Documents of many lengths, one shorter than the window and one that a window ends with."""
    model, texts = tiny_llama(bos_token_id=BOS if bos else None), make_texts(33, 40, 12, 15 + 2 * stride)
    (record,) = measure(model, texts, [16], "yarn_govreport", stride=stride, min_tokens=10)
    windows = restated_yarn(model, texts, 16, stride, bos)
    assert record.perplexity == pytest.approx(math.exp(np.mean([loss for loss, _ in windows])), rel=1e-5)
    by_token = math.exp(record.nll_sum / record.n_tokens)
    assert abs(by_token / record.perplexity - 1) > 1e-4
    assert record.ci_low < record.perplexity < record.ci_high
    assert (record.average, record.bos) == ("windows", "each_window" if bos else "none")
    assert (record.num_documents, record.window, record.stride) == (4, 16, stride)
    assert "window means" in caplog.text
    assert "mean of the windows' mean losses" in record.scored


def test_min_tokens_counts_the_bos_of_a_window(tiny_llama: Make) -> None:
    texts = make_texts(12, 40)
    (record,) = measure(tiny_llama(), texts, [20], "pose", stride=8, min_tokens=1)
    assert record.num_documents == 2


def test_pose_weighs_windows_by_their_tokens(tiny_llama: Make, caplog: pytest.LogCaptureFixture) -> None:
    """dwzhu-pku/PoSE, src/eval_ppl.py, compute_perplexity; texts are cut to max_input_tokens, BOS included."""
    model, texts = tiny_llama(), make_texts(33, 60, 29)
    (record,) = measure(model, texts, [16], "pose", stride=7, max_tokens=30)
    windows = restated_yarn(model, [text[:29] for text in texts], 16, 7, bos=True)
    expected = math.exp(sum(loss * tokens for loss, tokens in windows) / sum(tokens for _, tokens in windows))
    assert record.perplexity == pytest.approx(expected, rel=1e-5)
    assert record.n_tokens == sum(tokens for _, tokens in windows) == 3 * 29
    assert (record.average, record.bos) == ("tokens", "each_window")
    assert "window means" not in caplog.text


def restated_stream(model: LlamaForCausalLM, data: np.ndarray, seq_length: int, step: int) -> float:
    """dvlab-research/LongLoRA, eval.py, get_as_batch and evaluate with --batch_size 1; HKUNLP/ChunkLlama the same."""
    starts = list(range(0, len(data) - seq_length, step))
    starts.pop()
    losses = [loss_of(model, data[start : start + seq_length].astype(np.int64).tolist()) for start in starts]
    return float(2.71828 ** np.mean(losses))


@pytest.mark.parametrize("protocol", ["longlora", "dca"])
@pytest.mark.parametrize("lengths", [(30, 7, 41), (78,), (60, 8)])
def test_longlora_and_dca_score_whole_windows_of_a_stream(
    tiny_llama: Make, protocol: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posenc.evaluation.windows._TOKENS_OF_A_GROUP", 60)  # as if the stream were long
    model, texts = tiny_llama(), make_texts(*lengths)
    stream = np.concatenate([np.array(text, dtype=np.uint16) for text in texts])
    for record in measure(model, texts, [12, 20], protocol, stride=4):
        length = record.context_length
        assert record.perplexity == pytest.approx(restated_stream(model, stream, length, 4), rel=1e-5)
        assert record.n_tokens == (len(range(0, len(stream) - length, 4)) - 1) * (length - 1)
        assert record.ci_low < record.perplexity < record.ci_high
        assert (record.bos, record.num_documents, record.ci_unit) == ("none", len(texts), "blocks")
        width = math.ceil(len(stream) / 32)  # a token's losses in all windows are in one block, that of its position
        scored = [start + at for start in range(0, len(stream) - length, 4)[:-1] for at in range(1, length)]
        blocks = [sum(token // width == block for token in scored) for block in range(32)]
        assert record.unit_tokens == [count for count in blocks if count]


def test_rerope_scores_the_end_of_every_text(tiny_llama: Make) -> None:
    """bojone/rerope, eval_loss.py: the last L + 1 tokens, of which the last K are labels; one loss a text, averaged."""
    model, texts = tiny_llama(), make_texts(41, 60, 75)
    records = measure(model, texts, [10, 40], "rerope", last_k=6)
    for record in records:
        losses = []
        for text in texts:
            ids = torch.tensor([text])[:, -(record.context_length + 1) :]
            with torch.no_grad():
                logits = model(ids[:, :-1]).logits[:, -6:].reshape(-1, 128)
            losses.append(torch.nn.functional.cross_entropy(logits, ids[:, -6:].reshape(-1)))
        assert record.perplexity == pytest.approx(float(torch.exp(torch.stack(losses).mean())), rel=1e-5)
        assert (record.last_k, record.n_tokens, record.window) == (6, 18, None)
    with pytest.warns(UserWarning, match=r"1.*3.*61"):
        assert measure(model, make_texts(41, 61, 75), [60], "rerope", last_k=6)[0].num_documents == 2
    (short,) = measure(model, make_texts(30), [40], "rerope", last_k=6, min_tokens=20)  # read whole, as there
    assert short.nll_sum == pytest.approx(6 * loss_of(model, make_texts(30)[0], 6), rel=1e-5)


def context_of(token: int, num_tokens: int, window: int, stride: int) -> range:
    """A token's context in the first of the windows [0, w), [s, w + s), ... that has it; none runs over the end."""
    end = window
    while end <= token:
        end = min(end + stride, num_tokens)
    return range(max(0, end - window), token)


@torch.no_grad()
def loss_after(model: LlamaForCausalLM, text: list[int], context: range) -> float:
    logits = model(input_ids=torch.tensor([text[context.start : context.stop]])).logits[0, -1].double()
    return float(torch.logsumexp(logits, 0) - logits[text[context.stop]])


def test_pi_slides_over_whole_documents(tiny_llama: Make) -> None:
    """arXiv:2306.15595 gives words only: the sliding window of Press et al. with S=256."""
    model, texts = tiny_llama(), make_texts(33, 24)
    for record in measure(model, texts, [12, 24], "pi", stride=5):
        losses = [
            loss_after(model, text, context_of(token, len(text), record.context_length, 5))
            for text in texts
            for token in range(1, len(text))
        ]
        assert record.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
        assert record.n_tokens == 32 + 23


@pytest.mark.parametrize(("stride", "max_tokens"), [(None, None), (3, 30)])
def test_same_tokens_at_every_length(tiny_llama: Make, stride: int | None, max_tokens: int | None) -> None:
    model, texts = tiny_llama(), make_texts(33, 30)
    records = measure(model, texts, [8, 13, 24], "same_tokens", stride=stride, max_tokens=max_tokens)
    assert {record.text_hash for record in records} == {records[0].text_hash}
    for record in records:
        length = record.context_length
        contexts = [
            (text, context_of(token, last, length, stride or length // 2))
            for text in texts
            for last in [max_tokens or len(text)]
            for token in range(8, last)
        ]
        losses = [loss_after(model, text, context) for text, context in contexts]
        assert record.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
        assert record.n_tokens == (2 * (max_tokens - 8) if max_tokens else 33 + 30 - 2 * 8)
        assert min(len(context) for _, context in contexts) >= min(8, length - (stride or length // 2))
        assert record.stride == (stride or length // 2)
    with pytest.raises(ValueError, match=r"\[24\]"):
        measure(model, texts, [24], "same_tokens")


def test_mean_of_window_means_says_that_it_is_one(tiny_llama: Make, caplog: pytest.LogCaptureFixture) -> None:
    model, texts = tiny_llama(), make_texts(30, 26)
    plain, mean = (
        measure(model, texts, [12], "sliding_window", stride=5, max_tokens=26, average=average)[0]
        for average in ("tokens", "windows")
    )
    windows = [  # the last one is moved back to end with the document
        loss_of(model, text[:26][start : start + 12], scored)
        for text in texts
        for start, scored in ((0, 11), (5, 5), (10, 5), (14, 4))
    ]
    assert mean.perplexity == pytest.approx(math.exp(np.mean(windows)), rel=1e-5)
    assert (mean.nll_sum, mean.n_tokens, mean.text_hash) == (plain.nll_sum, plain.n_tokens, plain.text_hash)
    assert plain.perplexity == pytest.approx(math.exp(plain.nll_sum / plain.n_tokens), rel=1e-12)
    assert mean.perplexity != pytest.approx(plain.perplexity, rel=1e-4)
    assert (plain.average, mean.average) == ("tokens", "windows")
    assert mean.run_key != plain.run_key
    _, apart = make_tables([plain, replace(mean, label="means")])
    assert "average is 'tokens' for unpatched and 'windows' for unpatched · means" in apart.notes[0]
    assert caplog.text.count("sliding_window: this perplexity is the mean of window means") == 1


def test_bos_is_where_the_protocol_wants_it(tiny_llama: Make) -> None:
    model, texts, tokenizer = tiny_llama(), make_texts(40), make_tokenizer()
    protocols = ["truncated", "yarn", "pose", "sliding_window", "longlora"]
    records = measure(model, texts, [20], protocols, stride=8, tokenizer=tokenizer)
    assert [record.bos for record in records] == ["none", "prepended", "each_window", "none", "none"]
    assert ["BOS token stands before each window" in record.scored for record in records] == [0, 0, 1, 0, 0]
    by_hand = measure(model, texts, [20], "truncated", bos="prepended")[0]
    assert records[1].nll_sum == by_hand.nll_sum
    (stream,) = measure(model, texts, [20], "longlora", stride=8, bos="prepended")
    assert stream.nll_sum == measure(model, [[BOS, *texts[0]]], [20], "longlora", stride=8)[0].nll_sum
    assert (stream.bos, "One BOS token stands before the stream." in stream.scored) == ("prepended", True)
    tokenizer.bos_token = None  # as Qwen's; the code asks the tokenizer, so that the config's BOS does not count
    assert measure(model, texts, [20], "yarn", tokenizer=tokenizer)[0].bos == "none"
    with pytest.raises(ValueError, match=r"'pose'.*BOS"):
        measure(model, texts, [20], "pose", stride=8, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"'yarn'.*BOS.*bos='prepended'"):
        measure(model, texts, [20], ["truncated", "yarn"], bos="prepended")
    with pytest.raises(ValueError, match="a text already starts"):
        measure(model, [[BOS, *texts[0]]], [20], "pose", stride=8)


def test_an_interrupted_stream_resumes_to_the_same_bits(
    tiny_llama: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posenc.evaluation.windows._TOKENS_OF_A_GROUP", 60)
    model, texts, path = tiny_llama(), make_texts(50, 40), tmp_path / "results.jsonl"
    (expected,) = measure(model, texts, [20], "longlora", stride=4)
    left = iter(range(2 + 8))  # two of check_head, then windows in groups of three

    def stop(*_: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    hook = model.model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        measure(model, texts, [20], "longlora", stride=4, batch_size=1, output=path)
    hook.remove()
    assert len((tmp_path / "results.jsonl.progress").read_text().splitlines()) == 2
    (record,) = measure(model, texts, [20], "longlora", stride=4, output=path)
    numbers = ("nll_sum", "n_tokens", "perplexity", "ci_low", "ci_high", "run_key")
    assert [getattr(record, name) for name in numbers] == [getattr(expected, name) for name in numbers]
    assert read_records(path) == [record]


def test_windows_by_hand() -> None:
    assert stepping_windows(11, window=6, stride=3) == [Window(0, 6, 1), Window(3, 9, 6), Window(6, 11, 9)]
    with_bos = [Window(0, 5, 0, True), Window(3, 8, 5, True), Window(6, 11, 8, True)]
    assert stepping_windows(11, window=6, stride=3, bos=True) == with_bos
    assert whole_windows(13, window=6, stride=3) == [Window(0, 6, 1), Window(3, 9, 4)]
    assert whole_windows(12, window=6, stride=3) == [Window(0, 6, 1)]
    with pytest.raises(ValueError, match=r"9.*6.*3.*10"):
        whole_windows(9, window=6, stride=3)


SCORED = {  # of 500 tokens, with windows of 64 (for same_tokens of 128 too) that move by 32; counted by hand
    "truncated": (63, 127),
    "last_k": (20, 20),
    "sliding_window": (499, 499),
    "same_tokens": (436, 436),
    "yarn": (63, 127),  # its first token is BOS
    "yarn_govreport": (500, 500),
    "pi": (499, 499),
    "pose": (500, 500),
    "longlora": (13 * 63, 11 * 127),  # windows that begin at 0, 32, ... below 500 - 64, the last one left out
    "dca": (13 * 63, 11 * 127),
    "rerope": (20, 20),
}


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "longppl"])
def test_a_document_is_read_as_far_as_the_protocol_says(tiny_llama: Make, protocol: str) -> None:
    used = {"stride": 32} if RULES[protocol].moves else {"last_k": 20} if protocol in ("last_k", "rerope") else {}
    model, tokenizer = tiny_llama(), make_tokenizer()
    document = make_texts(500)
    records = measure(model, document, [64, 128], protocol, tokenizer=tokenizer, **used)
    assert tuple(record.n_tokens for record in records) == SCORED[protocol]
    assert {record.max_tokens for record in records} == {None}
    if not RULES[protocol].whole:
        with pytest.raises(ValueError, match="max_tokens"):
            measure(model, document, [64], protocol, max_tokens=300, **used)
        return
    ended = measure(model, document, [64, 128], protocol, tokenizer=tokenizer, max_tokens=300, **used)
    own = {"rerope": 301, "yarn_govreport": 299, "pose": 299}.get(protocol, 300)  # one to foresee, or a BOS in windows
    alone = measure(model, [document[0][:own]], [64, 128], protocol, tokenizer=tokenizer, **used)
    for one, other in zip(ended, alone, strict=True):
        assert (one.n_tokens, one.text_hash) == (other.n_tokens, other.text_hash)
        assert one.max_tokens == 300
        assert "ends after 300 tokens" in one.scored


@pytest.mark.parametrize(
    ("protocol", "settings", "message"),
    [
        ("truncated", {"stride": 4}, "stride is for a protocol that moves a window, not for truncated"),
        (["truncated", "yarn"], {"last_k": 4}, "last_k is for a protocol that scores the last tokens, not for trunc"),
        ("last_k", {"batch_size": 4, "last_k": 3}, "batch_size is for a protocol that has several windows"),
        ("truncated", {"key_tokens": KeyTokens()}, "key_tokens is for protocol longppl, not for truncated"),
        (
            "sliding_window",
            {"stride": 4, "cut": True},
            r"pieces of the longest context length \(20\), over which a wind",
        ),
        ("longlora", {"stride": 4, "cut": True}, "'longlora' joins all documents: leave cut and min_tokens out"),
        ("longlora", {"stride": 20}, r"stride must be from 1 to window - 1 = 19, got 20"),
        ("yarn", {"min_tokens": 10}, r"min_tokens \(10\) is less than the longest context length \(20\)"),
        (["sliding_window", "truncated"], {"min_tokens": 10}, r"\(20\), all of which protocol 'truncated' reads"),
        ("rerope", {"last_k": 20}, "less than the shortest context length, got 20 and 20"),
        ("sliding_window", {"min_tokens": 0}, "min_tokens must be at least 1 token, got 0"),
        (
            "sliding_window",
            {"min_tokens": 30, "cut": True},
            "cut makes pieces of one length, so min_tokens has no meaning",
        ),
        ("longlora", {"stride": 4, "max_tokens": 0}, "max_tokens must be at least 1 token, got 0"),
        ("ppl", {}, "unknown protocol 'ppl'. Did you mean 'longppl'"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny_llama: Make, protocol: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(tiny_llama(), make_texts(60), [20], protocol, **settings)


def test_the_table_says_where_each_protocol_is_from_and_what_it_scores(tiny_llama: Make) -> None:
    assert tuple(RULES) == PROTOCOLS
    keys = KeyTokens(alpha=0.0, beta=-9.0, short_context=4)
    records = measure(tiny_llama(), make_texts(60), [10, 20], PROTOCOLS, stride=4, last_k=3, key_tokens=keys)
    assert [record.protocol for record in records] == [name for name in PROTOCOLS for _ in range(2)]
    for record in records:
        assert RULES[record.protocol].source  # type: ignore[index]  # a record's is any text
        assert "{" not in record.scored
        numbers = (record.context_length, record.last_k, record.stride)
        assert all(str(number) in record.scored for number in numbers if number is not None)


def test_the_command_measures_by_name(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("It is a truth universally acknowledged. " * 20)
    (tmp_path / "two.txt").write_text("However little known the feelings. " * 3)  # 105 tokens
    argv = ["eval", str(tiny_checkpoint), "--documents", str(tmp_path), "--context-lengths", "64", "128"]
    argv += ["--protocol", "yarn_govreport", "pose", "--stride", "32", "--min-tokens", "100", "--average", "tokens"]
    assert main([*argv, "--hide-progress", "--output", str(tmp_path / "r.jsonl")]) == 0
    records = {(record.protocol, record.context_length): record for record in read_records(tmp_path / "r.jsonl")}
    assert len(records) == 4
    for length in (64, 128):
        govreport, pose = records["yarn_govreport", length], records["pose", length]
        assert govreport.nll_sum == pose.nll_sum  # what is averaged was all that made them differ
        assert (govreport.average, govreport.num_documents, govreport.n_tokens) == ("tokens", 2, 905)
    assert main([*argv, "--tasks", "passkey"]) == 2
    assert "--protocol" in capsys.readouterr().err
