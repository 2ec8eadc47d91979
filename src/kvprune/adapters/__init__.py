"""Ready models by name: where base weights come from, and the adapters of the package."""
