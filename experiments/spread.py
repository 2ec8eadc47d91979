"""Does it help to divide by the size of a layer's inputs? (beyond the paper)

python -m experiments.spread
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --spread --out runs/spread
"""

from experiments.ablation import Variant, run

VARIANTS = [
    Variant("divided by the inputs' size"),
    # twice the learning rate: with the recipe's it prunes less still
    Variant("as in the paper", settings={"spread": False, "interaction_lr": 3e-3}),
]

if __name__ == "__main__":
    run("spread", __doc__, VARIANTS, gammas=(0.3,))
