"""kvprune chat: talk to a model with a pruned cache."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.adapters.ready import load_ready
from kvprune.cli import generation
from kvprune.cli.names import AdapterName, ModelName
from kvprune.cli.starting import starting
from kvprune.errors import BudgetError, PruneError

if TYPE_CHECKING:
    from kvprune.chat import Chat, Status

TITLE = "What this chat forgot"
SAVED = "chat.safetensors"
HELP = """\
/explain [FILE]  write a page of what was dropped so far (explain.html)
/save [FILE]     save the conversation, to go on later (chat.safetensors)
/load [FILE]     go on with one that was saved
/system TEXT     set the system message; without TEXT: remove it
/reset           start a new conversation
/help            this list
/quit            leave (also Ctrl-D)
Ctrl-C stops an answer. A message that begins with a slash: put a space before it."""


def chat(
    context: typer.Context,
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
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with a conversation that /save wrote, with its settings, or those that "
            "are given here.",
            callback=generation.check_file,
        ),
    ] = None,
    kv: generation.Kv = None,
    kv_budget: generation.KvBudget = None,
    dtype: generation.Dtype = "auto",
    device: generation.Device = None,
    compile_model: generation.Compile = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer.")] = False,
) -> None:
    """Talk to a model; each answer is followed by the size of its cache.

    Without a terminal, messages are read from stdin, one per line.
    """
    with starting() as tell:
        loaded = load_ready(
            model, adapter, dtype, device, template, tell, kv,
            threshold=threshold, protect_first=protect_first, protect_recent=protect_recent,
        )  # fmt: skip

        from kvprune.chat import Chat
        from kvprune.integration.handle import Pruned

        if compiled := generation.can_compile(loaded, compile_model):
            tell("compiling the model")
        conversation = Chat(
            loaded.model, loaded.tokenizer, system=system, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, seed=seed, tell=_print_dim, kv=kv,
            budget=kv_budget, compiled=compiled,
        )  # fmt: skip
        if resume is not None:
            given = {name for name in context.params if _is_given(context, name)}
            _resume(conversation, resume, given)
    interactive = _is_terminal()
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
            hint = ": /reset frees the cache" if isinstance(error, BudgetError) else ""
            _print_dim(f"{error}{hint}")


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _resume(conversation: Chat, file: Path, given: set[str]) -> None:
    """Load a conversation; the settings that were given take precedence over its own."""
    started = conversation.system, conversation.max_new_tokens, conversation.sampler
    _load(conversation, file)
    system, max_new_tokens, sampler = started
    if "system" in given:
        conversation.system = system
    if "max_new_tokens" in given:
        conversation.max_new_tokens = max_new_tokens
    for name in given & {"temperature", "top_p"}:
        setattr(conversation.sampler, name, getattr(sampler, name))
    if "seed" in given:
        conversation.sampler.random = sampler.random


def _load(conversation: Chat, file: Path) -> None:
    conversation.load(file)
    turns = sum(message["role"] == "user" for message in conversation.messages)
    _print_dim(
        f"loaded {file}: {turns} turns, {conversation.seen:,} tokens seen, "
        f"{conversation.kept:,.0f} kept"
    )


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
        file = _new_file(rest or "explain.html", "page of a chat", _is_page)
        trace = conversation.trace()
        try:
            _print_dim(f"wrote {trace.to_html(file, TITLE)}: {trace}")
        except OSError as error:
            raise PruneError(f"cannot write {file}: {error}; give another file") from error
    elif name == "save":
        file = _new_file(rest or SAVED, "saved chat", _is_saved_chat)
        try:
            _print_dim(f"wrote {conversation.save(file)}; /load or --resume goes on from it")
        except OSError as error:
            raise PruneError(f"cannot write {file}: {error}; give another file") from error
    elif name == "load":
        _load(conversation, Path(rest or SAVED).expanduser())
    else:
        raise PruneError(f"/{name} is no command; /help lists them")
    return True


def _new_file(path: str, kind: str, is_own: Callable[[Path], bool]) -> Path:
    """A file to write: in a folder that is there, and none but an earlier one in its place.

    What follows a slash is easily a typing error, or half a sentence.
    """
    file = Path(path).expanduser()
    generation.check_folder(file)
    if file.exists() and not is_own(file):
        raise PruneError(f"{file} exists and is no {kind}; give another file, or remove it")
    return file


def _is_page(file: Path) -> bool:
    return f"<title>{TITLE}</title>".encode() in file.read_bytes()[:10_000]


def _is_saved_chat(file: Path) -> bool:
    from kvprune.chat.saved import is_saved

    return is_saved(file, "chat")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


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
