"""Recipes: reading, overriding, and what is refused."""

from pathlib import Path

import pytest

from kvprune import LocalConfig, PruneError, PruningConfig
from kvprune.train import recipe

RECIPES = Path(__file__).parents[2] / "recipes"
# appendix A of the paper: steps, batch, learning rate
PAPER = {
    "gpt2-small": ("gpt2", 25_000, 6, 1e-4),
    "gpt2-medium": ("gpt2-medium", 25_000, 6, 1e-4),
    "gpt2-large": ("gpt2-large", 25_000, 6, 5e-5),
    "gpt2-xl": ("gpt2-xl", 25_000, 6, 5e-5),
}
MINIMAL = {"model": "tiny", "data": {"sources": ["book.txt"]}}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_can_be_read(name):
    parsed = recipe.read_recipe(RECIPES / f"{name}.yaml")
    assert isinstance(parsed.train.method, PruningConfig)
    if name in PAPER:
        model, steps, batch, rate = PAPER[name]
        assert parsed.model == model
        assert parsed.train.steps == steps
        assert parsed.train.batch * parsed.train.accumulation == batch
        assert parsed.train.base_lr == parsed.train.interaction_lr == rate
        assert parsed.data.length == 1024
        assert parsed.train.method.rank == 64
        assert (parsed.train.alpha_start, parsed.train.alpha_end) == (1, 8)


def test_recipes_of_the_paper():
    assert {path.stem for path in RECIPES.glob("gpt2-*.yaml")} == set(PAPER)


def test_round_trip(tmp_path):
    parsed = recipe.make_recipe(
        {
            "model": "gpt2",
            "data": {"sources": ["a", "b"], "length": 128},
            "method": {"method": "local", "window": 8},
            "train": {"steps": 7, "base_lr": 3e-5},
        }
    )
    assert parsed.train.method == LocalConfig(8)
    (tmp_path / "again.yaml").write_text(recipe.to_yaml(parsed))
    assert recipe.read_recipe(tmp_path / "again.yaml") == parsed


def test_overrides_take_precedence(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: tiny\n"
        "data: {sources: [book.txt], length: 64}\n"
        "method: {method: pruning, rank: 16, beta: 1.5}\n"
        "train: {steps: 10, base_lr: 1e-5, gamma: 2e-1}\n"
    )
    parsed = recipe.read_recipe(file, {"train": {"steps": 20}, "method": {"rank": 8}})
    assert parsed.train.steps == 20
    # YAML 1.1 would read 1e-5 as a string
    assert (parsed.train.base_lr, parsed.train.gamma) == (1e-5, 0.2)
    assert parsed.train.method == PruningConfig(rank=8, beta=1.5)
    assert parsed.data.length == 64
    other = recipe.read_recipe(file, {"method": {"method": "local", "window": 32}})
    assert other.train.method == LocalConfig(32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": MINIMAL["data"]}, "no model to train; pass a folder"),
        ({"model": "tiny"}, "no text to train on; pass a file"),
        ({**MINIMAL, "modle": "x"}, "modle: no such part of a recipe; it has"),
        ({**MINIMAL, "data": {"sources": ["a"], "lenght": 3}}, "lenght: no such data setting"),
        ({**MINIMAL, "train": {"step": 3}}, "step: no such training setting"),
        ({**MINIMAL, "train": {"steps": "many"}}, "steps='many' must be a whole number"),
        ({**MINIMAL, "method": {"method": "local"}}, "method local needs --window"),
        ({**MINIMAL, "method": {"method": "magic"}}, "magic"),
        ({**MINIMAL, "train": [1]}, "train must contain settings, not \\[1\\]"),
    ],
)
def test_errors_name_the_setting(given, message):
    with pytest.raises(PruneError, match=message):
        recipe.make_recipe(given)


def test_invalid_files(tmp_path):
    with pytest.raises(PruneError, match=r"cannot read the recipe .*none\.yaml: No such file"):
        recipe.read_yaml(tmp_path / "none.yaml")
    for name, text, message in (
        ("broken", "model: [", "is not YAML"),
        ("binary", "\udcff\udcfe", "is not YAML"),
        ("list", "- 1\n", "contains no settings"),
    ):
        file = tmp_path / name
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(PruneError, match=message):
            recipe.read_yaml(file)
