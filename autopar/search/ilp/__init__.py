"""Which choice of every node is the fastest that fits memory?

In reading order: ``vertex``, ``tensor_conversions`` and ``problem`` (the choices and their costs as
arrays), ``cost_weights`` (the objective), ``build_problem`` (from a graph to its problem),
``lower_bound`` (a bound without a solve), ``restrict`` (fewer choices), ``solution`` and ``solve``
(the best choices at given weights), ``memory_prices`` (the ILP at prices of memory, for a budget),
and ``neighbourhood`` (meshes of three and more axes). ``exact`` finds most optima without a solver,
and ``programs`` has the programs for the others.
"""
