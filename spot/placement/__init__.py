"""Image → positions: spatial priors, saliency, oracle search, and placements on disk."""
