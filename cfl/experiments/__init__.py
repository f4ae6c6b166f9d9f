"""Many runs: comparisons of methods, and the tables of the papers."""
