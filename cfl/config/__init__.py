"""Options of a run, and the presets, files and overrides that set them."""
