"""What a command shows until its model is ready, and what it does to be ready sooner."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Tell: TypeAlias = Callable[[str], None]


@contextmanager
def starting() -> Iterator[Tell]:
    """Show what is told as one line with a spinner, in a terminal; gone at the end.

    Imports and weights create objects by the hundred thousand that live as long as the process;
    looking for cycles among them takes a quarter of the time of the imports.
    """
    from rich.console import Console

    console = Console(stderr=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        if console.is_terminal:
            with console.status("starting", spinner="line") as line:
                yield lambda text: line.update(f"{text} ...")
        else:
            yield lambda text: None
    finally:
        gc.freeze()
        if collects:
            gc.enable()
