"""Which choice of every node is the fastest that fits memory?

In reading order: ``vertex`` and ``problem`` (the choices and their costs as arrays),
``cost_weights`` (the objective), ``build_problem`` (from a graph to its problem),
``solve`` (the best choices at given weights), ``pruning`` (bounds and small problems), from
``cost_table``, ``message_passing`` and ``elimination``; ``reduced_problem`` (the ILP of one stage)
and ``linear_program`` (columns and rows for HiGHS), for the rest and for other solvers;
``memory_prices`` (the ILP at a price of memory, for a budget), ``neighbourhood`` (meshes of three
and more axes), and ``stage_cost_program`` and ``timeline_program`` (the exact program of one stage
cut, with the schedule in it).
"""
