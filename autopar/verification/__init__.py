"""Captured equals eager: the graph, and a plan, compute what the model computes on one device."""
