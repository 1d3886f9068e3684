"""Where is the graph cut into pipeline stages, and which solution does each part take?

In reading order: ``units`` (the smallest parts that a cut leaves whole), ``unit_costs`` (what each
unit costs under each of a few solutions of the sharding problem), ``partition`` (the stages, by
dynamic programming over the units), ``best_chain`` (the dynamic program), ``choose_solutions``
(the solution of each unit of one stage, by a small integer program).
"""
