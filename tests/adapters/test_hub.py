"""The hub: asked once whether it is there, and never waited for when it is not."""

import subprocess
import sys
import threading

import pytest
import torch

import fake_hub
import kvprune
import model_folders
from kvprune import PruneError
from kvprune.adapters import hub
from kvprune.adapters.load import load_with_tokenizer
from kvprune.adapters.pretrained import check_present, load_base, load_tokenizer
from kvprune.adapters.resolve import Location, check_adapter, resolve
from kvprune.evaluate.cost.shape import read_shape


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return model_folders.save(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def ask(monkeypatch):
    """The client of huggingface_hub, replaced: set what a request to the hub does."""

    class Client:
        asked = 0

        def head(self, url, timeout):
            self.asked += 1
            return self.answer()

    client = Client()
    monkeypatch.setattr("huggingface_hub.get_session", lambda: client)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_answer", None)
    return client


def test_the_hub_is_asked_once(ask, monkeypatch):
    ask.answer = lambda: object()
    assert hub.unreachable() == hub.unreachable() == ""
    assert ask.asked == 1
    # but not for ever: the network may come back
    monkeypatch.setattr(hub, "REMEMBERED", 0.0)
    assert hub.unreachable() == ""
    assert ask.asked == 2


def test_the_reason_is_reported(ask):
    def refuse():
        raise ConnectionError("Name or service not known")

    ask.answer = refuse
    assert hub.unreachable() == "Name or service not known"


def test_an_answer_that_never_comes_is_not_waited_for(ask, monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.05)
    end = threading.Event()
    ask.answer = end.wait
    assert "no answer" in hub.unreachable()
    end.set()


def test_offline_mode_asks_nobody(ask, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.unreachable() == "HF_HUB_OFFLINE is set"
    assert ask.asked == 0


@pytest.mark.parametrize("name", ["gpt2", "someone/model"])
@pytest.mark.parametrize(
    "function",
    [kvprune.load, load_base, load_tokenizer, load_with_tokenizer, read_shape, check_present],
)
def test_without_the_hub_a_name_on_it_fails_at_once(monkeypatch, tmp_path, function, name):
    fake_hub.away(monkeypatch, tmp_path)
    if (function, name) == (read_shape, "gpt2"):
        assert read_shape(name).parameters == 124_439_808  # known without the hub
        return
    # huggingface_hub sleeps between its attempts
    monkeypatch.setattr("time.sleep", None)
    with pytest.raises(PruneError, match=rf"'{name}': it is no folder.*cannot be reached \(no net"):
        function(name)


def test_without_the_hub_its_adapters_fail_at_once(monkeypatch, tmp_path):
    fake_hub.away(monkeypatch, tmp_path)
    for call in (lambda: kvprune.load("tiny", "someone/adapter"),
                 lambda: check_adapter("someone/adapter")):  # fmt: skip
        with pytest.raises(PruneError, match="someone/adapter cannot be attached: it is no"):
            call()


def test_the_hubs_name_of_a_known_base_names_our_own(monkeypatch, tmp_path):
    fake_hub.away(monkeypatch, tmp_path)
    with pytest.raises(PruneError, match="smollm2-135m-dense is the same model"):
        load_base("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_without_the_hub_a_copy_of_it_is_read(monkeypatch, tmp_path, folders):
    fake_hub.away(monkeypatch, tmp_path)
    fake_hub.keep(tmp_path, "someone/model", folders / "model")
    full = fake_hub.keep(tmp_path, "someone/forgetful", folders / "whole")
    check_present("someone/model")
    model = load_base("someone/model")
    # not the folder of the cache: an adapter that is trained now names its base
    assert model.config.name_or_path == "someone/model"
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, load_base(folders / "model")(ids).logits)
    assert load_tokenizer("someone/model").eos_token == "<end>"
    assert read_shape("someone/model").name == "someone/model"
    assert resolve("someone/forgetful") == (str(full), str(full), str(full), str(folders / "model"))
    pruned = kvprune.load("someone/forgetful")
    with torch.no_grad():
        want = kvprune.load(folders / "whole").model(ids).logits
        assert torch.equal(pruned.model(ids).logits, want)


def test_what_training_published_is_pruned_under_its_name(monkeypatch, folders):
    """Not only by kvprune.load: the commands read the same name as the dense model."""
    fetched = fake_hub.publish(monkeypatch, {"me/full": folders / "whole",
                                             "me/adapter": folders / "adapter"})  # fmt: skip
    assert resolve("me/full").adapter == str(folders / "whole")
    loaded = load_with_tokenizer("me/adapter")
    assert isinstance(loaded.model, kvprune.Pruned)
    assert "me/adapter kvprune.safetensors" in fetched
    assert kvprune.load(folders / "model", "me/adapter").config == loaded.model.config


def test_a_dense_repository_is_not_downloaded_to_find_that_out(monkeypatch, folders):
    fetched = fake_hub.publish(monkeypatch, {"me/dense": folders / "model"})
    assert resolve("me/dense") == Location("me/dense", "me/dense")
    with pytest.raises(PruneError, match=r"me/dense has no adapter \(no kvprune.safetensors\)"):
        kvprune.load("me/dense")
    for name in ("me/dense", "me/nothing"):
        with pytest.raises(PruneError, match=f"{name} cannot be attached: .* on the hub"):
            kvprune.load(folders / "model", name)
    assert fetched == []


def test_a_hub_that_fails_halfway_does_not_make_a_model_dense(monkeypatch, folders):
    fake_hub.publish(monkeypatch, {"me/full": folders / "whole"})

    def fail(name, file):
        raise OSError("500: server error")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(PruneError, match="cannot read me/full from the hub: 500"):
        resolve("me/full")


def test_a_base_that_moved_is_named(monkeypatch, tmp_path, folders):
    """An adapter records a folder, which another machine does not have."""
    model = load_base(folders / "model")
    model.config.name_or_path = "/home/somebody/base"
    kvprune.attach(model, kvprune.PruningConfig(rank=8)).save(tmp_path)
    with pytest.raises(PruneError, match="'/home/somebody/base': this folder does not exist"):
        kvprune.load(tmp_path)


def test_a_name_is_checked_without_torch():
    """It takes seconds to import, and an unknown name must not."""
    code = (
        "import sys; from kvprune.cli import app\n"
        "for args in (['generate', 'tinny', 'x'], ['chat', 'tiny', '--adapter', 'nowhere']):\n"
        "    try: app(args)\n"
        "    except ValueError as error: print(error)\n"
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second, heavy = done.stdout.splitlines()
    assert "did you mean tiny" in first
    assert "nowhere does not exist" in second
    assert heavy == "False"
