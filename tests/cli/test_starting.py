"""The start of a command: shown from the first moment, in a terminal, and gone when it is over."""

import gc
import os
import select
import sys
import time

import pytest

import model_folders
from kvprune.cli.starting import starting

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")


def in_terminal(*command: str, until: bytes, typed: bytes) -> str:
    """All that a command shows in a terminal, where this is typed as soon as `until` is shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(command[0], command)
    shown, deadline = b"", time.monotonic() + 300
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux reports that the other side is closed
            break
        if not part:
            break
        shown += part
        if typed and until in shown:
            os.write(terminal, typed)
            typed = b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    return shown.decode()


def test_a_chat_shows_what_it_is_doing(tmp_path):
    place = model_folders.save(tmp_path)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    shown = in_terminal(
        sys.executable, "-c", "from kvprune.cli import main; main()",
        "chat", str(place / "model"), "--adapter", str(place / "adapter"),
        "--template", str(template),
        until=b"Ctrl-D leaves", typed=b"/quit\n",
    )  # fmt: skip
    steps = ["importing torch", "importing transformers", "loading", "kernels", "Ctrl-D leaves"]
    found = [shown.find(step) for step in steps]
    assert -1 not in found, shown
    assert found == sorted(found)


def test_silent_without_a_terminal(capsys):
    with starting() as tell:
        assert not gc.isenabled()
        tell("importing the world")
    assert gc.isenabled()
    assert capsys.readouterr().err == ""


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(ValueError, match="broken"), starting():
        raise ValueError("broken")
    assert gc.isenabled()
