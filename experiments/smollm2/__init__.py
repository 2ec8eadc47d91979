"""SmolLM2: text, training, packing and every measurement of docs/smollm2.md."""
