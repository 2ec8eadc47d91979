"""Pretrain the project's own small model: GPT-2 architecture, its own BPE, public-domain books.

    python -m experiments.pretrain_tiny --corpus DIR            train, or resume
    python -m experiments.pretrain_tiny --corpus DIR --export   write the model into the package

DIR holds `books-*.jsonl.gz`, one {"id", "text"} per line. Tokenizer, token numbers, checkpoints and
log are stored in --out; a killed run resumes from its last checkpoint.
"""

import argparse
import gzip
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

PACKAGE = Path(__file__).parent.parent / "src/kvprune/tiny"
VOCABULARY, LENGTH, BATCH, SEED = 4096, 512, 8, 0
END = "<|endoftext|>"
# never trained on: the text that perplexities are measured on
HELD_OUT = ("pg55_The_Wonderful_Wizard_of_Oz", "pg19090_1961_Star_Hunter")
STRAIGHT = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "\u00a0": " "})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--decay", type=int, default=800, help="last steps, with falling rate")
    parser.add_argument("--export", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(args.corpus, args.out)
    if args.export:
        return export(args.out, tokenizer)
    train, held_out = (
        token_numbers(args.corpus, tokenizer, args.out / f"{name}.npy", name == "held_out")
        for name in ("train", "held_out")
    )
    print(f"{len(train):,} tokens to train on, {len(held_out):,} held out")
    pretrain(train, held_out, args.out, args.steps, args.decay)


def documents(corpus: Path, held_out: bool) -> Iterator[str]:
    for path in sorted(corpus.glob("books-*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            for line in lines:
                document = json.loads(line)
                if any(name in document["id"] for name in HELD_OUT) == held_out:
                    yield document["text"].translate(STRAIGHT)


def make_tokenizer(corpus: Path, out: Path) -> PreTrainedTokenizerFast:
    path = out / "tokenizer"
    if not path.exists():
        bpe = ByteLevelBPETokenizer()
        texts = documents(corpus, held_out=False)
        bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=[END])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, pad_token=END,
            model_max_length=LENGTH,
        )  # fmt: skip
        tokenizer.save_pretrained(path)
    return PreTrainedTokenizerFast.from_pretrained(path)


def token_numbers(corpus: Path, tokenizer, path: Path, held_out: bool) -> np.ndarray:
    """All documents in one row, each after an end-of-text token."""
    if not path.exists():
        parts = []
        for text in documents(corpus, held_out):
            parts.append(np.array([tokenizer.eos_token_id, *tokenizer(text).input_ids], np.uint16))
        np.save(path, np.concatenate(parts))
    return np.load(path, mmap_mode="r")


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(SEED)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=256, n_layer=6, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            pad_token_id=0,
        )
    )  # fmt: skip


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by five Newton-Schulz steps (Jordan et al., 2024).

    In float32: torch.optim.Muon does this in bfloat16, which a CPU without it emulates.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                wide = x.shape[0] < x.shape[1]
                x = (x if wide else x.T) / x.norm().clamp(min=1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                size = max(1.0, p.shape[1] / p.shape[0]) ** 0.5  # Conv1D: (in, out)
                p.add_(x if wide else x.T, alpha=-group["lr"] * size)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, Adam for embeddings, norms and biases."""
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".h." not in name]
    return [
        Muon(inside, lr=0.02),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0),
    ]


def rate(step: int, steps: int, decay: int) -> float:
    """Warm up for 100 steps, hold, and fall to zero over the last `decay` ones."""
    return min(1.0, (step + 1) / 100, max(0.0, (steps - step) / decay))


def batch_at(tokens: np.ndarray, step: int) -> Tensor:
    """The windows of one step: every epoch in a new order that depends on the seed only."""
    windows = (len(tokens) - 1) // LENGTH
    epoch, first = divmod(step * BATCH, windows - windows % BATCH)
    order = np.random.default_rng((SEED, epoch)).permutation(windows)
    chosen = order[first : first + BATCH]
    rows = [tokens[i * LENGTH : i * LENGTH + LENGTH].astype(np.int64) for i in chosen]
    return torch.from_numpy(np.stack(rows))


def pretrain(train: np.ndarray, held_out: np.ndarray, out: Path, steps: int, decay: int) -> None:
    model = make_model()
    optimizers = make_optimizers(model)
    base_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    first = restore(out, model, optimizers)
    run = torch.compile(model)
    since, began = first, time.time()
    for step in range(first, steps):
        share = rate(step, steps, decay)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, base_rates, strict=True):
            group["lr"] = base * share
        ids = batch_at(train, step)
        model.train()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        if not math.isfinite(loss.item()):
            raise SystemExit(f"step {step}: the loss is {loss.item()}; lower the learning rates")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if done % 20 == 0:
            speed = (done - since) * BATCH * LENGTH / (time.time() - began)
            since, began = done, time.time()
            log(out, step=done, loss=round(loss.item(), 4), tokens_per_second=round(speed))
        if done % 100 == 0 or done == steps:
            if done % 200 == 0 or done == steps:
                log(out, step=done, held_out_loss=round(evaluate(model, held_out), 4))
            checkpoint(out, done, model, optimizers)
            # the end of the constant rate: a longer run can start here
            if done == steps - decay:
                checkpoint(out / "before_decay", done, model, optimizers)


@torch.no_grad()
def evaluate(model: nn.Module, tokens: np.ndarray, windows: int = 64) -> float:
    """Mean loss of windows spread evenly over the held-out text."""
    model.eval()
    starts = np.linspace(0, len(tokens) - LENGTH - 1, windows).astype(int)
    ids = torch.from_numpy(np.stack([tokens[s : s + LENGTH].astype(np.int64) for s in starts]))
    losses = [model(input_ids=part, labels=part).loss.item() for part in ids.split(8)]
    return sum(losses) / len(losses)


def state_of(optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' tensors by name, for safetensors."""
    return {
        f"{which}.{number}.{name}": value.clone()
        for which, optimizer in enumerate(optimizers)
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def checkpoint(out: Path, step: int, model: nn.Module, optimizers: list) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"optimizer.{name}": x for name, x in state_of(optimizers).items()}
    draft = out / "checkpoint.tmp"
    save_file(tensors, draft, {"step": str(step)})
    draft.replace(out / "checkpoint.safetensors")


def restore(out: Path, model: nn.Module, optimizers: list) -> int:
    """Load the last checkpoint if there is one; returns its number of steps."""
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return 0
    tensors = load_file(path)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[f"model.{name}"])
    for which, optimizer in enumerate(optimizers):
        saved, states = optimizer.state_dict(), {}
        for key, tensor in tensors.items():
            if key.startswith(f"optimizer.{which}."):
                number, name = key.split(".")[2:]
                states.setdefault(int(number), {})[name] = tensor
        optimizer.load_state_dict({**saved, "state": states})
    return steps_of(path)


def steps_of(path: Path) -> int:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


def log(out: Path, **entry: float) -> None:
    line = json.dumps(entry)
    print(line, flush=True)
    with (out / "log.jsonl").open("a") as file:
        file.write(line + "\n")


def export(out: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The model in bfloat16 with its tokenizer, as `from_pretrained` expects them."""
    model = make_model()
    restore(out, model, make_optimizers(model))
    model.to(torch.bfloat16).save_pretrained(PACKAGE)
    tokenizer.save_pretrained(PACKAGE)
    print(f"{PACKAGE}: {sum(f.stat().st_size for f in PACKAGE.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
