"""Evaluations that were interrupted, torn by a kill, repeated, or run beside another on one file."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.evaluation import perplexity, read_records


def random_documents(count=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 128, (40,), generator=generator) for _ in range(count)]


def measure(model, documents, lengths, *args, **kwargs):
    return perplexity(model, documents, lengths, *args, progress=False, **kwargs)


RESULTS = ("n_tokens", "nll_sum", "perplexity", "ci_low", "ci_high", "run_key", "text_hash", "position_nll")


def results(records):
    return [[getattr(record, name) for name in RESULTS] for record in records]


class Stop(Exception):
    """Simulates ctrl-C or a power cut."""


def interrupt_after(model, forwards):
    """Make the model's body stop in the middle; returns the hook."""
    left = iter(range(forwards))

    def stop(*_):
        if next(left, None) is None:
            raise Stop

    return model.model.register_forward_pre_hook(stop)


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_run_resumes_to_the_same_bits(tiny_llama, tmp_path, torn):
    model, documents, path = tiny_llama(), random_documents(6), tmp_path / "results.jsonl"
    progress_path = tmp_path / "results.jsonl.progress"
    arguments = (model, documents, [10, 40], ["truncated", "sliding_window"])
    expected = measure(*arguments, max_tokens=40, stride=5)
    hook = interrupt_after(model, 5)  # two for check_head, then three documents
    with pytest.raises(Stop):
        measure(*arguments, max_tokens=40, stride=5, output=path)
    hook.remove()
    assert not path.exists()
    assert len(progress_path.read_text().splitlines()) == 3
    if torn:  # killed while writing the third line
        progress_path.write_bytes(progress_path.read_bytes()[:-20])
    forwards = []
    hook = model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    records = measure(*arguments, max_tokens=40, stride=5, output=path)
    hook.remove()
    # check_head, the documents left, then 7 windows of 10 (at once) and one of 40 tokens for each document
    assert len(forwards) == 2 + (4 if torn else 3) + 6 + 6
    assert results(records) == results(expected)
    assert read_records(path) == records
    assert not progress_path.exists()


def test_finished_runs_are_not_repeated(tiny_llama, tmp_path, caplog):
    model, documents, path = tiny_llama(), random_documents(), tmp_path / "results.jsonl"
    first = measure(model, documents, [10, 20], output=path)
    hook = interrupt_after(model, 2)
    assert measure(model, documents, [10, 20], output=path) == first
    hook.remove()
    assert "2 of 2 results are already in" in caplog.text
    more = measure(model, documents, [20, 40], output=path)
    assert more[0] == first[1]
    assert len(read_records(path)) == 3
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # trained further: the same name, another number
    assert measure(model, documents, [20], output=path)[0].nll_sum != first[1].nll_sum
    assert len(read_records(path)) == 4


def test_a_record_torn_by_a_kill_is_measured_again(tiny_llama, tmp_path):
    model, documents, path = tiny_llama(), random_documents(), tmp_path / "results.jsonl"
    expected = measure(model, documents, [10, 20], output=path)
    path.write_bytes(path.read_bytes()[:-30])
    assert read_records(path) == expected[:1]
    assert results(measure(model, documents, [10, 20], output=path)) == results(expected)
    assert results(read_records(path)) == results(expected)
    path.write_text(path.read_text().rstrip("\n"))  # whole, but for its line end
    measure(model, documents, [30], output=path)
    assert [one.context_length for one in read_records(path)] == [10, 20, 30]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"model": "x"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*not a whole record: it has no method, factor"):
        read_records(tmp_path / "a.jsonl")


def test_two_evaluations_share_one_file(tiny_llama, tmp_path):
    path, documents = tmp_path / "results.jsonl", random_documents(3)
    one, other = tiny_llama(), tiny_llama(num_hidden_layers=1)
    hook = interrupt_after(one, 3)
    with pytest.raises(Stop):
        measure(one, documents, [20], output=path)
    hook.remove()
    measure(other, documents, [20], output=path)
    assert len((tmp_path / "results.jsonl.progress").read_text().splitlines()) == 1  # the first one's is kept
    measure(one, documents, [20], output=path)
    assert len(read_records(path)) == 2
    assert not (tmp_path / "results.jsonl.progress").exists()
