"""How open should the gates be at the start? (App. B; Fig. sparse_sigmoid, right)

python -m experiments.beta
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --beta 4 --out runs/beta-4
"""

from experiments.ablation import Variant, run

if __name__ == "__main__":
    run(
        "beta",
        __doc__,
        [Variant(f"β = {b:g}", {"beta": b}) for b in (1.0, 2.0, 4.0)],
        gammas=(0.3,),
    )
