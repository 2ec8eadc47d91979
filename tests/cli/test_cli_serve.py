"""kvprune serve, up to its model and from its signal on."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request

import pytest

import model_folders
from kvprune.adapters.ready import load_served, served_name
from kvprune.cli.names import check_models
from kvprune.errors import PruneError
from kvprune.serve.sockets import bind

serve = importlib.import_module("kvprune.cli.serve")  # the package has the command by this name


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(serve, "NEEDED", ("no_such_package", "uvicorn"))
    with pytest.raises(
        PruneError, match=r"needs no_such_package; .*pip install 'kvprune\[serve\]'"
    ):
        serve._check_installed()


def test_names_that_clients_see(tmp_path):
    assert served_name(str(tmp_path / ".")) == tmp_path.name
    assert served_name("owner/model") == "owner/model"


def test_wrong_options_are_refused_before_anything_is_loaded(tmp_path):
    model_folders.save(tmp_path)
    taken = bind("127.0.0.1", 0)
    taken.listen()
    port = str(taken.getsockname()[1])
    wrong = {
        "another program uses this port": ("--port", port),
        "no-such-host.invalid is no address": ("--host", "no-such-host.invalid"),
    }
    try:
        for message, options in wrong.items():
            done = run(str(tmp_path / "model"), *options)
            assert done.returncode == 2
            assert message in done.stderr
    finally:
        taken.close()
    for check, value in (
        (serve._check_admission, "maybe"), (serve._check_log_level, "loud"),
        (serve._check_prefix_budget, "much"), (serve._check_keys, [""]),
    ):  # fmt: skip
        with pytest.raises(PruneError):
            check(value)


def command(*args):
    return [sys.executable, "-c", "from kvprune.cli import main; main()", "serve", *args]


def run(*args):
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("chat", [True, False])
def test_the_lines_of_the_banner_can_be_pasted(chat):
    curl, python = serve.examples("http://127.0.0.1:1", "a", True, chat)
    assert 'Bearer $KVPRUNE_API_KEY"' in curl
    body = re.search(r"-d '(.*)'$", curl)
    assert ("messages" if chat else "prompt") in json.loads(body[1])
    compile(re.search(r'-c "(.*)"$', python)[1], "banner", "exec")


def test_from_start_to_sigterm(tmp_path):
    """A dense model with a template of its own, a key from the environment, a port by itself."""
    model_folders.save(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = ("--port", "0", "--kv-budget", "20MB", "--template", str(template))
    process = subprocess.Popen(
        command(str(tmp_path / "model"), *options),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVPRUNE_API_KEY": "one two"},
    )
    try:
        said = ""
        while "python -c" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        assert "model, dense" in said
        url = re.search(r"curl (http://[\d.:]+)/v1/chat", said)[1]
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 3,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer two"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1]
        assert process.returncode == 0, said + rest
        assert '"POST /v1/chat/completions HTTP/1.1" 200' in rest
        assert "hello" not in rest
    finally:
        process.kill()
        process.wait()


def test_several_adapters_of_one_base(tmp_path):
    model_folders.save(tmp_path)
    names = [str(tmp_path / name) for name in ("model", "adapter")]
    rest = (None, "auto", "cpu", None, lambda words: None, None)
    with pytest.raises(PruneError, match="protect_recent is for one model, and 2 are named"):
        load_served(names, *rest, threshold=None, protect_recent=3)
    with pytest.raises(PruneError, match="is named twice"):
        check_models([names[0], *names])
    served = load_served(names, *rest, threshold=None, protect_recent=None)
    assert [(name, pruned.working.prunes) for name, pruned in served.items()] == [
        ("model", False), ("adapter", True),
    ]  # fmt: skip
    shutil.copytree(names[1], tmp_path / "other" / "adapter")
    names.append(str(tmp_path / "other" / "adapter"))
    with pytest.raises(PruneError, match="two have the same name"):
        load_served(names, *rest)
