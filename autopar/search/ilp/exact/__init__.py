"""Which choices are the optimum, found without a solver?

In reading order: ``pruning`` (bounds and small problems), ``cost_table`` (the costs of a few nodes
together), ``message_passing`` (lower bounds for each choice) and ``elimination`` (the optimum of a
small problem).
"""
