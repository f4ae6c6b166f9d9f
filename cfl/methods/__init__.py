"""The methods: strategies, local regularizers, and the subspaces that some of them share."""
