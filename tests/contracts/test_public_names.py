"""No public name is lost, and a new one is listed in public_names.json on purpose."""

import json
from pathlib import Path

from contracts.public_names import public_names

LISTED = json.loads(Path(__file__).with_name("public_names.json").read_text())


def test_public_names_are_the_listed_ones():
    current = public_names()
    assert current["commands"].keys() == LISTED["commands"].keys()
    for group in ("kvprune", "Pruned", "PrunedCache", "Trace"):
        assert current[group] == LISTED[group], group
    for command, flags in LISTED["commands"].items():
        assert current["commands"][command] == flags, command
