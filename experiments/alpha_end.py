"""Where should α end, and does it matter how it gets there? (App. B, Setting α)

python -m experiments.alpha_end
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --alpha-end 4 --out runs/alpha-4
"""

from experiments.ablation import Variant, run

VARIANTS = [
    Variant("cosine to 8"),
    Variant("cosine to 16", settings={"alpha_end": 16.0}),
    Variant("line to 8", settings={"alpha_schedule": "linear"}),
]

if __name__ == "__main__":
    run("alpha_end", __doc__, VARIANTS, gammas=(0.3,))
