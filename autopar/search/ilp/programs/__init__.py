"""How does a solver get the problem?

In reading order: ``silent_highs`` (the solver), ``linear_program`` (columns and rows for it),
``pulp_solver`` (the same for a solver of PuLP's), ``reduced_problem`` (the ILP of one stage),
``stage_cost_program`` and ``timeline_program`` (the program of one stage cut, with the schedule in
it).
"""
