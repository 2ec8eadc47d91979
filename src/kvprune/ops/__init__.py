"""Pure tensor maths; nothing here knows of transformers."""
