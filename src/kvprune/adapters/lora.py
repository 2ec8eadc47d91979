"""LoRA together with pruning: in place, in peft's own file format, and fully removable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import PreTrainedModel

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

NAME = "default"  # peft's own name for the only adapter
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RENAMING = "_weight_conversions"  # where transformers keeps how the names in a file differ


def add(model: PreTrainedModel, rank: int, alpha: float) -> None:
    """Put a new LoRA on every linear layer except the output's; the base weights are frozen.

    Call it before attaching pruning, so that the interaction's own linear layers get none.
    """
    peft = _peft()
    if has_lora(model):
        raise PruneError(f"{type(model).__name__} has LoRA already; merge or remove it first")
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model.add_adapter(config, NAME)


def has_lora(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def rank(model: PreTrainedModel) -> int | None:
    """Rank of the model's LoRA; None without one."""
    if not has_lora(model):
        return None
    config: Any = model.peft_config[_active(model)]
    return int(config.r)


def is_saved_in(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def save(model: PreTrainedModel, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Write what `PeftModel.from_pretrained(base, folder)` reads without kvprune.

    `state`: the model's gathered state dict, if its own parameters are shards.
    """
    # embeddings are never trained here; to check whether they grew, peft would query the hub
    name = _active(model)
    adapter = _peft().get_peft_model_state_dict(
        model, state_dict=state, adapter_name=name, save_embedding_layers=False
    )
    tensors = {
        f"base_model.model.{key}": tensor.detach().cpu().contiguous()
        for key, tensor in adapter.items()
    }
    config = model.peft_config[name]
    config.base_model_name_or_path = model.config.name_or_path or None
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    write_atomically(folder / WEIGHTS, to_bytes(tensors, metadata={"format": "pt"}))


def add_saved(model: PreTrainedModel, folder: Path) -> None:
    """Put the LoRA in the folder on the model, with frozen weights; nothing else changes."""
    _peft()
    if has_lora(model):
        raise PruneError(f"{type(model).__name__} has LoRA already; merge or remove it first")
    before = [(p, p.requires_grad) for p in model.parameters()]
    training, renaming = model.training, vars(model).get(RENAMING)
    try:
        model.load_adapter(str(folder), NAME)
    except (ValueError, RuntimeError, OSError) as error:
        remove(model)
        raise PruneError(f"the LoRA in {folder} does not fit this model: {error}") from error
    finally:
        # peft freezes the base, and puts the model into eval mode
        for parameter, trainable in before:
            parameter.requires_grad_(trainable)
        model.train(training)
        # load_adapter leaves that of LoRA's file, by which the model's own weights would be saved
        # under names that no model reads
        vars(model).pop(RENAMING, None)
        if renaming is not None:
            setattr(model, RENAMING, renaming)


def fill(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of the LoRA in the folder into the one that the model has."""
    result = _peft().set_peft_model_state_dict(model, load_file(folder / WEIGHTS), _active(model))
    if result.unexpected_keys:
        raise PruneError(f"{folder / WEIGHTS} was saved for another model or another rank")


def enable(model: PreTrainedModel, on: bool) -> None:
    if has_lora(model):
        (model.enable_adapters if on else model.disable_adapters)()


def merge(model: PreTrainedModel) -> None:
    """Fold LoRA into the weights: as fast as the plain model, which is then lost."""
    for _, module in _wrapped(model):
        module.merge()
    remove(model)


def remove(model: PreTrainedModel) -> None:
    """Restore the plain linear layers."""
    for name, module in _wrapped(model):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())
    vars(model).pop("peft_config", None)
    model._hf_peft_config_loaded = False


def _active(model: PreTrainedModel) -> str:
    """The name of the adapter in use, which a user may have chosen."""
    name, *others = model.active_adapters()
    if others:
        raise PruneError(
            f"the adapters {name}, {', '.join(others)} are active at once; an adapter of kvprune "
            f"has one LoRA: select it with model.set_adapter({name!r})"
        )
    return str(name)


def _wrapped(model: PreTrainedModel) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise PruneError("LoRA needs the package peft: pip install 'kvprune[train]'") from error
    return peft
