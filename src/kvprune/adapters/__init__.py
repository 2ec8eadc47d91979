"""Models by name and adapters in files: resolve, load, save, LoRA, the adapters of the package."""
