"""Reading documents from every kind of source, and token ids that are all there."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_posenc.assets import load_novel
from hf_posenc.data.reading import DocumentStream, tokenize_text


def texts_of(source: str | Path, text_field: str | None = None, **columns: str) -> list[str]:
    return DocumentStream(source, text_field, whole=True, **columns).texts()


def test_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwö\n", encoding="utf-8")
    assert texts_of(tmp_path / "a.txt") == ["one\ntwö\n"]


@pytest.mark.parametrize(("suffix", "compress"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_compressed_files(tmp_path, suffix, compress):
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(b"text"))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compress(b'{"text": "one"}\n{"text": "two"}\n'))
    assert texts_of(tmp_path / f"a.txt{suffix}") == ["text"]
    assert texts_of(str(tmp_path / f"b.jsonl{suffix}")) == ["one", "two"]


@pytest.mark.parametrize("suffix", [".xz", ".gz"])
def test_damaged_compressed_files_are_named(tmp_path, suffix):
    whole = {".xz": lzma.compress, ".gz": gzip.compress}[suffix](b"text" * 1000)
    flipped = whole[:14] + bytes([whole[14] ^ 255]) + whole[15:]
    for content in (b"no archive", whole[:-10], flipped):
        (tmp_path / f"a.txt{suffix}").write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.txt\{suffix}'.*\{suffix}"):
            texts_of(tmp_path / f"a.txt{suffix}")


def test_jsonl_has_a_document_per_line_and_keeps_line_separators_inside_strings(tmp_path):
    rows = [{"body": "first\u2028line\n"}, {"body": "  "}, {"body": "second"}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    assert texts_of(tmp_path / "a.jsonl", text_field="body") == ["first\u2028line\n", "second"]
    with pytest.raises(ValueError, match=r"1.*'text',.*;.*text_field=\['body'\]"):
        texts_of(tmp_path / "a.jsonl")


def test_broken_jsonl_names_the_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": ')
    with pytest.raises(ValueError, match="line 2 of"):
        texts_of(tmp_path / "a.jsonl")


def test_folder_gives_its_text_files_sorted(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.md", "sub/c.txt", "ignored.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()  # not a text, whatever its name
    assert texts_of(tmp_path) == ["a.md", "b.txt", "sub/c.txt"]


def test_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("typed text"))
    assert texts_of("-") == ["typed text"]


def test_packaged_novel():
    assert texts_of("novel:persuasion") == [load_novel("persuasion")]
    with pytest.raises(ValueError, match="unknown novel"):
        texts_of("novel:ulysses")


def test_dataset_folder_and_parquet_file(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"text": ["one", "two", "three"], "n": [1, 2, 3]})
    (tmp_path / "data").mkdir()
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    assert texts_of(tmp_path / "data") == ["one", "two", "three"]
    assert texts_of(tmp_path / "data" / "train.parquet", split="train[:2]") == ["one", "two"]
    with pytest.raises(ValueError, match=r"'n'.*1 \(int\),"):
        texts_of(tmp_path / "data", text_field="n")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tables_and_json_arrays_are_rows(tmp_path, suffix):
    text = 'id,question,answer\n1,"Two, and\ntwo?",007\n2,"Say ""a""",NA\n'
    rows = [{"question": "Two, and\ntwo?", "answer": "007"}, {"question": 'Say "a"', "answer": "NA"}]
    contents = {
        "a.csv": text,
        "a.tsv": "question\tanswer\n" + '"Two, and\ntwo?"\t007\n"Say ""a"""\tNA\n',
        "a.json": json.dumps(rows, indent=2),
        "lines.json": "".join(json.dumps(row) + "\n" for row in rows),
    }
    whole = tmp_path / "whole.json"  # one object over several lines was read as an object a line
    whole.write_text(json.dumps(rows[0], indent=2))
    assert list(DocumentStream(whole, ["question", "answer"])) == [{"prompt": "Two, and\ntwo?", "completion": "007"}]
    whole.write_text(json.dumps({"data": rows}, indent=2))
    with pytest.raises(ValueError, match=r"1.*'text'.*'data'"):
        texts_of(whole)
    pack = gzip.compress if suffix else bytes
    for name, content in contents.items():
        path = tmp_path / (name + suffix)
        path.write_bytes(pack(content.encode()))
        pairs = list(DocumentStream(path, ["question", "answer"]))
        assert pairs == [{"prompt": row["question"], "completion": row["answer"]} for row in rows], name
        assert texts_of(path, text_field="answer") == ["007", "NA"]
        assert texts_of(path, template="{question} - {answer}")[1] == 'Say "a" - NA'
    long = "word " * 50_000  # more than Python's csv module takes by itself
    (tmp_path / "long.csv").write_text(f"text\n{long}\n")
    assert texts_of(tmp_path / "long.csv") == [long]
    (tmp_path / "short.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ValueError, match=r"row 2 of .* has more or fewer values than the first line has names"):
        texts_of(tmp_path / "short.csv", text_field="a")


def test_a_folder_of_datasets_has_chats_too(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"messages": chat, "id": 1}) + "\n")
    assert list(DocumentStream(tmp_path / "data")) == [{"messages": chat}]
    with pytest.raises(ValueError, match=r"text_field\."):
        texts_of(tmp_path / "data")


def test_missing_empty_and_binary_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="or folder"):
        texts_of(tmp_path / "nothing.txt")
    with pytest.raises(FileNotFoundError, match="novel:NAME"):
        texts_of("nothing.jsonl")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no"):
        texts_of(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        texts_of(tmp_path / "latin.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="a dataset"):
        texts_of(tmp_path / "folder")


def test_tokens_are_never_truncated_and_nothing_is_said_about_length(caplog):
    words = {word: i for i, word in enumerate(["[UNK]", "a", "b", "<s>"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(3)  # a limit left on by somebody else
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", model_max_length=4)
    first, second = (tokenize_text(tokenizer, text) for text in ("a b " * 10, "b"))
    assert first.tolist() == [1, 2] * 10
    assert second.tolist() == [2]
    assert first.dtype == torch.int64
    assert not caplog.records


def test_a_stream_gives_the_same_documents_one_at_a_time_and_again(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(5)] + [" "], "n": list(range(6))})
    (tmp_path / "data").mkdir()
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    for source in (tmp_path / "data", tmp_path / "data" / "train.parquet"):
        stream = DocumentStream(source)
        assert next(iter(stream)) == "text 0"
        assert list(stream) == list(stream) == texts_of(source)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"file {number}")
    (folder / "9.txt").write_bytes(b"\xff")  # not reached
    files = iter(DocumentStream(folder))
    assert [next(files) for _ in range(3)] == ["file 0", "file 1", "file 2"]
    with pytest.raises(ValueError, match="not UTF-8"):
        next(files)


def test_what_cannot_be_streamed_is_named(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["one"]}).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"train.parquet'.*train\[:1\]"):
        next(iter(DocumentStream(tmp_path / "train.parquet", split="train[:1]")))
    with pytest.raises(ValueError, match=r"'body'\."):
        next(iter(DocumentStream(tmp_path / "train.parquet", text_field="body")))
    with pytest.raises(FileNotFoundError, match="or folder"):
        next(iter(DocumentStream(tmp_path / "nothing.txt")))


def test_the_readme_of_a_dataset_is_no_document(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "README.md").write_text("about it")
    (folder / "LICENSE.txt").write_text("may be used")
    (folder / "train" / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert texts_of(folder) == ["one", "two"]
    (folder / "book.txt").write_text("a book")
    with pytest.warns(UserWarning, match=r"3 text files are read.*rows\.jsonl"):
        assert texts_of(folder) == ["may be used", "about it", "a book"]


@pytest.mark.parametrize("name", ["A.JSONL", "a.ndjson", "A.Csv", "a.JSON.GZ"])
def test_the_kind_of_a_file_does_not_depend_on_the_case_of_its_suffix(tmp_path, name):
    content = b"text\none\n" if "sv" in name.lower() else b'{"text": "one"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    assert texts_of(tmp_path / name) == ["one"]
