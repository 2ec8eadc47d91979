"""What starts the server: the script of the container and of the service, and their definitions."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.main import get_command

import model_folders
from kvprune.cli import app
from kvprune.serve.server import GRACE_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
STUB = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], os.environ.get("KVPRUNE_API_KEY")]))
"""
KVPRUNE = f"""#!{sys.executable}
from kvprune.cli import main
main()
"""


def on_path(folder: Path, text: str) -> str:
    """A PATH on which kvprune is this script."""
    script = folder / "bin/kvprune"
    script.parent.mkdir()
    script.write_text(text)
    script.chmod(0o755)
    return f"{script.parent}:/usr/bin:/bin"


@pytest.fixture
def start(tmp_path):
    """Start with nothing but these variables; what the command was given, or what was said."""
    path = on_path(tmp_path, STUB)

    def run(*args, **variables):
        process = subprocess.Popen(
            [str(DEPLOY / "start.sh"), *args], text=True, env={"PATH": path, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, errors = process.communicate(timeout=30)
        if process.returncode:
            return process.returncode, errors.strip()
        pid, *rest = json.loads(out)
        # the server has the shell's place: signals to it reach the server
        assert pid == process.pid
        return rest

    return run


def test_settings_become_options(start):
    assert start(KVPRUNE_MODEL="a model") == [
        ["serve", "a model", "--host", "127.0.0.1", "--port", "8000"], None
    ]  # fmt: skip
    arguments, _ = start(
        "--log-level", "debug", "--drain", "7",
        KVPRUNE_MODEL="m", KVPRUNE_ADAPTER="folder/a b", KVPRUNE_PORT="9000", KVPRUNE_REPLICAS="3",
        KVPRUNE_KV_BUDGET="4GB", KVPRUNE_KV="int8", KVPRUNE_DTYPE="bfloat16",
        KVPRUNE_DEVICE="cuda", KVPRUNE_DRAIN="5", KVPRUNE_HOST="::1",
    )  # fmt: skip
    assert arguments[:6] == ["serve", "m", "--host", "::1", "--port", "9000"]
    # what is given as an argument comes last, and so wins
    assert arguments[-4:] == ["--log-level", "debug", "--drain", "7"]
    rest = arguments[6:-4]
    assert dict(zip(rest[::2], rest[1::2], strict=True)) == {
        "--adapter": "folder/a b", "--replicas": "3", "--kv-budget": "4GB", "--kv": "int8",
        "--dtype": "bfloat16", "--device": "cuda", "--drain": "5",
    }  # fmt: skip


def test_options_of_the_script_are_those_of_the_command():
    known = {name for p in get_command(app).commands["serve"].params for name in p.opts}
    named = set(re.findall(r"(--[a-z-]+) ", (DEPLOY / "start.sh").read_text()))
    assert "--replicas" in named
    assert named <= known


def test_keys_come_from_a_file_and_are_in_no_argument(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    arguments, key = start(
        KVPRUNE_MODEL="m", KVPRUNE_HOST="0.0.0.0", KVPRUNE_API_KEY_FILE=str(keys)
    )
    assert key == "first\nsecond"
    assert "first" not in " ".join(arguments)


def test_what_is_missing_is_said(start, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    wrong = {
        "KVPRUNE_MODEL is not set": {},
        "cannot read /no/such": {"KVPRUNE_MODEL": "m", "KVPRUNE_API_KEY_FILE": "/no/such"},
        "holds no key": {"KVPRUNE_MODEL": "m", "KVPRUNE_API_KEY_FILE": str(empty)},
        "are both set": {"KVPRUNE_MODEL": "m", "KVPRUNE_API_KEY_FILE": str(empty),
                         "KVPRUNE_API_KEY": "a"},
        "others can reach 0.0.0.0": {"KVPRUNE_MODEL": "m", "KVPRUNE_HOST": "0.0.0.0"},
    }  # fmt: skip
    for message, variables in wrong.items():
        code, said = start(**variables)
        assert code == 2
        assert said.startswith("start.sh: ")
        assert message in said
    assert start(KVPRUNE_MODEL="m", KVPRUNE_HOST="0.0.0.0", KVPRUNE_WITHOUT_KEYS="1")[1] is None


def test_a_real_server_drains_on_sigterm(tmp_path):
    """An answer that is being written when the signal comes is written to its end."""
    model_folders.save(tmp_path)
    keys = tmp_path / "keys"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    keys.write_text("secret\n")
    variables = {
        "PATH": on_path(tmp_path, KVPRUNE), "KVPRUNE_MODEL": str(tmp_path / "model"),
        "KVPRUNE_ADAPTER": str(tmp_path / "adapter"), "KVPRUNE_HOST": "127.0.0.1",
        "KVPRUNE_PORT": str(port), "KVPRUNE_API_KEY_FILE": str(keys), "KVPRUNE_KV_BUDGET": "20MB",
    }  # fmt: skip
    environment = os.environ | variables
    process = subprocess.Popen(
        [str(DEPLOY / "start.sh")], env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    healthy = [sys.executable, str(DEPLOY / "healthy.py")]
    try:
        said = ""
        while "python -c" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        # nobody else reads the pipe
        threading.Thread(target=process.stderr.read).start()
        assert subprocess.run(healthy, env=environment, capture_output=True).stdout == b"200\n"
        body = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {
            "Content-Type": "application/json", "Authorization": "Bearer secret"})  # fmt: skip
        answer = connection.getresponse()
        assert answer.status == 200
        text = answer.readline()
        process.send_signal(signal.SIGTERM)
        text += answer.read()
        assert b'"finish_reason":"length"' in text.replace(b": ", b":")
        assert text.rstrip().endswith(b"data: [DONE]")
        assert process.wait(30) == 0
        stopped = subprocess.run(healthy, env=environment, capture_output=True, text=True)
        assert stopped.returncode == 1
        assert stopped.stderr.startswith("not healthy: ")
    finally:
        # all of the session, also if the script had stayed in front of the server
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_image_is_built_from_what_is_sent():
    """Of the repository only what the build copies; nothing secret; not as root."""
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    sent = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
            if line.startswith("!")]  # fmt: skip
    copied = [name for kind, rest in steps if kind == "COPY" and "--from" not in rest
              for name in rest.split()[:-1]]  # fmt: skip
    assert sorted(copied) == sorted(sent)
    assert all((DEPLOY.parent / name).exists() for name in copied)
    users = [rest for kind, rest in steps if kind == "USER"]
    assert users == ["10001"]
    names = [rest for kind, rest in steps if kind in ("ARG", "ENV")]
    assert not re.search("KEY|TOKEN|SECRET|PASSWORD", " ".join(names))
    (entry,) = (json.loads(rest) for kind, rest in steps if kind == "ENTRYPOINT")
    assert Path(entry[0]).name in {Path(name).name for name in copied}
    assert os.access(DEPLOY / Path(entry[0]).name, os.X_OK)
    (check,) = (rest for kind, rest in steps if kind == "HEALTHCHECK")
    assert Path(json.loads(check.split("CMD")[1])[1]).name == "healthy.py"
    (volume,) = (rest for kind, rest in steps if kind == "VOLUME")
    (settings,) = (rest for kind, rest in steps if kind == "ENV")
    folders = dict(pair.split("=") for pair in settings.split())
    assert {v for k, v in folders.items() if "CACHE" in k or "HOME" in k} == {
        f"{volume}/{name}" for name in ("kvprune", "huggingface", "numba", "triton")
    }


def unit() -> dict[str, list[str]]:
    """Every setting of the service, with its values in order."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "kvprune.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def test_the_service_may_do_little_and_is_started_again():
    settings = unit()
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectHome",
                 "ProtectKernelModules", "RestrictNamespaces", "RestrictSUIDSGID"):  # fmt: skip
        assert settings[name] == ["yes"], name
    assert settings["ProtectSystem"] == ["strict"]
    assert settings["CapabilityBoundingSet"] == [""]
    assert settings["Restart"] == ["on-failure"]
    # Numba compiles at run time
    assert "MemoryDenyWriteExecute" not in settings
    assert int(settings["TimeoutStopSec"][0]) > 30 + GRACE_SECONDS
    # everything that it writes lies in the folder that systemd makes for it
    folder = f"%C/{settings['CacheDirectory'][0]}"
    written = [v for v in settings["Environment"] if v.startswith(("HOME", "HF", "NUMBA"))]
    assert len(written) == 3
    assert all(value.split("=")[1].startswith(folder) for value in written)
    names = re.findall(r"^#? ?(KVPRUNE_\w+)=", (DEPLOY / "kvprune.env").read_text(), re.MULTILINE)
    script = (DEPLOY / "start.sh").read_text()
    assert all(name in script for name in names)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_accepts_the_service(tmp_path):
    text = (DEPLOY / "kvprune.service").read_text()
    file = tmp_path / "kvprune.service"
    file.write_text(text.replace("/opt/kvprune/start.sh", str(DEPLOY / "start.sh")))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
