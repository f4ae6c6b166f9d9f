"""Tables and plots of results; percent and megabytes appear here and nowhere else."""
