"""Tokens → prediction: SpotViT, what a user would pick instead, and checkpoints."""
