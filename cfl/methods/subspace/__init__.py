"""Linear algebra of orthogonal-subspace methods: layer inputs, sketches and orthonormal bases."""
