"""Teaching a ViT to read off-grid tokens: recipes, objectives, and one loop."""
