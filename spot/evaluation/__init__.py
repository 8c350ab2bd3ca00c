"""Accuracy, kNN, cost and throughput."""
