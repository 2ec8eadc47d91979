"""Is the dense model a better teacher than the text? Beyond the paper.

python -m experiments.distilled
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --distill 1 --out runs/distilled
"""

from experiments.ablation import Variant, run

VARIANTS = [
    Variant("next token"),
    Variant("KL to the dense model", settings={"distill": 1.0}),
]

if __name__ == "__main__":
    run("distilled", __doc__, VARIANTS, gammas=(0.3,))
