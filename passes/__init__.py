"""Graph in, graph out: the passes between the captured graph and the programs of a rank, one pass
a file.

``canonical`` brings a captured graph into the form that the rules read. ``microbatch`` derives the
graph of one microbatch. ``lowering`` makes the programs of a rank from a graph and a plan.
"""
