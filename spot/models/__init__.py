"""Tokens → prediction: SpotViT, baselines and checkpoints."""
