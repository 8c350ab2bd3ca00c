"""Training of ViTs for off-grid tokens: recipes, objectives and one training loop."""
