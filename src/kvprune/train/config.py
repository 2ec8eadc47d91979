"""All settings of a training run. The annotations are the documentation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from kvprune.config import Config, PruningConfig, check_alpha, from_dict, to_dict
from kvprune.errors import PruneError
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from transformers import TrainingArguments

Shape = Literal["cosine", "linear", "constant"]
Tune = Literal["all", "interaction", "lora"]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run. A baseline takes the same ones and ignores those of the gate."""

    method: Annotated[Config, "pruning, or a baseline: dense, local, strided"] = field(
        default_factory=PruningConfig
    )
    gamma: Annotated[float, "weight of the mean keep in the loss; more prunes more"] = 0.3
    target_sparsity: Annotated[
        float | None, "adapt γ, from gamma on, until this share of the evaluation text is dropped"
    ] = None
    alpha_start: Annotated[float, "α at the start; the paper's 1 needs a long run"] = 1.5
    alpha_end: Annotated[float, "α at the end"] = 8.0
    alpha_schedule: Annotated[
        Shape, "how α changes from start to end; constant: the end's value"
    ] = "cosine"
    alpha_share: Annotated[float, "share of the run in which α changes"] = 1.0
    interaction_lr: Annotated[float, "learning rate of the interaction weights"] = 1e-3
    spread: Annotated[
        bool, "scale interaction weights and their rate up where a layer's inputs are small"
    ] = True
    init_std: Annotated[
        float | None,
        "standard deviation of new interaction weights; by default 1/√width (authors' code: 0.02)",
    ] = None
    base_lr: Annotated[float, "learning rate of all other weights; LoRA needs a higher one"] = 5e-5
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"], "both rates over the run, after the warm-up"
    ] = "constant"
    average: Annotated[
        int, "evaluate and save the mean of the weights over about this many steps; 0: the last"
    ] = 0
    warmup: Annotated[int, "steps in which the learning rates rise from 0"] = 0
    tune: Annotated[
        Tune, "train all weights (the paper), the interaction only, or interaction and LoRA"
    ] = "all"
    lora_rank: Annotated[int, "rank of LoRA"] = 16
    lora_alpha: Annotated[float, "LoRA's own α: its update is scaled by lora_alpha / rank"] = 32.0
    distill: Annotated[
        float, "share of the KL to the dense model in the language loss; the rest is next-token"
    ] = 0.0
    teacher_cache: Annotated[
        str | None, "folder for what the dense model says, read again in later epochs and runs"
    ] = None
    steps: Annotated[int, "optimizer steps"] = 1000
    batch: Annotated[int, "rows per forward pass, on each device"] = 4
    accumulation: Annotated[int, "forward passes per step"] = 1
    dropout: Annotated[
        float | None, "dropout of the model's own layers; by default as in its config (GPT-2: 0.1)"
    ] = None
    max_grad_norm: Annotated[float, "clip the gradient norm to this; 0: no clipping"] = 1.0
    checkpointing: Annotated[bool, "gradient checkpointing: less memory, a third slower"] = False
    bf16: Annotated[bool, "bfloat16 autocast; votes and losses stay float32"] = False
    tf32: Annotated[bool, "float32 products in TF32, on GPUs that have it"] = False
    compile: Annotated[bool, "torch.compile the model"] = False
    log_every: Annotated[int, "steps between two logs"] = 10
    probe_every: Annotated[
        int, "steps between two measurements of hard sparsity, and updates of γ"
    ] = 10
    probe_rows: Annotated[int, "rows of the evaluation text that they use"] = 8
    eval_every: Annotated[int, "steps between two evaluations"] = 100
    save_every: Annotated[int, "steps between two checkpoints"] = 100
    keep_checkpoints: Annotated[int, "how many checkpoints to keep on disk"] = 2
    seed: Annotated[int, "random seed of new weights, data order and dropout"] = 0

    def __post_init__(self) -> None:
        if not getattr(self.method, "trainable", False):
            name = getattr(self.method, "method", self.method)
            raise PruneError(
                f"method {name!r} is not trained; choose pruning or a trained baseline"
            )
        for name in ("steps", "batch", "accumulation", "lora_rank", "log_every", "probe_every",
                     "probe_rows", "eval_every", "save_every", "keep_checkpoints"):  # fmt: skip
            check_number(self, name, integer=True, at_least=1)
        for name in ("warmup", "average"):
            check_number(self, name, integer=True, at_least=0)
        for name in ("gamma", "interaction_lr", "base_lr", "lora_alpha", "max_grad_norm"):
            check_number(self, name, at_least=0)
        if self.init_std is not None:
            check_number(self, "init_std", at_least=0)
        if self.dropout is not None:
            check_number(self, "dropout", at_least=0, at_most=0.99)
        for name in ("distill", "alpha_share"):
            check_number(self, name, at_least=0, at_most=1)
        check_alpha(self.alpha_start)
        check_alpha(self.alpha_end)
        for name, kind in (
            ("alpha_schedule", Shape),
            ("tune", Tune),
            ("lr_schedule", Literal["constant", "linear", "cosine"]),
        ):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise PruneError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of {choices}"
                )
        if self.target_sparsity is not None:
            check_number(self, "target_sparsity", at_least=0, at_most=0.99)
            if not self.prunes:
                raise PruneError(
                    f"target_sparsity={self.target_sparsity} needs the method pruning; a "
                    f"baseline's sparsity follows from its window or stride"
                )
            if self.gamma == 0:
                raise PruneError("gamma=0 cannot be adapted to a target; start with 0.3")
        if self.tune == "interaction" and not self.prunes:
            raise PruneError(
                f"tune='interaction' would train nothing: {self.method.method} has no interaction "
                f"weights; use tune='all' or tune='lora'"
            )

    @property
    def prunes(self) -> bool:
        return self.method.learns

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "method": to_dict(self.method)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        values = dict(values)
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise PruneError(
                f"{', '.join(unknown)}: no such training setting; there are "
                f"{', '.join(sorted(known))}"
            )
        if isinstance(values.get("method"), dict):
            values["method"] = from_dict(values["method"])
        return cls(**values)

    def arguments(self, folder: str | Path, **more: Any) -> TrainingArguments:
        """The same as TrainingArguments; `more` are further arguments of them."""
        import torch
        from transformers import TrainingArguments

        if self.tf32 and not torch.cuda.is_available():
            raise PruneError("tf32 needs a GPU of NVIDIA; leave it out")
        scheduler = {"constant": "constant_with_warmup"}.get(self.lr_schedule, self.lr_schedule)
        given: dict[str, Any] = {
            "output_dir": str(folder),
            "max_steps": self.steps,
            "per_device_train_batch_size": self.batch,
            "per_device_eval_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "learning_rate": self.base_lr,
            "lr_scheduler_type": scheduler,
            "warmup_steps": self.warmup,
            "weight_decay": 0.0,
            "max_grad_norm": self.max_grad_norm,
            "gradient_checkpointing": self.checkpointing,
            # reentrant checkpointing keeps no graph from the loss to the gates
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "bf16": self.bf16,
            **({"tf32": True} if self.tf32 else {}),
            # without it, where there is no GPU, transformers refuses bfloat16, and each process of
            # torchrun would train alone, all into one folder
            "use_cpu": not torch.accelerator.is_available(),
            "torch_compile": self.compile,
            "logging_steps": self.log_every,
            "logging_first_step": True,
            # the trainer stops at a NaN, which the filter would hide
            "logging_nan_inf_filter": False,
            "eval_strategy": "steps",
            "eval_steps": self.eval_every,
            "save_strategy": "steps",
            "save_steps": self.save_every,
            "save_total_limit": self.keep_checkpoints,
            "seed": self.seed,
            "report_to": ["tensorboard"],
            "dataloader_pin_memory": torch.cuda.is_available(),
        }
        return TrainingArguments(**(given | more))
