"""kvprune chat: talk with a model whose cache forgets."""

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

from kvprune.errors import PruneError
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.chat import Chat, Status

HELP = """\
/explain [FILE]  write the page of what was forgotten so far (explain.html)
/system TEXT     what the model is told about its part; none: take it away
/reset           a new conversation
/help            this
/quit            leave (Ctrl-D does it, too)
Ctrl-C stops an answer. A message that begins with a slash: put a space before it."""


def chat(
    model: Annotated[str, typer.Argument(help="A folder, or a name: hub or kvprune models.")],
    adapter: Annotated[str | None, typer.Option(help="What Pruned.save wrote, or dense.")] = None,
    system: Annotated[str, typer.Option(help="What the model is told about its part.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Of one answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest.", min=0, max=1)] = 0.9,
    seed: Annotated[int, typer.Option(help="Of drawing.")] = 0,
    threshold: Annotated[
        float | None, typer.Option(help="Higher prunes more.", show_default="as it was trained")
    ] = None,
    protect_first: Annotated[
        int | None, typer.Option(help="So many first tokens are never dropped.", min=0)
    ] = None,
    protect_recent: Annotated[
        int | None, typer.Option(help="So many last tokens are not dropped yet.", min=0)
    ] = None,
    template: Annotated[
        Path | None, typer.Option(help="A Jinja file, for a model without a chat template.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...", show_default="cuda if there is one")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an answer.")] = False,
) -> None:
    """Talk with a model; what its cache still holds is said after each answer.

    Without a terminal, one message a line is read from stdin.
    """
    rules = {"threshold": threshold, "protect_first": protect_first,
             "protect_recent": protect_recent}  # fmt: skip
    rules = {name: value for name, value in rules.items() if value is not None}

    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.chat import Chat
    from kvprune.integration.handle import Pruned

    quiet()
    loaded = load_with_tokenizer(model, adapter, dtype, device, merge=True)
    if template is not None:
        loaded.tokenizer.chat_template = _read(template)
    if rules:
        if not isinstance(loaded.model, Pruned):
            raise PruneError(f"{model} is dense: there is no {next(iter(rules))} to set")
        loaded.model.adjust(**rules)
    talk = Chat(
        loaded.model, loaded.tokenizer, system=system, max_new_tokens=max_new_tokens,
        temperature=temperature, top_p=top_p, seed=seed, tell=_tell,
    )  # fmt: skip
    people = sys.stdin.isatty()
    if people:
        method = loaded.model.config.method if isinstance(loaded.model, Pruned) else "dense"
        _tell(f"{model}, {method}; /help lists the commands, Ctrl-D leaves")
    for line in _lines(people):
        try:
            if line.startswith("/"):
                if not _command(talk, line):
                    break
            elif line.strip():
                _answer(talk, line, as_json)
        except PruneError as error:
            if not people:
                raise
            _tell(str(error))


def _answer(talk: Chat, text: str, as_json: bool) -> None:
    pieces = []
    with _stopping(talk):
        for piece in talk.say(text.strip()):
            pieces.append(piece)
            if not as_json:
                print(piece, end="", flush=True)
    status = talk.status()
    if as_json:
        print(json.dumps({"answer": "".join(pieces), **asdict(status)}), flush=True)
        return
    print(flush=True)
    _tell(_line(status))


def _line(status: Status) -> str:
    share = status.kept / status.seen if status.seen else 1.0
    ended = {"length": "; cut at its longest", "stopped": "; stopped"}.get(status.ended, "")
    return (
        f"{status.seen:,} tokens seen, {status.kept:,.0f} kept ({share:.0%}); "
        f"cache {status.bytes / 2**20:.2f} MiB, dense {status.dense_bytes / 2**20:.2f} MiB; "
        f"{status.tokens_per_second:.1f} tokens/s{ended}"
    )


def _command(talk: Chat, line: str) -> bool:
    """Carry it out; False: leave."""
    name, _, rest = line[1:].strip().partition(" ")
    rest = rest.strip()
    if name in ("quit", "exit"):
        return False
    if name == "help":
        _tell(HELP)
    elif name == "reset":
        talk.reset()
        _tell("a new conversation")
    elif name == "system":
        talk.system = rest
        _tell(f"system: {rest}" if rest else "no system message")
    elif name == "explain":
        made = talk.trace()
        _tell(f"wrote {made.to_html(rest or 'explain.html', 'What this chat forgot')}: {made}")
    else:
        raise PruneError(f"/{name} is no command; /help lists them")
    return True


def _lines(people: bool) -> Iterator[str]:
    if not people:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    import readline  # noqa: F401  editing and history of input()

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            _tell("\nCtrl-D leaves")
        except EOFError:
            print()
            return


@contextmanager
def _stopping(talk: Chat) -> Iterator[None]:
    """Ctrl-C stops the answer between two tokens: half a step would leave a broken cache."""

    def stop(*_: Any) -> None:
        talk.stop()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(text: str) -> None:
    """On stderr, dim where people read it."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(text, style="dim"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read the template {file}: {error}") from error
