"""Everything that chooses: strategies, the ILP, meshes."""
