"""Where should the temperature end? 8 is wider than the α-sigmoid of α = 8 (section 3.2).

python -m experiments.temperature_end

The α-sigmoid of α = 8 is binary outside of ±1/7; the sigmoid of 8·x is not within ±1/2. Steeper
ends tell how much of the loss from soft to hard is the end point's and how much the gate's.
"""

from experiments.ablation import Variant, run

VARIANTS = [
    Variant("α-sigmoid to 8"),
    *(
        Variant(f"temperature to {end:g}", {"gate": "temperature"}, {"alpha_end": end})
        for end in (16.0, 32.0)
    ),
]

if __name__ == "__main__":
    run("temperature_end", __doc__, VARIANTS, gammas=(0.3,))
