"""The arguments that name a model or an adapter, checked before torch is imported."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprune.errors import PruneError

HELP = "A folder, or a name: hub or kvprune models."


def check_model(name: str | None) -> str | None:
    """Refuse at once what cannot be loaded: imports alone take a command seconds."""
    if name is not None:
        from kvprune.adapters.pretrained import check_present

        check_present(name)
    return name


def check_models(names: list[str]) -> list[str]:
    """The same for several, which must be different."""
    for name in names:
        check_model(name)
    if twice := [name for name in names if names.count(name) > 1]:
        raise PruneError(f"{twice[0]} is named twice; name each model once")
    return names


def check_config(name: str) -> str:
    """The same where the configuration may be enough, which for GPT-2 is known."""
    from kvprune.evaluate.cost.shape import GPT2_SIZES

    if name not in GPT2_SIZES:
        check_model(name)
    return name


def check_adapter(name: str | None) -> str | None:
    """Refuse what cannot be attached."""
    if name is not None:
        from kvprune.adapters import resolve

        resolve.check_adapter(name)
    return name


ModelName = Annotated[str, typer.Argument(help=HELP, callback=check_model)]
ConfigName = Annotated[str, typer.Argument(help=HELP, callback=check_config)]
OptionalModelName = Annotated[str | None, typer.Argument(help=HELP, callback=check_model)]
AdapterName = Annotated[
    str | None, typer.Option(help="A folder that Pruned.save wrote.", callback=check_adapter)
]
ModelNames = Annotated[
    list[str],
    typer.Argument(
        help=f"{HELP} Several: adapters of one base, which clients choose from by name.",
        callback=check_models,
    ),
]
