"""Aggregation of uploads: plain sums, secure aggregation and differential privacy."""
