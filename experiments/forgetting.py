"""What a pruned model forgets: the paper's findings on interpretability, measured.

    python -m experiments.forgetting          writes docs/results/forgetting.json,
                                              docs/figures/forgetting_*.svg and forgetting.svg,
                                              animated: the model continues a prompt
    --model M --corpus FILE...                instead of γ = 0.3 of tiny_curve.py and the
                                              held-out book

The paper: Fig. interpretability (parts of speech, droppers, positions), draw_graph, context_switch,
dropped_not_dropped, attention_mask; "Most pruning is triggered by punctuation", "layers at varying
depths exhibit distinct behaviors", the network "learned to ignore most of the preceding text if
that comes from a different context", "tokens that have other tokens very similar to them are
pruned". It prints a verdict on each.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch

from experiments import small
from experiments.publish import DOCS
from kvprune import PruningConfig, tiny
from kvprune.adapters.load import load_with_tokenizer
from kvprune.demo import PROMPT
from kvprune.explain import figures
from kvprune.explain.animation import animate
from kvprune.explain.corpus_study import Study, study_corpus
from kvprune.explain.prompt import trace_prompt
from kvprune.utils.quiet import quiet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a name on the hub")
    parser.add_argument("--adapter")
    book = str(tiny.text_file("held_out"))
    parser.add_argument(
        "--corpus", nargs="+", default=[book], help="texts that it was not trained on"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of finished runs")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--write", type=int, default=150, help="tokens; 0: no animation")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    quiet()
    own = PruningConfig(rank=small.RANK)
    loaded = load_with_tokenizer(
        args.model or str(small.Runs(args.runs).run_folder(own, gamma=0.3)), args.adapter
    )
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    study = study_corpus(pruned, tokenizer, args.corpus, args.length, args.rows)
    print(study.save(args.docs / "results" / "forgetting.json"))
    for file in figures.save(study, args.docs / "figures"):
        print(file)
    if args.write:
        torch.manual_seed(args.seed)
        options = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.95}
        trace = trace_prompt(pruned, tokenizer, args.prompt, args.write, **options)
        print(animate(trace, args.docs / "figures" / "forgetting.svg"))
    print("\n".join(verdicts(study)))


def verdicts(study: Study) -> list[str]:
    """One sentence per finding of the paper, with our numbers."""
    counted = study.statistics
    lines = []
    kinds = counted.droppers_by_kind
    marks = [kinds[name] for name in ("punctuation", "line break") if name in kinds]
    share, common = sum(row.share for row in marks), sum(row.of_tokens for row in marks)
    lines.append(
        f"droppers: punctuation and line breaks cause {share:.0%} of all drops and are "
        f"{common:.0%} of the tokens ({share / common:.1f} times their share); "
        f"that is {'more' if share > 0.5 else 'less'} than half"
    )
    by_layer = np.sum([row.by_layer for row in marks], axis=0)
    busy = [i for i, drops in enumerate(counted.drops_by_layer) if drops]
    lines.append(
        "by layer: "
        + ", ".join(f"{counted.layers[i]}: {by_layer[i]:.0%}" for i in busy)
        + " of its drops are theirs; context gone: "
        + ", ".join(
            f"{layer}: {share:.0%}"
            for layer, share in zip(counted.layers, counted.sparsity_by_layer, strict=True)
        )
    )
    parts = counted.kept_by_speech
    if parts:
        names = list(parts)
        lines.append(
            f"parts of speech: {names[0]} is seen by {parts[names[0]].share:.0%} of later tokens, "
            f"{names[-1]} by {parts[names[-1]].share:.0%}"
        )
    switch = study.switch
    rows = []
    for i, layer in enumerate(switch.layers):
        without = (
            ""
            if switch.expected is None
            else f" ({switch.expected[i]:.1%} as far back without a switch)"
        )
        rows.append(
            f"{layer}: {switch.across[i]:.1%} across{without}, {switch.within[i]:.0%} within"
        )
    lines.append("context switch, pairs still seen: " + "; ".join(rows))
    for among, near in study.nearest.items():
        pairs = [
            (gone, stay)
            for gone, stay in zip(near.mean_dropped, near.mean_kept, strict=True)
            if math.isfinite(gone) and math.isfinite(stay)
        ]
        gone, stay = np.mean(pairs, axis=0) if pairs else (math.nan, math.nan)
        closer = sum(g < s for g, s in pairs)
        lines.append(
            f"nearest key among {among}: mean distance {gone:.3f} of dropped tokens, {stay:.3f} of "
            f"kept ones; dropped ones are closer in {closer} of {len(pairs)} layers"
        )
    return lines


if __name__ == "__main__":
    main()
