"""Image and positions → tokens: bilinear windows, position embedding, and the two together."""
