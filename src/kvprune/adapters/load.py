"""Load a model by name and attach what was saved for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvprune.adapters import lora
from kvprune.adapters.fold import fold, lay_beside
from kvprune.adapters.pretrained import check_present, load_base, load_tokenizer
from kvprune.adapters.resolve import (
    Location,
    adapter_file,
    has_tokenizer,
    is_dense_name,
    resolve,
)
from kvprune.adapters.save import describe_base, interaction_tensors
from kvprune.adapters.saved_file import FILE, is_full_model, read_file
from kvprune.config import DenseConfig, from_dict
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned, attach


def load(
    model: PreTrainedModel | str | Path,
    path: str | Path | None = None,
    merge: bool = False,
    dtype: str = "auto",
) -> Pruned:
    """Attach what `Pruned.save` or the trainer wrote. Nothing is attached on an error.

        load(model, folder)         onto a model of the same shape
        load(name, folder)          onto a model from a folder or the hub
        load(folder)                a full model, or an adapter on the model it was trained on
        load("smollm2-135m")        an adapter of the package (see `kvprune models`)
        load("smollm2-135m-dense")  the base without pruning, attached as DenseConfig

    `folder` may also be a name on the hub; `pruned.tokenizer` is the tokenizer that belongs to it.
    LoRA stays separate from the weights, and detach removes it; merge=True folds it in, which is
    faster and cannot be undone. `dtype`: of a model given by name; auto is that of its file.
    """
    if isinstance(model, PreTrainedModel):
        if path is None:
            raise PruneError("load(model) lacks the folder to load from: load(model, folder)")
        return _attach_file(model, adapter_file(path), merge, dtype)
    location = resolve(model, path)
    if location.adapter is not None:
        return _load_adapter(location, merge, dtype)
    if is_dense_name(model):
        pruned = attach(load_base(location.base, dtype), DenseConfig())
        pruned.tokenizer_name = location.tokenizer
        return pruned
    check_present(str(model))
    raise PruneError(
        f"{model} has no adapter (no {FILE}); load one onto it with "
        f"kvprune.load({str(model)!r}, folder)"
    )


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer, and the names that they were loaded by."""

    name: str
    adapter: str | None
    model: PreTrainedModel | Pruned
    tokenizer: PreTrainedTokenizerBase
    # the dense model that a full fine-tuned one was trained from; None: its weights are the base's
    base: str | None

    @property
    def host(self) -> PreTrainedModel:
        return self.model.model if isinstance(self.model, Pruned) else self.model

    def attached(self) -> Pruned:
        """The model with our cache; a dense one gets it with DenseConfig."""
        return self.model if isinstance(self.model, Pruned) else attach(self.model, DenseConfig())


def load_with_tokenizer(
    name: str,
    adapter: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    merge: bool = False,
) -> Loaded:
    """The model as the commands use it, dense where the name has no adapter; on a GPU if any.

    `merge` folds LoRA into the weights: faster, but the dense model is then lost.
    """
    location = resolve(name, adapter)
    model: PreTrainedModel | Pruned
    if location.adapter is None:
        model = load_base(location.base, dtype)
    else:
        model = _load_adapter(location, merge, dtype)
    tokenizer = load_tokenizer(location.tokenizer)
    if isinstance(model, Pruned):
        model.tokenizer = tokenizer
    loaded = Loaded(name, adapter, model, tokenizer, location.fine_tuned_from)
    move(loaded.host, device)
    return loaded


def move(model: PreTrainedModel, device: str | None) -> None:
    """To the device, by default to the GPU if there is one."""
    try:
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PruneError(f"cannot put the model on {device!r}: {reason}; try cpu") from error


def fill(pruned: Pruned, path: str | Path) -> None:
    """Copy the saved weights into a model that is attached already."""
    file = adapter_file(path)
    _fill(pruned, read_file(file)[1], file)
    if lora.has_lora(pruned.model):
        lora.fill(pruned.model, file.parent)


def _load_adapter(location: Location, merge: bool, dtype: str) -> Pruned:
    assert location.adapter is not None
    file = adapter_file(location.adapter)
    elsewhere = Path(location.base).resolve() != file.parent.resolve()
    if is_full_model(file.parent) and elsewhere:
        raise PruneError(
            f"{location.adapter} holds a full fine-tuned model, so {location.base} is not needed; "
            f"load it with kvprune.load({str(location.adapter)!r})"
        )
    pruned = _attach_file(location.base, file, merge, dtype)
    pruned.tokenizer_name = location.tokenizer
    return pruned


def attach_beside(model: PreTrainedModel, path: str | Path) -> Pruned:
    """The same onto a model that shares its weights: its LoRA stays beside them."""
    file = adapter_file(path)
    if is_full_model(file.parent):
        raise PruneError(f"{path} holds a full fine-tuned model, which shares no weights")
    pruned = _attach_file(model, file, False, "auto", beside=True)
    # a file of it would lack the LoRA
    pruned.merged, pruned.has_base = True, False
    return pruned


def _attach_file(
    model: PreTrainedModel | str, file: Path, merge: bool, dtype: str, beside: bool = False
) -> Pruned:
    """Attach the saved file, and the LoRA in its folder, to a model or to a base by name."""
    about, tensors = read_file(file)
    config = from_dict(about["config"])
    if isinstance(model, str):
        model = load_base(model, dtype)
    saved_for, actual = about["base"], describe_base(model)
    for key in ("model_type", "hidden_size"):
        if saved_for[key] != actual[key]:
            raise PruneError(
                f"{file} was saved for {key} {saved_for[key]!r} ({saved_for['name']}), but this "
                f"model has {actual[key]!r}; load it into the model that it was trained on"
            )
    with_lora = lora.is_saved_in(file.parent)
    if with_lora and beside:
        lay_beside(model, file.parent)
        with_lora = False
    merged = with_lora and merge
    if merged and not lora.has_lora(model) and fold(model, file.parent):
        with_lora = False
    if with_lora:
        lora.add_saved(model, file.parent)
    try:
        if with_lora and merge:
            lora.merge(model)
        pruned = attach(model, config)
        try:
            _fill(pruned, tensors, file)
        except PruneError:
            pruned.detach()
            raise
    except PruneError:
        if with_lora and not merge:
            lora.remove(model)
        raise
    if with_lora and not merge:
        pruned.on_detach(lora.remove)
    pruned.merged, pruned.has_base = merged, not merged and not is_full_model(file.parent)
    pruned.name = _adapter_name(file)
    if has_tokenizer(file.parent):
        pruned.tokenizer_name = str(file.parent)
    return pruned


def _adapter_name(file: Path) -> str:
    """Its folder's name, which is that of the registry; of a hub snapshot, the repository's."""
    folder = file.parent.resolve()
    if folder.parent.name == "snapshots":  # models--owner--name/snapshots/commit
        return folder.parent.parent.name.split("--")[-1]
    return folder.name


def _fill(pruned: Pruned, tensors: dict[str, Tensor], file: Path) -> None:
    own = interaction_tensors(pruned)
    if different := sorted(set(own) ^ set(tensors)):
        raise PruneError(
            f"{file} holds {len(tensors)} tensors and this model needs {len(own)}; "
            f"the first that differs is {different[0]}: it was saved for another model"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise PruneError(
                f"{name} in {file} has shape {tuple(tensor.shape)}, but this model needs "
                f"{tuple(own[name].shape)}: it was saved for another model"
            )
        if not tensor.isfinite().all():
            raise PruneError(f"{name} in {file} holds NaN or Inf; save it again from good weights")
    for layer in pruned.layers:
        if layer.interaction is not None:
            with torch.no_grad():
                for name, tensor in layer.interaction.state_dict().items():
                    tensor.copy_(tensors[f"{layer.name}.{name}"])
