"""kvprune chat with lines on stdin, in this process: starting another takes longer."""

import json
import os
import signal
import sys

import pytest
from typer.testing import CliRunner

import model_folders
from kvprune import PruneError
from kvprune.cli import app
from kvprune.cli.chat import _stopping

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = model_folders.save(tmp_path_factory.mktemp("chat"), positions=300)
    (path / "chat.jinja").write_text(TEMPLATE)
    return path


def run(place, text, *args, name="model"):
    fixed = ["chat", place / name, "--template", place / "chat.jinja", "--max-new-tokens", 9]
    return CliRunner().invoke(app, [*map(str, fixed), *map(str, args)], input=text)


def ran(*args, **options):
    done = run(*args, **options)
    if done.exception is not None:
        raise done.exception
    return done


def test_one_message_per_line(place):
    done = ran(place, "Hello\n\nAnd you?\n", "--adapter", place / "adapter")
    first, second = (line for line in done.stderr.splitlines() if "tokens seen" in line)
    assert "tokens/s" in first
    assert "MiB, dense" in first
    seen = [int(line.split()[0]) for line in (first, second)]
    # the second turn continued from the first
    assert seen[1] > seen[0] + len("user: And you?")
    assert done.stdout.count("\n") >= 2


def test_json_and_dense(place):
    lines = ran(place, "Hello\nBye\n", "--json", "--temperature", 0).stdout.splitlines()
    dense = [json.loads(line) for line in lines]
    assert all(one["kept"] == one["seen"] for one in dense)
    assert all(one["bytes"] == one["dense_bytes"] > 0 for one in dense)
    assert [set(one) >= {"answer", "tokens_per_second", "ended"} for one in dense] == [True] * 2
    # the adapter by itself knows its base
    done = ran(place, "Hello\n", "--json", "--temperature", 0, name="adapter")
    pruned = json.loads(done.stdout)
    assert pruned["kept"] < pruned["seen"]


def test_commands(place, tmp_path):
    page = tmp_path / "page.html"
    said = f"/help|Hello|/explain {page}|/system Be kind|/reset|Hello|/quit|Hello"
    done = ran(place, said.replace("|", "\n"), "--adapter", place / "adapter")
    for part in ("Ctrl-C stops", f"wrote {page}", "system: Be kind", "a new conversation"):
        assert part in done.stderr, part
    assert done.stderr.count("tokens seen") == 2
    assert '"u","s","e","r"' in page.read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("new/page.html", "there is no folder"),
        ("folder", "is a folder"),
        ("notes.txt", "exists and is no page of a chat"),
    ],
)
def test_explain_writes_no_folder_and_over_no_other_file(place, tmp_path, name, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("my notes")
    before = sorted(tmp_path.rglob("*"))
    done = run(place, f"Hello\n/explain {tmp_path / name}\n", "--adapter", place / "adapter")
    assert isinstance(done.exception, PruneError)
    assert says in str(done.exception)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "notes.txt").read_text() == "my notes"


def test_explain_writes_its_own_page_again(place, tmp_path):
    page = tmp_path / "page.html"
    ran(place, f"Hello\n/explain {page}\nBye\n/explain {page}\n", "--adapter", place / "adapter")
    assert '"B","y","e"' in page.read_text()


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("/dance", [], "/dance is no command"),
        ("/explain", [], "dense model forgets nothing"),
        ("word " * 80, [], "300 positions"),
        ("hi", ["--threshold", "1"], "is dense: there is no threshold"),
        ("hi", ["--template", "nowhere.jinja"], "cannot read the template"),
    ],
)
def test_errors(place, text, options, says):
    done = run(place, text, *options)
    assert isinstance(done.exception, PruneError)
    assert says in str(done.exception)


def test_a_model_without_a_template(place):
    done = CliRunner().invoke(app, ["chat", str(place / "model")], input="hi")
    assert isinstance(done.exception, PruneError)
    assert "has no chat template" in str(done.exception)
    assert "--template FILE" in str(done.exception)


def test_the_threshold_prunes_more(place):
    def kept(*options):
        done = ran(place, "Hello there\n", "--json", "--adapter", place / "adapter", *options)
        return json.loads(done.stdout)["kept"]

    assert kept("--threshold", 3) < kept() < kept("--threshold", -9)


class Talk:
    """Says one piece before and one after Ctrl-C."""

    stopped = False

    def stop(self):
        self.stopped = True


def test_ctrl_c_stops_the_answer_and_not_the_program():
    talk = Talk()
    before = signal.getsignal(signal.SIGINT)
    with _stopping(talk):
        os.kill(os.getpid(), signal.SIGINT)
    assert talk.stopped
    assert signal.getsignal(signal.SIGINT) is before


def answers(done):
    return [json.loads(line)["answer"] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["pruned", "int8", "dense"])
def test_a_chat_that_goes_on_another_day(place, tmp_path, kind):
    """--resume, /save and /load against one chat that was never stopped; it samples."""
    file, sampled = tmp_path / "chat", ["--json", "--temperature", 0.8, "--seed", 5]
    model = [] if kind == "dense" else ["--adapter", place / "adapter"]
    model += ["--kv", "int8"] if kind == "int8" else []
    want = answers(ran(place, "Hello\nAnd you?\nWhy?\n", *model, *sampled))
    first = ran(place, f"Hello\n/save {file}\n", *model, *sampled)
    # temperature and random numbers are the file's
    second = ran(place, f"And you?\n/save {file}\n", "--resume", file, "--json", *model)
    third = ran(place, f"Something else\n/load {file}\nWhy?\n", "--json", *model)
    assert f"wrote {file}" in first.stderr
    assert f"loaded {file}: 1 turns" in second.stderr
    assert f"loaded {file}: 2 turns" in third.stderr
    assert [*answers(first), *answers(second), answers(third)[1]] == want


def test_settings_that_are_given_take_precedence(place, tmp_path):
    file, pruned = tmp_path / "chat", ["--adapter", place / "adapter", "--json"]
    ran(place, f"Hello\n/save {file}\n", *pruned, "--temperature", 0.9, "--seed", 1)

    def resumed(*options):
        return answers(ran(place, "And you?\n", "--resume", file, *pruned, *options))

    own = resumed()
    assert resumed("--temperature", 0.9) == own
    assert resumed("--seed", 9) != own
    assert resumed("--temperature", 0) != own
    assert resumed("--temperature", 0) == resumed("--temperature", 0, "--seed", 9)
    assert resumed("--max-new-tokens", 2) != own
    with_system = ran(place, "And you?\n", "--resume", file, *pruned, "--system", "Be kind")
    assert "the cache is rebuilt" in with_system.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("new/chat", "there is no folder"),
        ("folder", "is a folder"),
        ("notes.txt", "exists and is no saved chat"),
    ],
)
def test_save_writes_no_folder_and_over_no_other_file(place, tmp_path, name, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("my notes")
    before = sorted(tmp_path.rglob("*"))
    done = run(place, f"Hello\n/save {tmp_path / name}\n", "--adapter", place / "adapter")
    assert isinstance(done.exception, PruneError)
    assert says in str(done.exception)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "notes.txt").read_text() == "my notes"


def test_in_a_terminal_errors_leave_the_conversation_alive(place, tmp_path, monkeypatch):
    """A file of other settings, one that is not there, a message over the budget."""
    file = tmp_path / "chat"
    pruned = ["--adapter", place / "adapter", "--protect-first", 300, "--json"]
    done = ran(place, f"Hello\n/save {file}\nHello\n", *pruned, "--threshold", 1)
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    said = ["Hello", f"/load {file}", "/load nowhere", "/save", "word " * 40, "Hello", "/quit"]
    module = sys.modules["kvprune.cli.chat"]  # the attribute of that name is the command
    monkeypatch.setattr(module, "_lines", lambda interactive: iter(said))
    monkeypatch.setattr(module, "_is_terminal", lambda: True)
    monkeypatch.chdir(tmp_path)
    budget = second["bytes"] + first["bytes"]
    done = ran(place, "", *pruned, "--kv-budget", budget)
    assert "threshold (1.0, here" in done.stderr
    assert "there is no snapshot nowhere" in done.stderr
    assert "wrote chat.safetensors" in done.stderr
    assert f"of the {budget:,} that its budget allows" in done.stderr
    assert "/reset frees the cache" in done.stderr
    # nothing of what was refused is between the two messages
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["answer"] for line in lines] == [first["answer"], second["answer"]]
    assert [line["seen"] for line in lines] == [first["seen"], second["seen"]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resume", "nowhere"], "there is no file nowhere"),
        (["--kv", "int4"], "--kv int4 is unknown; use int8"),
        (["--kv-budget", "lots"], "--kv-budget 'lots' must be a size"),
        (["--kv", "int8"], "the model is dense: there is no kv"),
        (["--kv-budget", "1MB"], "the model is dense: there is no budget"),
    ],
)
def test_errors_of_storage(place, options, says):
    done = run(place, "hi", *options)
    assert isinstance(done.exception, PruneError)
    assert says in str(done.exception)
