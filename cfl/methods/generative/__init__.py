"""Generators of synthetic samples, and how servers and clients train them."""
