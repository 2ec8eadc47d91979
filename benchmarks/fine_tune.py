"""What does fine-tuning with pruning cost against dense fine-tuning, and does sparsity pay for it?

Complete steps in turn: forward, backward, clipped gradient, AdamW. Ours has the loss of training
(next token + γ · mean keep) at α = 8 and an interaction that drops the given share; "distilled"
adds the dense model's forward pass, without gradient, as the teacher.
"""

from collections.abc import Callable

import harness

SPARSITIES = [0.0, 0.5, 0.8, 0.9]
SHAPES = {
    # name: width, heads, layers, vocabulary, batch, length
    "tiny": (256, 4, 6, 4096, 4, 512),
    "GPT-2 small, 4 layers": (768, 12, 4, 50257, 1, 1024),
}


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    quick = args.sizes == "quick"
    rounds = 3 if quick else 5
    ratios, rows, details = {}, [], {}
    for name, shape in list(SHAPES.items())[: None if args.sizes == "full" else 1]:
        calls, tokens, sparsities = training_steps(*shape)
        seconds = harness.interleave(rounds, calls)
        for call in list(calls)[1:]:
            ratio = harness.ratio(seconds[call], seconds["dense"])
            rows.append([f"step, {name}, {call}", ratio, "dense step"])
            ratios[f"{name}: {call}"] = ratio
        details[name] = {"seconds": seconds, "tokens_a_step": tokens, "sparsity": sparsities}
    harness.report(args, ratios, ["what", "ratio", "of"], rows, details)


def training_steps(
    width: int, heads: int, layers: int, vocabulary: int, batch: int, length: int
) -> tuple[dict[str, Callable[[], None]], int, dict[str, float]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import kvprune
    from kvprune.evaluate.throughput.rigged import aim

    torch.manual_seed(0)
    # dropout in the attention would take dense SDPA off its fast path
    config = GPT2Config(
        n_embd=width, n_head=heads, n_layer=layers, vocab_size=vocabulary, n_positions=length,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(vocabulary, (batch, length))
    teacher = GPT2LMHeadModel(config).eval()

    def step_of(sparsity: float | None, distill: bool = False) -> Callable[[], None]:
        model = GPT2LMHeadModel(config).train()
        pruned = None
        if sparsity is not None:
            pruned = kvprune.attach(model, kvprune.PruningConfig(alpha=8.0))
            aim(pruned, ids, sparsity)
            sparsities[f"{sparsity}"] = pruned.sparsity().total
            model.train()
        # a rate of 0 does all the work and leaves the sparsity unchanged
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

        def step() -> None:
            out = model(ids, labels=ids, use_cache=False)
            loss = out.loss
            if distill:
                with torch.no_grad():
                    want = teacher(ids, use_cache=False).logits.log_softmax(-1)
                log_p = out.logits.log_softmax(-1)
                kl = torch.nn.functional.kl_div
                loss = kl(log_p, want, log_target=True, reduction="batchmean")
            if pruned is not None:
                loss = loss + 0.3 * pruned.sparsity_loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    sparsities: dict[str, float] = {}
    calls = {"dense": step_of(None)}
    calls |= {f"{s:.0%} pruned": step_of(s) for s in SPARSITIES}
    calls["80% pruned, distilled"] = step_of(0.8, distill=True)
    return calls, batch * length, sparsities


if __name__ == "__main__":
    main()
