"""A run from its schedule to its files."""
