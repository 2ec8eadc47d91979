"""What does pruning cost in fine-tuning? A full step against dense SDPA, and memory by length."""

from contextlib import nullcontext

import harness

PRECISIONS = ["float32", "bfloat16"]
LENGTHS = [2048, 4096, 8192]
# of the plain n × n form, which needs 20 GB at 8192
PLAIN_LENGTHS = [1024, 2048, 4096]


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--layers", type=int, help="fewer layers than GPT-2 small's 12")
    parser.add_argument("--peak", nargs=2, metavar=("FORM", "N"), help="used by the script itself")
    args = parser.parse_args()
    if args.peak:
        print(peak_of_one_layer(args.peak[0], int(args.peak[1])))
        return
    layers = args.layers or {"quick": 1, "bench": 4, "full": 12}[args.sizes]
    ratios, rows, details = {}, [], {"layers": layers}
    for precision in PRECISIONS:
        for alpha, seconds in steps(precision, layers, args.sizes).items():
            ratio = harness.ratio(seconds["ours"], seconds["dense"])
            rows.append([f"step, {precision}, {alpha}", ratio, "dense step"])
            if alpha == "α = 1":
                ratios[f"step_{precision}"] = ratio
            details[f"seconds_{precision}_{alpha}"] = seconds
    for form, lengths in (("ours", LENGTHS), ("plain", PLAIN_LENGTHS)):
        if form == "plain" and args.sizes != "full":
            continue
        peaks = {n: harness.child("--peak", form, str(n)) for n in lengths}
        details[f"peak_bytes_{form}"] = peaks
        for n in lengths[:-1]:
            growth = peaks[2 * n] / peaks[n]
            rows.append([f"peak memory, {form}, {n} → {2 * n}", growth, f"{peaks[n] / 1e6:.0f} MB"])
            if form == "ours":
                ratios[f"memory_{n}_to_{2 * n}"] = growth
    harness.report(args, ratios, ["what", "ratio", "of"], rows, details)


def steps(precision: str, layers: int, sizes: str) -> dict[str, dict]:
    """Seconds of forward and backward of a GPT-2-small-shaped model, dense and pruned in turn.

    α = 1 is the most expensive: no gate is ever exactly 0, so no key can be skipped.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import kvprune

    half = precision == "bfloat16"
    length, batch = (512, 1) if sizes == "quick" else (1024, 2)
    if half and sizes != "full":
        length, batch = 128, 1
    # where half precision is emulated, a full step takes half an hour; one layer and a small
    # vocabulary leave less work outside attention, so the ratio of the full step is not higher
    layers, small = (1, True) if half else (layers, sizes != "full")
    torch.manual_seed(0)
    # dropout in the attention would take dense SDPA off its fast path
    config = GPT2Config(n_layer=layers, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    config.vocab_size = 4096 if small else config.vocab_size
    models = {name: GPT2LMHeadModel(config).train() for name in ("dense", "ours")}
    pruned = kvprune.attach(models["ours"], kvprune.PruningConfig())
    ids = torch.randint(config.vocab_size, (batch, length))
    autocast = nullcontext
    if precision == "bfloat16":
        autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731

    def dense() -> None:
        with autocast():
            loss = models["dense"](ids, labels=ids).loss
        loss.backward()
        models["dense"].zero_grad()

    def ours() -> None:
        with autocast():
            loss = models["ours"](ids, labels=ids).loss
        (loss + 0.3 * pruned.sparsity_loss()).backward()
        models["ours"].zero_grad()

    result, calls = {}, {"dense": dense, "ours": ours}
    for alpha in [1.0, 8.0] if sizes == "full" else [1.0]:
        pruned.alpha = alpha
        result[f"α = {alpha:g}"] = harness.interleave(2 if half else 3, calls)
    return result


def peak_of_one_layer(form: str, length: int) -> float:
    """Forward and backward of one layer of 12 heads of 64, rank 64, at α = 1."""
    import torch

    from kvprune.ops.attend.soft import soft_attention
    from kvprune.ops.form import AttentionForm
    from kvprune.ops.gate import Gate
    from kvprune.ops.timeline import make_timeline

    def run(n: int, measure: bool) -> float:
        q, k, v = (torch.randn(1, 12, n, 64, requires_grad=True) for _ in range(3))
        q_int, k_int = (torch.randn(1, n, 64, requires_grad=True) for _ in range(2))
        beta = torch.tensor(2.0, requires_grad=True)
        before = harness.resident("VmRSS")
        if measure:
            harness.forget_peak()
        if form == "ours":
            timeline = make_timeline(None, (1, n), torch.device("cpu"))
            layers, gate = [(q_int / 8, k_int, beta)], Gate("alpha", 1.0)
            out, kept = soft_attention(q, k, v, layers, timeline, gate, AttentionForm(0.125))
        else:
            past = torch.ones(n, n, dtype=torch.bool).tril(-1)
            scores = (q_int / 8) @ k_int.mT + beta
            votes = torch.nn.functional.logsigmoid(scores).where(past, 0.0)
            log_keep = votes.cumsum(1).where(past | torch.eye(n, dtype=torch.bool), -torch.inf)
            logits = q @ k.mT * 0.125 + log_keep[:, None]
            out, kept = torch.softmax(logits, -1) @ v, log_keep.exp().sum()
        (out.sum() + kept.sum()).backward()
        return harness.resident("VmHWM") - before

    run(256, measure=False)  # compilation and thread pools are not the layer's
    return run(length, measure=True)


if __name__ == "__main__":
    main()
