"""Assembly of a run: its resolved configuration, its methods, and the checks that they fit together."""
