"""Requests with JSON to a server, with what went wrong in words."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from hf_posenc.errors import InvalidRequestError, argument

_QUOTED = 300  # characters of a server's own words in a message


class Endpoint:
    """A server at an address.

    Args:
        url: ``http://host:port``; what clients call its base URL, with ``/v1`` at the end, is taken too.
        api_key: Sent as a bearer token; None for none.
        timeout: Seconds that one answer may take.

    Raises:
        ValueError: It is no address of that kind.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # its port is no number
            is_one = False
        if not is_one or re.search(r"\s", url):
            raise InvalidRequestError(f"{url!r} is not the address of a server: give one like http://localhost:8080.")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.timeout = timeout
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, *, or_none: bool = False) -> Any:
        """Return the JSON at a path; with ``or_none``, None where the server has no such path.

        Raises:
            ValueError: There is no answer in time, or it is an error, or no JSON.
        """
        return self._ask(path, None, or_none)

    def post(self, path: str, body: dict[str, Any], *, or_none: bool = False) -> Any:
        """Return the JSON that a path answers a request with; otherwise as ``get``."""
        return self._ask(path, json.dumps(body).encode(), or_none)

    def _ask(self, path: str, data: bytes | None, or_none: bool) -> Any:
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            if or_none and error.code in (400, 404, 405, 501):
                return None
            raise InvalidRequestError(self._refused(path, error)) from error
        except TimeoutError as error:
            raise InvalidRequestError(self._too_slow(path)) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise InvalidRequestError(self._too_slow(path)) from error
            raise InvalidRequestError(
                f"no server answers at {self.url} ({error.reason}). Is it started, and are host and port right?"
            ) from error
        except (OSError, HTTPException) as error:  # the connection ended in the middle of an answer, or it is not HTTP
            raise InvalidRequestError(
                f"the server at {self.url} gave no whole answer to {path} ({error}): it broke off, or is no HTTP."
            ) from error
        try:
            return json.loads(content)
        except ValueError as error:
            if or_none:
                return None
            raise InvalidRequestError(
                f"{self.url}{path} answers with something else than JSON ({content[:40]!r}): it is not a server of "
                "language models, or another address of it is meant."
            ) from error

    def _refused(self, path: str, error: urllib.error.HTTPError) -> str:
        message = ""
        try:
            message = error.read().decode(errors="replace")
            answer = json.loads(message)
            inner = answer.get("error", answer)
            message = str(inner.get("message", message) if isinstance(inner, dict) else inner)
        except (ValueError, AttributeError, OSError, HTTPException):
            pass
        if error.code in (401, 403):
            return f"the server at {self.url} wants a key ({error.code}): give it with {argument('api_key')}."
        return f"the server at {self.url} refuses {path} ({error.code}): {message.strip()[:_QUOTED]}"

    def _too_slow(self, path: str) -> str:
        return (
            f"the server at {self.url} did not answer {path} within {self.timeout:g} seconds. It may be busy or still "
            f"loading; {argument('timeout')} waits longer."
        )
