"""The ground floor: trees, randomness, options, errors, registries. Nothing here imports from the floors above."""
