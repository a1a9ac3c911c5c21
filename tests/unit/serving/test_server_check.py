"""Which rule a server runs: by hand, and with stand-ins for servers that answer as vLLM, SGLang and others do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_posenc import patch_model, save_extended
from hf_posenc.assets import tiny_model_path
from hf_posenc.cli.export import SERVER_DTYPES
from hf_posenc.cli.main import main
from hf_posenc.errors import InvalidRequestError
from hf_posenc.serving import check_server
from hf_posenc.serving.http_json import Endpoint
from hf_posenc.serving.log_probabilities import LogProbs, find_server
from hf_posenc.serving.server_verdict import PRECISIONS, Difference, judge, share_of
from tiny_models import load_tiny

Answer = tuple[int, Any]
Answers = Callable[[str, dict[str, Any] | None], Answer]


@contextmanager
def server(answers: Answers) -> Iterator[str]:
    """Answer requests on a port of this machine; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any] | None) -> None:
            code, content = answers(self.path, body)
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            with suppress(ConnectionError):  # of a client that waits no longer
                self.send_response(code)
                self.end_headers()
                self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def tiny(method: str | None = None, **options: Any) -> Any:
    model = load_tiny()
    return model if method is None else patch_model(model, method, 4, **options)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_path())


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_extended(tiny("yarn"), tmp_path_factory.mktemp("served") / "yarn", tokenizer)


def openai(
    model: Any, tokenizer: Any, kind: str, *, length: int = 1024, noise: float = 0.0, for_short: Any = None
) -> Answers:
    """Answer as a server with OpenAI's API does.

    Args:
        model: What it runs.
        tokenizer: What ``/tokenize`` uses.
        kind: ``"vllm"`` echoes; ``"old"`` knows prompt_logprobs only; ``"none"`` scores no prompt.
        length: Its context.
        noise: Standard deviation of what is added to each log-probability.
        for_short: What it runs for prompts up to the original length; None for the same.
    """

    @torch.no_grad()
    def scored(ids: list[int]) -> list[float | None]:
        reads = for_short if for_short is not None and len(ids) <= 256 else model
        values = reads(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        values = values.gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        torch.manual_seed(0)
        return [None, *(values + noise * torch.randn(len(values), dtype=torch.float64)).tolist()]

    def answers(path: str, body: dict[str, Any] | None) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": length}]}
        if path == "/tokenize" and body is not None:
            assert body["add_special_tokens"] is False
            return 200, {"tokens": tokenizer(body["prompt"], verbose=False)["input_ids"]}
        if path != "/v1/completions" or body is None:
            return 404, {}
        assert body["model"] == "tiny"
        choice: dict[str, Any] = {"text": "", "logprobs": None}
        if "echo" in body and kind == "vllm":
            choice["logprobs"] = {"token_logprobs": [*scored(body["prompt"]), -1.0]}
        elif "echo" in body:
            choice["logprobs"] = {"token_logprobs": [-1.0]}  # of the continuation
        if "prompt_logprobs" in body and kind == "old":
            values = scored(body["prompt"])
            choice["prompt_logprobs"] = [
                None if value is None else {str(token): {"logprob": value, "rank": 1}, "3": {"logprob": -9.0}}
                for token, value in zip(body["prompt"], values, strict=True)
            ]
        return 200, {"choices": [choice]}

    return answers


@pytest.mark.parametrize("kind", ["vllm", "old"])
def test_prompts_scored_by_echo_and_by_prompt_logprobs(kind: str, folder: Path, tokenizer: Any) -> None:
    with server(openai(tiny("yarn"), tokenizer, kind)) as address:
        check = check_server(folder, address, server_dtype="float32", dtype="float32")
    assert check.agrees
    assert check.differences["yarn x4"].mean < 1e-5
    assert "511 log-probabilities, 255" in str(check)
    assert f"{address}," in str(check)


@pytest.mark.parametrize(("method", "rule"), [("yarn", "yarn x4"), (None, "unscaled"), ("linear", None)])
def test_the_rule_of_short_requests_is_told(method: str | None, rule: str | None, folder: Path, tokenizer: Any) -> None:
    with server(openai(tiny("yarn"), tokenizer, "vllm", for_short=tiny(method))) as address:
        check = check_server(folder, address, server_dtype="float32", dtype="float32")
    assert check.short_rule == rule
    assert f"short requests (a probe of 128 tokens): the server runs {rule or 'neither rule'}" in check.lines
    assert check.agrees


@pytest.mark.parametrize(
    ("method", "options", "noise", "verdict", "rule"),
    [
        ("yarn", {}, 0.2, "agrees", "yarn x4"),
        (None, {}, 0.2, "unscaled", "unscaled"),
        ("linear", {}, 0.0, "another", "linear x4"),
        ("yarn", {"attention_factor": 1.0}, 0.02, "another", "yarn without its attention factor"),
        ("yarn", {"attention_factor": 1.5}, 0.0, "differs", None),
    ],
)
def test_what_is_said_of_servers_that_round(
    method: str | None,
    options: dict[str, Any],
    noise: float,
    verdict: str,
    rule: str | None,
    folder: Path,
    tokenizer: Any,
) -> None:
    with server(openai(tiny(method, **options), tokenizer, "vllm", noise=noise)) as address:
        check = check_server(folder, address, server_dtype="quantised", dtype="float32")
    assert (check.verdict, check.rule) == (verdict, rule)
    assert check.lines[-1] == check.sentence
    assert check.sentence.startswith({"another": "another rule"}.get(verdict, verdict))


def test_a_short_server_a_foreign_tokenizer_and_a_rule_put_in_place_of_another(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    staged = save_extended(tiny("dynamic_yarn"), tmp_path / "staged", tokenizer)

    def other(text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, 3]}

    with server(openai(tiny("yarn"), other, "vllm", length=200)) as address:
        with pytest.raises(ValueError, match="hf_posenc"):
            check_server(staged, address)
        check = check_server(staged, address, as_method="yarn", server_dtype="float32", dtype="float32")
        with pytest.raises(ValueError, match=r"200.*199,.*300"):
            check_server(folder, address, probe_length=300)
    assert check.agrees
    assert "probe: 199 tokens" in str(check)
    assert "note: nothing past the original length of 256 tokens was compared" in str(check)
    assert "warning: the server's tokenizer is another one: of a text it makes 3 tokens" in str(check)
    assert "which differ from token 0 on" in str(check)


def test_a_server_without_log_probabilities_is_said(folder: Path, tokenizer: Any) -> None:
    with (
        server(openai(tiny(), tokenizer, "none")) as address,
        pytest.raises(ValueError, match=r"vLLM.*log-probabilities"),
    ):
        check_server(folder, address)


def listing(*models: dict[str, Any]) -> Answer:
    return 200, {"data": list(models)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"<html>"), "has no list of models"),
        ((404, {}), "has no list of models"),
        (listing(), "has no list of models"),
        ((401, {"error": "no"}), "wants a key"),
        ((500, {"error": {"message": "out of memory"}}), r"refuses /v1/models \(500\): out of memory"),
        ((503, b"busy"), r"refuses /v1/models \(503\): busy"),
        (listing({"id": "a"}, {"id": "b"}), r"several models: a, b\. Name one with server_model"),
        (
            listing({"id": "a", "owned_by": "llamacpp", "meta": {"n_embd": 4096}}),
            "runs another model .a.: its hidden size is 4096, and 256 in",
        ),
    ],
)
def test_servers_that_cannot_be_compared(answer: Answer, message: str, folder: Path) -> None:
    with server(lambda *_: answer) as address, pytest.raises(ValueError, match=message):
        check_server(folder, address)


def test_addresses_models_keys_and_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("localhost:8080", "ftp://host", "http://", "http://host:80a", "http://my host:80"):
        with pytest.raises(ValueError, match="the address"):
            check_server(folder, url)
    with server(lambda *_: (200, {})) as address:
        gone = address
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+ \("):
        check_server(folder, gone)
    with pytest.raises(ValueError, match=r"server_dtype.*float32.*'int3'"):
        check_server(folder, gone, server_dtype="int3")

    def slow(*_: Any) -> Answer:
        time.sleep(0.5)
        return 200, {}

    with server(slow) as address, pytest.raises(ValueError, match=r"/v1/models.*0\.05"):
        check_server(folder, address, timeout=0.05)
    with server(lambda *_: listing({"id": "a"}, {"id": "b", "max_model_len": 77})) as address:
        with pytest.raises(ValueError, match=r"'c'\."):
            find_server(Endpoint(address), "c")
        assert find_server(Endpoint(f"{address}/v1/", api_key="k"), "b").context_length == 77
        assert main(["export", str(folder), "--verify", address]) == 2
    assert "--server-model" in capsys.readouterr().err
    assert Endpoint("http://host:1", api_key="k").headers["Authorization"] == "Bearer k"
    assert tuple(PRECISIONS) == SERVER_DTYPES


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", r"gave no whole answer to /x \(IncompleteRead"),
        (b"SSH-2.0-OpenSSH_9\r\n", r"gave no whole answer to /x \(SSH-2\.0"),
        (b"", r"gave no whole answer to /x \(Remote end closed"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\n{}", r"refuses /x \(500\)"),
    ],
    ids=["cut off", "another protocol", "nothing", "a refusal that is cut off"],
)
def test_what_is_no_whole_answer_is_said(raw: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection = listening.accept()[0]
            with connection:
                connection.recv(4096)
                connection.sendall(raw)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InvalidRequestError, match=said):
            Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=10).get("/x")
        thread.join()


def test_the_share_of_the_way_by_hand() -> None:
    own, other = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 2.0, 0.0, -1.0], dtype=torch.float64)
    rows, tokens = torch.tensor([5, 5, 9, 9]), torch.arange(4)
    answered = LogProbs(rows, tokens, torch.tensor([0.5, 1.0, 7.0, -0.5], dtype=torch.float64))
    share, error = share_of(answered, own, other)
    assert (share, error) == (pytest.approx(0.5), pytest.approx(0.0))  # what is off in another direction is no matter
    answered = LogProbs(rows, tokens, torch.tensor([1.0, 0.0, 0.0, -3.0], dtype=torch.float64))
    share, error = share_of(answered, own, other)
    assert share == pytest.approx(4 / 6)
    # Residuals 1/3, -4/3, 0, -7/3 times the way: sums 1/3 - 8/3 and 7/3 in the two positions; over 6.
    assert error == pytest.approx((2 * (7 / 3) ** 2) ** 0.5 / 6)
    assert share_of(answered, own, own.clone()) == (0.0, float("inf"))


def found(
    own: float, unscaled: tuple[float, float, float], **others: tuple[float, float, float]
) -> dict[str, Difference]:
    rows = {"unscaled": unscaled, **others}
    return {
        "own": Difference(own, 1.0, None),
        **{name: Difference(mean, 1.0, None, share, error) for name, (mean, share, error) in rows.items()},
    }


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        (found(0.01, (0.2, 0.0, 0.01)), ("agrees", "own")),
        (found(0.01, (0.2, 0.3, 0.01)), ("differs", None)),  # on the way to something else
        (found(0.01, (0.2, 0.3, 0.1)), ("agrees", "own")),
        (found(0.2, (0.3, 0.0, 0.01)), ("differs", None)),
        (found(0.2, (0.01, 1.0, 0.01)), ("unscaled", "unscaled")),
        (found(0.09, (0.08, 0.7, 0.05)), ("differs", None)),
        (found(0.01, (0.012, 0.1, 0.3)), ("undecided", None)),
        (found(0.2, (0.3, 0.4, 0.01), other=(0.02, 1.0, 0.01)), ("another", "other")),
        (found(0.02, (0.3, 0.0, 0.01), other=(0.01, 0.8, 0.4)), ("agrees", "own")),  # the two cannot be told apart
    ],
)
def test_verdicts_by_hand(differences: dict[str, Difference], verdict: tuple[str, str | None]) -> None:
    assert judge(differences, limit=0.1) == verdict
