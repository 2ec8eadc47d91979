"""Command-line options from the annotations of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

Command = Callable[..., Any]


def options_of(config: type[Any], leave_out: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """One option per field, None if not given; its help is the field's annotation."""
    hints = get_type_hints(config, include_extras=True)
    options = []
    for field in fields(config):
        if field.name in leave_out:
            continue
        hint, help_text = hints[field.name], ""
        if get_origin(hint) is Annotated:
            hint, help_text = get_args(hint)[:2]
        shown: Any = False if field.default in (MISSING, None) else str(field.default)
        option = typer.Option(help=help_text, show_default=shown)
        options.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[hint | None, option],
            )
        )
    return options


def with_options(*groups: list[inspect.Parameter]) -> Callable[[Command], Command]:
    """Replace the **options of a command by these options."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        extra = {p.name: p for group in groups for p in group}
        command.__signature__ = own.replace(parameters=[*kept, *extra.values()])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*kept, *extra.values()]}
        return command

    return decorate
