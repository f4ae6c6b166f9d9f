"""From options to objects: the resolved configuration, the methods that it names, and what fits together."""
