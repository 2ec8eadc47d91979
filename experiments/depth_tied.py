"""Is a token that one layer drops better dropped in all later ones? (App. B, Eq. 13)

python -m experiments.depth_tied
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --depth-tied --out runs/tied
"""

from experiments.ablation import Variant, run

if __name__ == "__main__":
    variants = [Variant("independent layers"), Variant("depth-tied", {"depth_tied": True})]
    run("depth_tied", __doc__, variants)
