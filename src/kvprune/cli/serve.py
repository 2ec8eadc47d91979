"""kvprune serve: OpenAI's API over a model with a pruned cache."""

from __future__ import annotations

import importlib.util
import ipaddress
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvprune.adapters.ready import load_served, served_name
from kvprune.cli import generation
from kvprune.cli.names import AdapterName, ModelNames
from kvprune.cli.replicas import Cpus, Replicas, check_ray, ray_options, serve_replicas
from kvprune.cli.starting import starting
from kvprune.errors import PruneError
from kvprune.utils.parse import in_bytes

if TYPE_CHECKING:
    from kvprune.serve.scheduler import Admission

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
ADMISSION = ("forecast", "worst", "optimistic")
LOG_LEVELS = ("debug", "info", "warning", "error")


def _check_admission(name: str) -> str:
    if name not in ADMISSION:
        raise PruneError(f"--admission {name} is unknown; use one of {', '.join(ADMISSION)}")
    return name


def _check_log_level(name: str) -> str:
    if name not in LOG_LEVELS:
        raise PruneError(f"--log-level {name} is unknown; use one of {', '.join(LOG_LEVELS)}")
    return name


def _check_prefix_budget(size: str | None) -> str | None:
    if size is not None:
        in_bytes(size, "--prefix-budget")
    return size


def _check_snapshot_limit(size: str) -> str:
    in_bytes(size, "--snapshot-limit")
    return size


def _check_keys(keys: list[str] | None) -> list[str]:
    if any(not key.strip() or not key.isascii() for key in keys or []):
        raise PruneError("an --api-key is empty or not ASCII; give at least one character")
    return keys or []


def serve(
    model: ModelNames,
    adapter: AdapterName = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must send; several may be given. Others on this machine can "
            "read a command line, but not its environment.",
            envvar="KVPRUNE_API_KEY",
            metavar="KEY",
            callback=_check_keys,
        ),
    ] = None,
    threshold: generation.Threshold = None,
    protect_recent: generation.ProtectRecent = None,
    template: generation.TemplateFile = None,
    kv: generation.Kv = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            help="The most bytes that the caches of all requests may take, such as 2GB.",
            metavar="SIZE",
            show_default="40 % of the free memory",
            callback=generation._check_budget,
        ),
    ] = None,
    prefix_budget: Annotated[
        str | None,
        typer.Option(
            help="The most bytes that kept prefixes may take.",
            metavar="SIZE",
            show_default="a quarter of the other",
            callback=_check_prefix_budget,
        ),
    ] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(
            help="Keep prefixes here, too: a folder, or a URL such as s3://bucket/prefix. A later "
            "server, or another one, goes on from them. Encrypted if KVPRUNE_SNAPSHOT_KEY is set.",
            metavar="URL",
        ),
    ] = None,
    snapshot_limit: Annotated[
        str,
        typer.Option(help="The most bytes there.", metavar="SIZE", callback=_check_snapshot_limit),
    ] = "10GB",
    max_rows: Annotated[int, typer.Option(help="Answers generated at once.", min=1)] = 64,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more get status 429.", min=1)
    ] = 256,
    chunk: Annotated[
        int,
        typer.Option(
            help="The most tokens of one step while answers are written: more is faster in all, "
            "fewer delay them less.",
            min=1,
        ),
    ] = 1024,
    admission: Annotated[
        str,
        typer.Option(
            help="forecast: rows enter by what will survive of them; worst: as if nothing were "
            "dropped; optimistic: as soon as their next step fits.",
            callback=_check_admission,
        ),
    ] = "forecast",
    replicas: Replicas = None,
    cpus: Cpus = None,
    drain: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.", min=0)
    ] = 30.0,
    dtype: generation.Dtype = "auto",
    device: generation.Device = None,
    log_level: Annotated[
        str, typer.Option(help=", ".join(LOG_LEVELS) + ".", callback=_check_log_level)
    ] = "info",
) -> None:
    """Serve a model to OpenAI's clients: chats, completions, and a page at /."""
    _check_installed()

    from kvprune.serve.sockets import bind

    if replicas is None and cpus is not None:
        raise PruneError("--cpus is of each of several --replicas; say how many")
    if replicas is not None:
        check_ray()
    folder = None
    if snapshots is not None:
        from kvprune.serve.snapshot_folder import open_folder

        if "://" not in snapshots:
            snapshots = str(Path(snapshots).resolve())  # replicas work in another folder
        folder = open_folder(snapshots, snapshot_limit)
    bound = bind(host, port)
    keys, local = api_key or [], [host] if _is_loopback(host) else None
    real_port = bound.getsockname()[1]
    banner = partial(_print_banner, host=host, port=real_port, has_keys=bool(keys))
    if replicas is not None:
        bound.close()  # Ray will listen there
        options = ray_options(
            replicas, cpus, model=model[0], beside=tuple(model[1:]), adapter=adapter,
            name=served_name(model[0]), snapshots=snapshots, snapshot_limit=snapshot_limit,
            threshold=threshold, protect_recent=protect_recent,
            template=template and str(template.resolve()), kv=kv, kv_budget=kv_budget,
            prefix_budget=prefix_budget, max_rows=max_rows, max_waiting=max_waiting, chunk=chunk,
            admission=admission, dtype=dtype, device=device, drain=drain, api_keys=tuple(keys),
            local_names=local and tuple(local),
        )  # fmt: skip
        serve_replicas(options, host, real_port, log_level, banner)
        return
    with starting() as tell:
        served = load_served(
            model, adapter, dtype, device, template, tell, kv,
            threshold=threshold, protect_recent=protect_recent,
        )  # fmt: skip

        from kvprune.serve.api import create_app
        from kvprune.serve.engine import Engine
        from kvprune.serve.server import Server

        tell("starting the engine")
        engine = Engine(
            served, budget=kv_budget, kv=kv, max_rows=max_rows,
            chunk=chunk, prefix_budget=prefix_budget, admission=cast("Admission", admission),
            max_waiting=max_waiting, snapshots=folder,
        )  # fmt: skip
        alone = f"{engine.name}, {engine.pruned.config.method}"
        names = alone if len(served) == 1 else ", ".join(engine.models)
        what = [
            f"{names}; up to {engine.positions:,} tokens each",
            f"caches may take {engine.budget / 2**20:,.0f} MiB",
        ]
        chat = bool(engine.tokenizer.chat_template)
        server = Server(
            create_app(engine, keys=keys, local_names=local), drain, log_level,
            on_ready=lambda: banner(what, engine.name, chat),
        )  # fmt: skip
        engine.start()
    try:
        server.run(sockets=[bound])
    finally:
        engine.stop()
        bound.close()


def _check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PruneError(
            f"kvprune serve needs {', '.join(missing)}; install them with "
            f"pip install 'kvprune[serve]'"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _print_banner(
    what: list[str], name: str, chat: bool, *, host: str, port: int, has_keys: bool
) -> None:
    """What is served, where, and two ways to call it, on stderr."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    anywhere = host in ("0.0.0.0", "::")
    reached = "127.0.0.1" if anywhere else f"[{host}]" if ":" in host else host
    url = f"http://{reached}:{port}"
    lines = [*what, f"page {url}", f"API  {url}/v1"]
    text = Text("\n".join(lines))
    Console(stderr=True).print(Panel(text, title="kvprune serve", expand=False))
    plain = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for example in examples(url, name, has_keys, chat):
        plain.print(example + "\n")
    if not has_keys and not _is_loopback(host):
        print(
            "kvprune: anyone who can reach this machine can use the server; set KVPRUNE_API_KEY",
            file=sys.stderr,
        )


def examples(url: str, name: str, has_keys: bool, chat: bool) -> tuple[str, str]:
    """A line for the shell and one for Python, that can be pasted as they are."""
    header = ' -H "Authorization: Bearer $KVPRUNE_API_KEY"' if has_keys else ""
    if chat:
        path, kind = "chat/completions", "chat.completions"
        ask = '"messages": [{"role": "user", "content": "Why is the sky blue?"}]'
        python = "messages=[{'role': 'user', 'content': 'Why is the sky blue?'}]"
        text = "message.content"
    else:
        path, kind, text = "completions", "completions", "text"
        ask, python = '"prompt": "The sky is blue because"', "prompt='The sky is blue because'"
    curl = (
        f"curl {url}/v1/{path}{header} -H 'Content-Type: application/json' "
        f"-d '{{{ask}, \"max_tokens\": 50}}'"
    )
    key = "os.environ['KVPRUNE_API_KEY']" if has_keys else "'none'"
    imports = "import os, openai" if has_keys else "import openai"
    python = (
        f"python -c \"{imports}; client = openai.OpenAI(base_url='{url}/v1', api_key={key}); "
        f"print(client.{kind}.create(model='{name}', {python}, max_tokens=50)"
        f'.choices[0].{text})"'
    )
    return curl, python
