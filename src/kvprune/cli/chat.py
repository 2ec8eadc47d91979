"""kvprune chat: talk to a model with a pruned cache."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli import generation
from kvprune.cli.names import AdapterName, ModelName
from kvprune.cli.starting import starting
from kvprune.errors import PruneError

if TYPE_CHECKING:
    from kvprune.chat import Chat, Status

TITLE = "What this chat forgot"
HELP = """\
/explain [FILE]  write a page of what was dropped so far (explain.html)
/system TEXT     set the system message; without TEXT: remove it
/reset           start a new conversation
/help            this list
/quit            leave (also Ctrl-D)
Ctrl-C stops an answer. A message that begins with a slash: put a space before it."""


def chat(
    model: ModelName,
    adapter: AdapterName = None,
    system: generation.System = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.", min=1)] = 512,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = 0.9,
    seed: generation.Seed = 0,
    threshold: generation.Threshold = None,
    protect_first: generation.ProtectFirst = None,
    protect_recent: generation.ProtectRecent = None,
    template: generation.TemplateFile = None,
    dtype: generation.Dtype = "auto",
    device: generation.Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Talk to a model; each answer is followed by the size of its cache.

    Without a terminal, messages are read from stdin, one per line.
    """
    with starting() as tell:
        loaded = generation.load(
            model, adapter, dtype, device, template, tell,
            threshold=threshold, protect_first=protect_first, protect_recent=protect_recent,
        )  # fmt: skip

        from kvprune.chat import Chat
        from kvprune.integration.handle import Pruned

        conversation = Chat(
            loaded.model, loaded.tokenizer, system=system, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, seed=seed, tell=_print_dim,
        )  # fmt: skip
    interactive = sys.stdin.isatty()
    if interactive:
        method = loaded.model.config.method if isinstance(loaded.model, Pruned) else "dense"
        _print_dim(f"{model}, {method}; /help lists the commands, Ctrl-D leaves")
    for line in _lines(interactive):
        try:
            if line.startswith("/"):
                if not _command(conversation, line):
                    break
            elif line.strip():
                _answer(conversation, line, as_json)
        except PruneError as error:
            if not interactive:
                raise
            _print_dim(str(error))


def _answer(conversation: Chat, text: str, as_json: bool) -> None:
    pieces = []
    with _stopping(conversation):
        for piece in conversation.say(text.strip()):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    status = conversation.status()
    if as_json:
        print(json.dumps({"answer": "".join(pieces), **asdict(status)}), flush=True)
        return
    print(flush=True)
    _print_dim(_line(status))


def _line(status: Status) -> str:
    share = status.kept / status.seen if status.seen else 1.0
    ended = {"length": "; cut at its limit", "stopped": "; stopped"}.get(status.ended, "")
    return (
        f"{status.seen:,} tokens seen, {status.kept:,.0f} kept ({share:.0%}); "
        f"{generation.sizes(status.bytes, status.dense_bytes)}; "
        f"{status.tokens_per_second:.1f} tokens/s{ended}"
    )


def _command(conversation: Chat, line: str) -> bool:
    """Run a slash command; False: leave."""
    name, _, rest = line[1:].strip().partition(" ")
    rest = rest.strip()
    if name in ("quit", "exit"):
        return False
    if name == "help":
        _print_dim(HELP)
    elif name == "reset":
        conversation.reset()
        _print_dim("a new conversation")
    elif name == "system":
        conversation.system = rest
        _print_dim(f"system: {rest}" if rest else "no system message")
    elif name == "explain":
        file = _page_file(rest or "explain.html")
        trace = conversation.trace()
        try:
            _print_dim(f"wrote {trace.to_html(file, TITLE)}: {trace}")
        except OSError as error:
            raise PruneError(f"cannot write {file}: {error}; give another file") from error
    else:
        raise PruneError(f"/{name} is no command; /help lists them")
    return True


def _page_file(path: str) -> Path:
    """The file of the page: in a folder that is there, and none but an earlier page in its place.

    What follows a slash is easily a typing error, or half a sentence.
    """
    file = Path(path).expanduser()
    if not file.parent.is_dir():
        raise PruneError(
            f"there is no folder {file.parent}; create it, or give a file in one that exists"
        )
    if file.is_dir():
        raise PruneError(f"{file} is a folder; give the name of a file in it")
    if file.exists() and f"<title>{TITLE}</title>".encode() not in file.read_bytes()[:10_000]:
        raise PruneError(f"{file} exists and is no page of a chat; give another file, or remove it")
    return file


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    import readline  # noqa: F401  editing and history of input()

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            _print_dim("\nCtrl-D leaves")
        except EOFError:
            print()
            return


@contextmanager
def _stopping(conversation: Chat) -> Iterator[None]:
    """Ctrl-C stops the answer between two tokens: half a step would leave a broken cache."""

    def stop(*_: Any) -> None:
        conversation.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _print_dim(text: str) -> None:
    """Print to stderr, dim in a terminal."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(text, style="dim"))
