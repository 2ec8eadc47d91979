"""Command-line options from the annotations of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

Command = Callable[..., Any]
# of a value in the help; short, since this column takes its width from the texts beside it
SYMBOLS = {int: "N", float: "X", str: "NAME"}
SWITCHES = "Switches"


def options_of(
    config: type[Any], leave_out: tuple[str, ...] = (), panels: Mapping[str, str] | None = None
) -> list[inspect.Parameter]:
    """One option per field, None if not given; its help is the field's annotation.

    `panels`: the panel of the help by field. Switches are in one of their own: their second name,
    --no-…, is a column, empty for all others.
    """
    hints = get_type_hints(config, include_extras=True)
    options = []
    for field in fields(config):
        if field.name in leave_out:
            continue
        hint, help_text = hints[field.name], ""
        if get_origin(hint) is Annotated:
            hint, help_text = get_args(hint)[:2]
        shown: Any = False if field.default in (MISSING, None) else str(field.default)
        kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
        panel = SWITCHES if bool in kinds else (panels or {}).get(field.name)
        symbol = SYMBOLS.get(kinds[0])
        if get_origin(kinds[0]) is Literal:
            symbol, help_text = SYMBOLS[str], f"{help_text} ({', '.join(get_args(kinds[0]))})"
        option = typer.Option(
            help=help_text, show_default=shown, metavar=symbol, rich_help_panel=panel
        )
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
