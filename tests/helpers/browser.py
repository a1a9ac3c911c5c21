"""Chromium without a window, driven over its own debugging protocol through a pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


def find_chromium() -> str:
    """Return the path of a Chromium or Chrome.

    Raises:
        RuntimeError: There is none on PATH.
    """
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    raise RuntimeError(f"this test opens the page in a browser, and none of {', '.join(_NAMES)} is on PATH.")


class Browser:
    """One page in a browser with a new profile; ``requests`` are the addresses it asked for, ``complaints`` its log."""

    def __init__(self, profile: Path, seconds: float = 60) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._seconds, self._number, self._buffer = seconds, 0, b""
        self._session: str | None = None
        read_commands, self._write = map(_out_of_the_way, os.pipe())
        self._read, write_answers = map(_out_of_the_way, os.pipe())

        def give_pipes() -> None:  # the browser reads commands from 3 and writes answers to 4
            os.dup2(read_commands, 3)
            os.dup2(write_answers, 4)

        self._process = subprocess.Popen(
            [find_chromium(), *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=give_pipes,
        )
        os.close(read_commands)
        os.close(write_answers)

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a file and wait until it is there; from another page, so that a fragment alone is a load too."""
        for address in ("about:blank", page.as_uri() + fragment):
            self.call("Page.navigate", url=address)
            while self.evaluate("document.readyState + location.href") != "complete" + address:
                time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def look(self, width: int, height: int = 1200, scheme: str = "light", media: str = "screen") -> None:
        """Give the page a screen: CSS pixels, the reader's colour scheme, and "screen" or "print"."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element."""
        element = f"document.querySelector({selector!r})"
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y = self.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=13)

    def screenshot(self) -> bytes:
        """Return what is to be seen, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def print(self) -> bytes:
        """Return the page on paper, as a PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def _next(self) -> dict[str, Any]:
        """Return the next message, and note what events say."""
        deadline = time.monotonic() + self._seconds
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {self._seconds:g} s.")
            if not (read := os.read(self._read, 1 << 16)):
                raise RuntimeError(f"the browser ended, exit code {self._process.wait(timeout=30)}.")
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(message["params"]))
        return message


def _out_of_the_way(descriptor: int) -> int:
    """Return a copy of a file descriptor with a number that is neither 3 nor 4."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high
