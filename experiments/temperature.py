"""The α-sigmoid against a plain sigmoid whose temperature falls (section 3.2).

python -m experiments.temperature
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --gate temperature --out runs/t
"""

from experiments.ablation import Variant, run

if __name__ == "__main__":
    variants = [Variant("α-sigmoid"), Variant("temperature", {"gate": "temperature"})]
    run("temperature", __doc__, variants)
