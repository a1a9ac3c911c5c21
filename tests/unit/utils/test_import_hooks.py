"""Changes to modules of other libraries, in processes of their own: before, during and after the import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_BEGIN = """
import importlib, importlib.util, logging, sys, threading, time
from pathlib import Path
from hf_posenc.utils.import_hooks import when_imported
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
logging.basicConfig(format="%(message)s")
changed = []
"""
_LATER = """
(folder / "somewhere.py").write_text("raise RuntimeError('not yet')")
when_imported("somewhere", changed.append)
assert importlib.util.find_spec("somewhere") is not None
try:
    import somewhere
except RuntimeError:
    pass
assert changed == []
(folder / "somewhere.py").write_text("value = 'something else by now'")
importlib.invalidate_caches()
import somewhere
assert changed == [somewhere] and somewhere.value
when_imported("somewhere", changed.append)
assert changed == [somewhere, somewhere]
"""
_OTHER_THREAD = """
(folder / "slow.py").write_text("import time; time.sleep(1); value = 1")
thread = threading.Thread(target=importlib.import_module, args=("slow",))
thread.start()
while "slow" not in sys.modules:
    time.sleep(0.01)
assert not hasattr(sys.modules["slow"], "value")
when_imported("slow", lambda module: changed.append(module.value))
assert changed == [1]
thread.join()
"""
_OTHER_THREAD_FAILS = """
(folder / "slow.py").write_text("import time; time.sleep(1); raise RuntimeError")
def attempt():
    try:
        import slow
    except RuntimeError:
        pass
thread = threading.Thread(target=attempt)
thread.start()
while "slow" not in sys.modules:
    time.sleep(0.01)
when_imported("slow", lambda module: changed.append(module.value))
thread.join()
assert changed == []
(folder / "slow.py").write_text("value = 1")
importlib.invalidate_caches()
import slow
assert changed == [1]
"""
_ITS_OWN_IMPORT = """
(folder / "circle.py").write_text("import __main__; __main__.when_imported('circle', __main__.changed.append)")
import circle
assert changed == []
"""
_FAILS = """
(folder / "first.py").write_text("")
(folder / "second.py").write_text("")
import first
for name in ("first", "second"):
    when_imported(name, lambda module: module.missing)
import second
"""


def run(code: str, folder: Path) -> str:
    words = [sys.executable, "-B", "-c", _BEGIN + code, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("code", [_LATER, _OTHER_THREAD, _OTHER_THREAD_FAILS], ids=["later", "thread", "failing"])
def test_a_change_waits_for_an_import_that_succeeds(code: str, tmp_path: Path) -> None:
    """Looking for a module, or an import that fails, does not use the change up."""
    assert run(code, tmp_path) == ""


def test_a_module_that_the_caller_is_importing_is_named(tmp_path: Path) -> None:
    assert run(_ITS_OWN_IMPORT, tmp_path) == (
        "circle is being imported by the caller. Call hf_posenc.install() after that import.\n"
    )


def test_a_change_that_fails_does_not_fail_the_import(tmp_path: Path) -> None:
    first, second = run(_FAILS, tmp_path).splitlines()
    assert first.startswith("first was not changed (AttributeError: ")
    assert second.startswith("second was not changed (AttributeError: ")
