"""How many steps does it take? The same cosine of α, stretched. (Fig. training_ablation_steps)

python -m experiments.steps
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --steps 5000 --out runs/5000
"""

from experiments.ablation import Variant, run

if __name__ == "__main__":
    variants = [
        Variant(f"{n} steps", settings={"steps": n} if n != 100 else {}) for n in (25, 50, 100)
    ]
    run("steps", __doc__, variants, gammas=(0.3,))
