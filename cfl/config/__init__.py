"""The options of a run, and the layers of files and overrides that set them."""
