"""Figures: one file per kind. Each takes tensors and tables, never models."""
