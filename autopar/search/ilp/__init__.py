"""Which choice of every node is the fastest that fits memory?

In reading order: ``vertex``, ``tensor_conversions`` and ``problem`` (the choices and their costs as
arrays), ``cost_weights`` (the objective), ``problem_graph``, ``build_problem`` and
``problem_parts`` (from a graph to its problem, and what problems have in common), ``hidden_sums``
and ``weight_sums`` (what a compiled program computes beside sums of gradients),
``lower_bound`` (a bound without a solve), ``restrict`` (fewer choices), ``solution`` and ``solve``
(the best choices at given weights), ``memory_prices`` (the ILP at prices of memory, for a budget),
and ``neighbourhood`` (meshes of three and more axes). ``exact`` finds most optima without a solver,
and ``programs`` has the programs for the others.
"""
