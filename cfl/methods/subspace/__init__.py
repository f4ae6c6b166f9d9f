"""Layer inputs, sketches and orthonormal bases: the linear algebra of orthogonal-subspace methods."""
