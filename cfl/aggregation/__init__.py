"""What leaves a client, and what can be learnt from it: secure aggregation and differential privacy."""
