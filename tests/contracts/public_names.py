"""The public names of kvprune: exports, members of its classes, options of its commands.

`python tests/contracts/public_names.py` prints them; public_names.json is that output.
"""

import json
from typing import Any

import typer
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import Cache

import kvprune
from kvprune.cli import app
from kvprune.explain import Trace


def public_names() -> dict[str, Any]:
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    pruned = kvprune.attach(GPT2LMHeadModel(config))
    command = typer.main.get_command(app)
    return {
        "kvprune": sorted(kvprune.__all__),
        "Pruned": sorted(members(pruned)),
        "PrunedCache": sorted(members(kvprune.PrunedCache(pruned)) - set(dir(Cache))),
        "Trace": sorted(members(Trace) | set(Trace.__dataclass_fields__)),
        "commands": {"kvprune": flags(command), **options(command)},
    }


def members(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def options(group: Any, prefix: str = "") -> dict[str, list[str]]:
    """Arguments and options of every command, by its full name."""
    names: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            names |= options(command, f"{prefix}{name} ")
        else:
            names[prefix + name] = flags(command)
    return names


def flags(command: Any) -> list[str]:
    return sorted(flag for param in command.params for flag in param.opts + param.secondary_opts)


if __name__ == "__main__":
    print(json.dumps(public_names(), indent=1))
