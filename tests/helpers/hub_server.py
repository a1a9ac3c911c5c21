"""A stand-in of the Hugging Face Hub on this machine: the requests of ``huggingface_hub`` over HTTP, with real bytes.

It has accounts by token, public and private repositories of models, branches and commits, files in git and in LFS, and
answers with the status codes and error headers of the Hub. Xet storage is left out: clients have to switch it off.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LFS_SUFFIXES = (".safetensors", ".png", ".gguf")


@dataclass
class Account:
    """Who a token belongs to; ``writes`` are the owners whose repositories it may write to."""

    name: str
    writes: tuple[str, ...]


@dataclass
class Repo:
    """A repository: commits by their hash, each a dictionary of files, and the branches that name them."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(repr((len(self.commits), branch, sorted(files))).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def sha_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubError(Exception):
    """An answer with an error's status, code and message, as the Hub has them."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Hub:
    """What the server holds; tests read it, and set ``down`` for a fault."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.down = False
        self.endpoint = ""

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        repo = self.repos[repo_id]
        return repo.commits[repo.branches[branch]]

    # ---- what is asked, by method and path; each returns (status, headers, body) ----

    def create_repo(self, account: Account | None, asked: dict[str, Any]) -> Any:
        if account is None:
            raise HubError(401, message="Invalid username or password.")
        owner = asked.get("organization") or account.name
        name = f"{owner}/{asked['name']}"
        if owner not in account.writes:
            raise HubError(403, message=f"You don't have the rights to create a model under the namespace {owner!r}")
        if name in self.repos:
            said = {"error": "You already created this model repo", "url": f"{self.endpoint}/{name}"}
            return 409, {}, said
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.repos[name] = Repo(private)
        self.repos[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return 200, {}, {"url": f"{self.endpoint}/{name}", "name": name, "id": name}

    def readable(self, account: Account | None, name: str) -> Repo:
        repo = self.repos.get(name)
        owner = name.partition("/")[0]
        if repo is None or (repo.private and (account is None or owner not in account.writes)):
            raise HubError(404 if account else 401, "RepoNotFound", "Repository not found")
        return repo

    def writable(self, account: Account | None, name: str) -> Repo:
        repo = self.readable(account, name)
        if account is None:
            raise HubError(401, message="Invalid username or password.")
        if name.partition("/")[0] not in account.writes:
            raise HubError(403, message="Your token doesn't have the right to write to this repository")
        return repo

    def at(self, repo: Repo, revision: str) -> tuple[str, dict[str, bytes]]:
        oid = repo.sha_of(revision)
        if oid is None:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid, repo.commits[oid]

    def preupload(self, repo: Repo, revision: str, asked: dict[str, Any]) -> Any:
        _, held = self.at(repo, revision)
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": git_oid(held[one["path"]]) if one["path"] in held else None,
            }
            for one in asked["files"]
        ]
        return 200, {}, {"files": files}

    def lfs_batch(self, asked: dict[str, Any]) -> Any:
        objects = []
        for one in asked["objects"]:
            found: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.objects:
                found["actions"] = {"upload": {"href": f"{self.endpoint}/lfs/{one['oid']}", "header": {}}}
            objects.append(found)
        return 200, {}, {"transfer": "basic", "objects": objects}

    def commit(self, repo: Repo, name: str, branch: str, lines: list[dict[str, Any]]) -> Any:
        files = dict(self.at(repo, branch)[1])
        assert lines[0]["key"] == "header"
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile", line["key"]
                del files[value["path"]]
        oid = repo.commit(branch, files)
        return 200, {}, {"commitUrl": f"{self.endpoint}/{name}/commit/{oid}", "commitOid": oid}

    def info(self, repo: Repo, name: str, revision: str) -> Any:
        oid, files = self.at(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        return 200, {}, {"id": name, "private": repo.private, "sha": oid, "siblings": siblings, "tags": []}

    def tree(self, repo: Repo, revision: str, below: str) -> Any:
        _, files = self.at(repo, revision)
        found = [
            {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
            for path, content in sorted(files.items())
            if path.startswith(f"{below}/" if below else "")
        ]
        if below and not found:
            raise HubError(404, "EntryNotFound", f"{below} does not exist")
        return 200, {}, found

    def resolve(self, repo: Repo, revision: str, path: str) -> Any:
        oid, files = self.at(repo, revision)
        if path not in files:
            raise HubError(404, "EntryNotFound", "Entry not found")
        content = files[path]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{git_oid(content)}"', "Accept-Ranges": "bytes"}
        if not path.endswith(LFS_SUFFIXES):
            return 200, headers, content
        sha = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
        # Another host, as for the Hub: the client follows redirects to the same one by itself.
        storage = self.endpoint.replace("127.0.0.1", "localhost")
        return 302, {**headers, **linked, "Location": f"{storage}/lfs/{sha}"}, b""

    def answer(self, method: str, target: str, token: str | None, body: bytes) -> Any:
        """Return (status, headers, body) of a request."""
        parts = urlsplit(target)
        path = unquote(parts.path)
        self.requests.append((method, path))
        if self.down:
            raise HubError(503, message="The Hub is being repaired")
        if token is not None and token not in self.accounts:
            raise HubError(401, message="Invalid credentials in Authorization header")
        account = None if token is None else self.accounts[token]
        if path == "/api/repos/create":
            return self.create_repo(account, json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {}, {"errors": [], "warnings": []}
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            if method == "PUT":
                assert hashlib.sha256(body).hexdigest() == found[1]
                self.objects[found[1]] = body
                return 200, {}, b""
            return 200, {}, self.objects[found[1]]
        if found := re.fullmatch(r"/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            self.writable(account, found[1])
            return self.lfs_batch(json.loads(body))
        if found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(\w+)/([^/]+)(?:/(.+))?)?", path):
            name, what, revision, below = found.groups()
            return self.api(account, method, name, what or "revision", revision or "main", below or "", body)
        if (found := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path)) and method in ("GET", "HEAD"):
            return self.resolve(self.readable(account, found[1]), found[2], found[3])
        raise HubError(501, message=f"{method} {path} is nothing that this stand-in knows")

    def api(
        self, account: Account | None, method: str, name: str, what: str, revision: str, below: str, body: bytes
    ) -> Any:
        if method == "GET" and what == "revision":
            return self.info(self.readable(account, name), name, revision)
        if method == "GET" and what == "tree":
            return self.tree(self.readable(account, name), revision, below)
        if method != "POST":
            raise HubError(501, message=f"{method} {what} is nothing that this stand-in knows")
        repo = self.writable(account, name)
        if what == "branch":
            if revision in repo.branches:
                return 409, {}, {"error": "Reference already exists"}
            repo.branches[revision] = repo.branches["main"]
            return 200, {}, {}
        if what == "preupload":
            return self.preupload(repo, revision, json.loads(body))
        if what != "commit":
            raise HubError(501, message=f"{method} {what} is nothing that this stand-in knows")
        return self.commit(repo, name, revision, [json.loads(line) for line in body.splitlines() if line])


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        try:
            status, headers, content = self.hub.answer(self.command, self.path, token, body)
        except HubError as error:
            status, headers, content = error.status, {"X-Error-Message": error.message}, {"error": error.message}
            if error.code:
                headers["X-Error-Code"] = error.code
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers = {**headers, "Content-Type": "application/json"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a Hub with two accounts: ``hf_me`` of ``me``, who is in ``team``, and ``hf_other`` of ``other``."""
    hub = Hub()
    hub.accounts = {"hf_me": Account("me", ("me", "team")), "hf_other": Account("other", ("other",))}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, cache: str, token: str | None) -> dict[str, str]:
    """Return what a process needs in its environment to take a stand-in for the Hub."""
    given = {} if token is None else {"HF_TOKEN": token}
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": cache, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **given}


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub, cache: str, token: str | None) -> None:
    """Take a stand-in for the Hub in this process, where ``huggingface_hub`` has read its environment already."""
    import transformers.utils.hub
    from huggingface_hub import constants, hf_api

    changed = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": f"{cache}/hub",
        "HF_TOKEN_PATH": f"{cache}/token",
    }
    for name, value in changed.items():
        monkeypatch.setattr(constants, name, value)
    # Clients that were made before.
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)


# huggingface_hub 2.4 sends a file in a way that its HTTP client calls deprecated.
UPLOADS = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
