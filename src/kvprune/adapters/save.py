"""Write an attached model's interaction weights, configuration and LoRA into a folder."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save as to_bytes
from torch import Tensor

from kvprune.adapters import lora
from kvprune.adapters.saved_file import FILE, FORMAT
from kvprune.config import to_dict
from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically
from kvprune.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvprune.integration.handle import Pruned


def save(pruned: Pruned, path: str | Path, state: dict[str, Tensor] | None = None) -> Path:
    """Write FILE, and LoRA if the model has it, into the folder `path`, created if necessary.

    `state`: the model's gathered state dict, if its own parameters are shards.
    """
    if pruned.merged:
        raise PruneError(
            "LoRA was merged into the weights, which an adapter does not contain; write all of the "
            "model with pruned.model.save_pretrained(folder), or load it with merge=False"
        )
    return _write(pruned, Path(path), state)


def save_pretrained(pruned: Pruned, *args: Any, **kwargs: Any) -> None:
    """As the model's own `save_pretrained`, so that `kvprune.load(folder)` gives the same model.

    transformers writes LoRA alone if there is one, else all weights. A state dict without the
    interaction weights leaves the rest to its caller, as our trainer does.
    """
    model = pruned.model
    own = type(model).save_pretrained
    given = inspect.signature(own).bind(model, *args, **kwargs).arguments
    if given.get("push_to_hub"):
        raise PruneError(
            "save_pretrained(push_to_hub=True) would upload the model without its pruning; call "
            "model.push_to_hub(name), which uploads both"
        )
    own(model, *args, **kwargs)
    state = given.get("state_dict")
    if given.get("is_main_process", True) and (state is None or _is_whole(pruned, state)):
        # last, so that a folder with this file is complete
        _write(pruned, Path(given["save_directory"]), state)


def _is_whole(pruned: Pruned, state: dict[str, Tensor]) -> bool:
    """Whether a state dict of the model holds the interaction weights, too."""
    prefixes = [f"{layer.name}.interaction." for layer in pruned.layers if layer.interaction]
    return all(any(name.startswith(prefix) for name in state) for prefix in prefixes)


def _write(pruned: Pruned, folder: Path, state: dict[str, Tensor] | None) -> Path:
    tensors = interaction_tensors(pruned, state)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise PruneError(
                f"{name} holds NaN or Inf: not saved; go back to an earlier checkpoint"
            )
    about = {
        "format": FORMAT,
        "version": __version__,
        "config": to_dict(pruned.config),
        "base": describe_base(pruned.model),
        "layers": [layer.name for layer in pruned.layers],
    }
    # weights and configuration are one file, so that they cannot be separated
    data = to_bytes(tensors, metadata={"kvprune": json.dumps(about, sort_keys=True)})
    folder.mkdir(parents=True, exist_ok=True)
    if lora.has_lora(pruned.model):
        lora.save(pruned.model, folder, state)
    write_atomically(folder / FILE, data)
    return folder / FILE


def describe_base(model: PreTrainedModel) -> dict[str, Any]:
    """What a saved file records about the model that it belongs to."""
    config = model.config.get_text_config()
    return {
        "name": model.config.name_or_path or type(model).__name__,
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
    }


def interaction_tensors(
    pruned: Pruned, state: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The interaction weights by the names that they have in a saved file."""
    if state is not None:
        state = {name.replace(".interaction.", "."): t for name, t in state.items()}
    return {
        # β has another shape while FSDP shards the model
        name: (tensor if state is None else state[name]).detach().cpu().contiguous().squeeze()
        for layer in pruned.layers
        if layer.interaction is not None
        for name, tensor in layer.interaction.state_dict(prefix=f"{layer.name}.").items()
    }
