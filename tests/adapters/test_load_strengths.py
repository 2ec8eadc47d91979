"""Several adapters of one base by name, against each loaded by itself."""

import json
import shutil

import pytest
import torch

import kvprune
import model_folders
from helpers import random_ids, randomise_lora, uneven_gates
from kvprune import PruneError, PruningConfig
from kvprune.adapters import lora
from kvprune.adapters.pretrained import load_base
from kvprune.adapters.strengths import load_strengths
from kvprune.integration.flat import Part, flat_forward


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, two adapters of it with LoRA of different ranks, and what else there may be."""
    folder = model_folders.save(tmp_path_factory.mktemp("models"))
    for number in range(2):
        model = load_base(folder / "model")
        lora.add(model, rank=2 + number, alpha=6)
        randomise_lora(model)
        pruned = kvprune.attach(model, PruningConfig(rank=8, threshold=0.1 * number))
        uneven_gates(pruned, number)
        pruned.save(folder / f"lora{number}")
    return folder


@torch.no_grad()
def test_each_is_as_loaded_by_itself(folder):
    names = [str(folder / name) for name in ("lora0", "lora1", "adapter")]
    loaded = load_strengths(names)
    ids = random_ids(1, 40, vocab=257)
    parts, want = [], []
    for name, pruned in loaded.items():
        own = kvprune.load(name)
        assert pruned.config == own.config
        want.append(own.model(ids).logits[0, -1])
        torch.testing.assert_close(pruned.model(ids).logits[0, -1], want[-1])
        parts.append(Part(kvprune.PrunedCache(pruned), ids, pruned.working, pruned))
    # and side by side in one pass of the first
    host = loaded[names[0]]
    got = flat_forward(host, parts, torch.tensor([39, 79, 119]))
    torch.testing.assert_close(got, torch.stack(want))
    assert len({tuple(row.tolist()) for row in want}) == 3
    with pytest.raises(PruneError, match="LoRA was merged"):
        host.save(folder / "again")


def test_the_base_is_in_memory_once(folder):
    seen = []
    names = [str(folder / name) for name in ("model", "lora0")]
    loaded = load_strengths(names, prepare=seen.append)
    (base,) = seen
    assert loaded[names[0]].model is base
    assert not loaded[names[0]].working.prunes
    weights = [dict(pruned.model.named_parameters()) for pruned in loaded.values()]
    shared = [name for name in weights[0] if weights[1].get(name) is weights[0][name]]
    assert len(shared) == len(list(load_base(names[0]).parameters()))


def test_what_shares_no_base_is_refused(folder, tmp_path):
    model_folders.save(tmp_path)
    lora0, whole = str(folder / "lora0"), str(folder / "whole")
    for other, words in (
        (str(tmp_path / "adapter"), "different bases share no weights: start a server for each"),
        (whole, "different bases"),
        (lora0, "is named twice"),
    ):
        with pytest.raises(PruneError, match=words):
            load_strengths([lora0, other])


def test_other_kinds_of_lora_are_refused(folder, tmp_path):
    other = tmp_path / "dora"
    shutil.copytree(folder / "lora0", other)
    about = json.loads((other / lora.CONFIG).read_text())
    (other / lora.CONFIG).write_text(json.dumps(about | {"use_rslora": True}))
    with pytest.raises(PruneError, match="is not a plain one"):
        load_strengths([str(folder / "lora1"), str(other)])


def test_another_chat_template_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder / "lora0", other)
    tokenizer = model_folders.byte_tokenizer()
    tokenizer.save_pretrained(other)
    load_strengths([str(folder / "lora1"), str(other)])
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(other)
    with pytest.raises(PruneError, match="different tokenizers or chat templates"):
        load_strengths([str(folder / "lora1"), str(other)])
