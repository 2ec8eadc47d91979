"""Does a larger rank r prune more at equal perplexity? (Fig. training_ablation_nembd)

python -m experiments.rank
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --rank 16 --out runs/r16
"""

from experiments.ablation import Variant, run

if __name__ == "__main__":
    run("rank", __doc__, [Variant(f"r = {r}", {"rank": r}) for r in (8, 32, 64)])
