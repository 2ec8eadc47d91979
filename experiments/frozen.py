"""What does freezing the base cost? (App. B, Freezing)

python -m experiments.frozen
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --tune interaction --out runs/frozen
"""

from experiments.ablation import Variant, run

VARIANTS = [
    Variant("all weights"),
    Variant("frozen base", settings={"tune": "interaction"}),
]

if __name__ == "__main__":
    run("frozen", __doc__, VARIANTS, gammas=(0.1, 0.3, 1.0))
