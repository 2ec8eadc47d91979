"""Runs as files: what they say, what goes before it, what is refused."""

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
LEAST = {"model": "tiny", "data": {"sources": ["book.txt"]}}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_is_one(name):
    made = recipe.read_recipe(RECIPES / f"{name}.yaml")
    assert isinstance(made.train.method, PruningConfig)
    if name in PAPER:
        model, steps, batch, rate = PAPER[name]
        assert made.model == model
        assert made.train.steps == steps
        assert made.train.batch * made.train.accumulation == batch
        assert made.train.base_lr == made.train.interaction_lr == rate
        assert made.data.length == 1024
        assert made.train.method.rank == 64
        assert (made.train.alpha_start, made.train.alpha_end) == (1, 8)


def test_the_paper_has_four():
    assert {path.stem for path in RECIPES.glob("gpt2-*.yaml")} == set(PAPER)


def test_written_and_read_again(tmp_path):
    made = recipe.make_recipe(
        {
            "model": "gpt2",
            "data": {"sources": ["a", "b"], "length": 128},
            "method": {"method": "local", "window": 8},
            "train": {"steps": 7, "base_lr": 3e-5},
        }
    )
    assert made.train.method == LocalConfig(8)
    (tmp_path / "again.yaml").write_text(recipe.to_yaml(made))
    assert recipe.read_recipe(tmp_path / "again.yaml") == made


def test_what_is_said_goes_before_the_file(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: tiny\n"
        "data: {sources: [book.txt], length: 64}\n"
        "method: {method: pruning, rank: 16, beta: 1.5}\n"
        "train: {steps: 10, base_lr: 1e-5, gamma: 2e-1}\n"
    )
    made = recipe.read_recipe(file, {"train": {"steps": 20}, "method": {"rank": 8}})
    assert made.train.steps == 20
    # YAML 1.1 would read 1e-5 as a word
    assert (made.train.base_lr, made.train.gamma) == (1e-5, 0.2)
    assert made.train.method == PruningConfig(rank=8, beta=1.5)
    assert made.data.length == 64
    other = recipe.read_recipe(file, {"method": {"method": "local", "window": 32}})
    assert other.train.method == LocalConfig(32)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data": LEAST["data"]}, "no model to train; pass a folder"),
        ({"model": "tiny"}, "no text to train on; pass a file"),
        ({**LEAST, "modle": "x"}, "modle: no such part of a recipe; it has"),
        ({**LEAST, "data": {"sources": ["a"], "lenght": 3}}, "lenght: no such data setting"),
        ({**LEAST, "train": {"step": 3}}, "step: no such training setting"),
        ({**LEAST, "train": {"steps": "many"}}, "steps='many' must be a whole number"),
        ({**LEAST, "method": {"method": "local"}}, "method local needs --window"),
        ({**LEAST, "method": {"method": "magic"}}, "magic"),
        ({**LEAST, "train": [1]}, "train must contain settings, not \\[1\\]"),
    ],
)
def test_what_is_wrong_is_named(given, says):
    with pytest.raises(PruneError, match=says):
        recipe.make_recipe(given)


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(PruneError, match=r"cannot read the recipe .*none\.yaml: No such file"):
        recipe.read_yaml(tmp_path / "none.yaml")
    for name, text, says in (
        ("broken", "model: [", "is not YAML"),
        ("binary", "\udcff\udcfe", "is not YAML"),
        ("list", "- 1\n", "contains no settings"),
    ):
        file = tmp_path / name
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(PruneError, match=says):
            recipe.read_yaml(file)
