"""A GGUF file with another rule in it: all else unchanged, written whole or not at all, and bad input refused."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from gguf_files import write_gguf
from hf_posenc.checkpoint.loading import load_model
from hf_posenc.cli.main import main
from hf_posenc.doctor.diagnosis import diagnose
from hf_posenc.exports import export_gguf
from served_frequencies import extended
from tiny_models import make_model

# What a base may have of its own rule: none of it may be left.
OLD_RULE = {"type": "yarn", "factor": 8.0, "yarn_beta_fast": 16.0, "attn_factor": 0.5}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "base.gguf", make_model("Llama"), **OLD_RULE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return extended(tmp_path / "model", "longrope", short_factor=[2.0] * 8, long_factor=[2.0] * 8)[0]


def contents(reader: GGUFReader) -> dict[str, tuple[list[GGUFValueType], Any]]:
    fields = reader.fields.items()
    return {name: (field.types, field.contents()) for name, field in fields if not name.startswith("GGUF.")}


def quantised(path: Path, source: Path) -> Path:
    """Write a file with tensors in several types, an alignment of its own and values that writers treat specially."""
    reader, writer = GGUFReader(source), GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for name, (types, value) in contents(reader).items():
        if name != "general.architecture":
            sub_type = types[-1] if types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, types[0], sub_type=sub_type)
    writer.add_key_value("general.tags", ["a", "ü"], GGUFValueType.ARRAY, sub_type=GGUFValueType.STRING)
    writer.add_key_value("general.empty", "", GGUFValueType.STRING)
    writer.add_key_value("test.numbers", [1, 2**31], GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT32)
    writer.add_key_value("test.wide", 2**40, GGUFValueType.UINT64)
    writer.add_key_value("test.flag", True, GGUFValueType.BOOL)
    kinds = [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.F16]
    for number, tensor in enumerate(reader.tensors):
        data, kind = np.array(tensor.data), kinds[number % 3]
        if data.ndim == 1:
            writer.add_tensor(tensor.name, data)
        elif kind == GGMLQuantizationType.F16:
            writer.add_tensor(tensor.name, data.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, quants.quantize(data, kind), raw_dtype=kind)
    writer.add_tensor("rope_freqs.weight", np.full(8, 3.0, dtype=np.float32))
    writer.add_tensor("odd.weight", np.ones(5, dtype=np.float32))  # padded to the alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_all_but_the_rule_is_copied(base: Path, model: Path, tmp_path: Path) -> None:
    source = GGUFReader(quantised(tmp_path / "quantised.gguf", base))
    said = export_gguf(model, tmp_path / "out.gguf", base=tmp_path / "quantised.gguf")
    copy = GGUFReader(tmp_path / "out.gguf")
    before, after = contents(source), contents(copy)
    rope = "llama.rope.scaling."
    assert {name for name in before if name.startswith(rope)} == {rope + key for key in OLD_RULE}
    new = {"llama.context_length": 256, f"{rope}attn_factor": pytest.approx((1 + 1 / 3) ** 0.5)}
    assert {name: after[name][1] for name in new} == new
    assert {name for name in after if name.startswith(rope)} == {f"{rope}attn_factor"}
    kept = before.keys() - {rope + key for key in OLD_RULE} - {"llama.context_length"}
    assert {name: before[name] for name in kept} == {name: after[name] for name in after.keys() - new.keys()}
    assert copy.alignment == source.alignment == 64
    tensors = {tensor.name: tensor for tensor in copy.tensors}
    np.testing.assert_array_equal(tensors.pop("rope_freqs.weight").data, np.full(8, 2.0, dtype=np.float32))
    assert len({tensor.tensor_type for tensor in source.tensors}) == 4
    assert tensors.keys() == {tensor.name for tensor in source.tensors} - {"rope_freqs.weight"}
    for tensor in source.tensors:
        if tensor.name in tensors:
            other = tensors[tensor.name]
            assert (other.tensor_type, list(other.shape)) == (tensor.tensor_type, list(tensor.shape))
            assert other.data_offset % 64 == 0
            np.testing.assert_array_equal(other.data, tensor.data)
    assert said.splitlines()[:-2] == [
        "# longrope x4, 64 -> 256 tokens; checked with llama-server of xllamacpp 2026.10.11549",
        f"llama-server -m {tmp_path / 'out.gguf'} -c 256",
        # 2 layers, keys and values, 2 heads of 16 numbers of 2 bytes.
        f"# the KV cache of one text of 256 tokens takes {2 * 2 * 2 * 16 * 2 * 256 / 1e6:.2f} MB in 16 bits",
    ]


def test_two_lists_are_two_tensors_and_a_note(base: Path, tmp_path: Path) -> None:
    path, _ = extended(tmp_path / "model", "longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    assert "# two lists: llama.cpp takes long_factor for every text if -c exceeds 64" in export_gguf(
        path, tmp_path / "out.gguf", base=base
    )
    names = {tensor.name for tensor in GGUFReader(tmp_path / "out.gguf").tensors if tensor.name.startswith("rope_")}
    assert names == {"rope_factors_short.weight", "rope_factors_long.weight"}


def test_a_rule_that_only_hf_posenc_runs_is_written_as_a_static_one(base: Path, tmp_path: Path) -> None:
    path, _ = extended(tmp_path / "model", "dynamic_yarn")
    with pytest.raises(ValueError, match="hf_posenc"):
        export_gguf(path, tmp_path / "out.gguf", base=base)
    said = export_gguf(path, tmp_path / "out.gguf", base=base, as_method="llama3")
    assert "# lost: dynamic_yarn" in said
    assert "rope_freqs.weight" in {tensor.name for tensor in GGUFReader(tmp_path / "out.gguf").tensors}


def test_a_fine_tuned_model_is_asked_whether_the_weights_are_its_own(base: Path, model: Path, tmp_path: Path) -> None:
    assert "the weights are those of" not in export_gguf(model, tmp_path / "one.gguf", base=base)
    manifest = model / "context_extension.json"
    saved = manifest.read_text()
    for trained, words in (("1000", "was"), ("null", "may have been")):
        manifest.write_text(saved.replace('"tokens_trained": 0', f'"tokens_trained": {trained}'))
        said = export_gguf(model, tmp_path / f"{trained}.gguf", base=base)
        assert f"{words} fine-tuned" in said


def damaged(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def test_bad_input_is_refused_and_nothing_is_written(base: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    (tmp_path / "text.gguf").write_text("no GGUF file")
    damaged(shutil.copy(base, tmp_path / "cut.gguf"), lambda content: content[: len(content) // 2])
    wide = write_gguf(tmp_path / "wide.gguf", make_model("Llama", intermediate_size=96))
    deep = write_gguf(tmp_path / "deep.gguf", make_model("Llama", num_hidden_layers=3, vocab_size=160))
    qwen = damaged(shutil.copy(base, tmp_path / "qwen.gguf"), lambda content: content.replace(b"llama", b"qwen2"))
    part = shutil.copy(base, tmp_path / "m-00002-of-00003.gguf")
    writer = GGUFWriter(part, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for read in (diagnose, load_model):
        with pytest.raises(ValueError, match=r"is one of 3 parts"):
            read(part)
    other, _ = extended(tmp_path / "olmo", "yarn", family="Olmo2")
    qwen3, _ = extended(tmp_path / "qwen3", "llama3", family="Qwen3")
    (tmp_path / "there.gguf").write_text("mine")
    for folder, output, source, message in (
        (model, out, None, r"--to gguf needs --base.*convert_hf_to_gguf\.py.*published GGUF of org/base model"),
        (model, out, tmp_path / "none.gguf", r"there is no file '.*none\.gguf' to take the tensors from"),
        (model, out, tmp_path / "text.gguf", "is not a GGUF file"),
        (model, out, tmp_path / "cut.gguf", "is not a GGUF file"),
        (model, out, wide, "another model than.*llama.feed_forward_length is 96 there and 64 in the folder"),
        (
            model,
            out,
            deep,
            "block_count is 3 there and 2 in the folder; rows of token_embd.weight is 160 there and 128",
        ),
        (model, out, qwen, "general.architecture is qwen2 there and llama in the folder"),
        (model, out, part, r"is one of 3 parts\. Join them: llama-gguf-split --merge .*/m-00001-of-00003\.gguf whole"),
        (model, tmp_path / "out.bin", base, r"takes the name of a \.gguf file"),
        (model, tmp_path / "no" / "out.gguf", base, "there is no folder"),
        (model, tmp_path / "there.gguf", base, r"there\.gguf' exists already"),
        (other, out, base, "model_type 'olmo2' has not been checked"),
        (qwen3, out, base, "cannot express llama3 for model_type 'qwen3'"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            export_gguf(folder, output, base=source)
    assert not out.exists()
    assert (tmp_path / "there.gguf").read_text() == "mine"


def test_the_gguf_package_is_asked_for(
    base: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'hf_posenc\[smollm2\]'"):
        export_gguf(model, tmp_path / "out.gguf", base=base)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"could not be written \(no space left on device\): out.gguf takes",
        ),
        (KeyboardInterrupt("stopped"), "stopped"),
    ],
)
def test_a_full_disk_or_an_interruption_leaves_nothing(
    fails: BaseException, message: str, base: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    seen = []

    def full(number: int) -> NoReturn:
        seen.append((tmp_path / "out.gguf.partial").stat().st_size)
        raise fails

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((ValueError, KeyboardInterrupt), match=message):
        export_gguf(model, tmp_path / "out.gguf", base=base)
    assert seen[0] > base.stat().st_size / 2  # it was half written
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_small_disk_is_refused_before_anything_is_written(
    base: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def opened(self: Path, *args: Any, **kwargs: Any) -> Any:
        assert self.suffix != ".partial"
        return real(self, *args, **kwargs)

    size = base.stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(size, size - 1000, 1000))
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ValueError, match=r"out\.gguf.*0\.\d+ MB,.*0\.00 MB"):
        export_gguf(model, tmp_path / "out.gguf", base=base)


def test_the_command_writes_the_file(
    base: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["export", str(model), "--to", "gguf", "--base", str(base), "--output", str(tmp_path / "out.gguf")]
    assert main(argv) == 0
    assert f"llama-server -m {tmp_path / 'out.gguf'} -c 256\n" in capsys.readouterr().out
    assert main(argv) == 2
    assert "exists already" in capsys.readouterr().err
