"""Graph in, graph out: one pass per file."""
