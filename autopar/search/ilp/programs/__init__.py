"""How does a solver get the problem?

In reading order: ``linear_program`` (columns and rows for HiGHS), ``pulp_solver`` (the same for a
solver of PuLP's), ``reduced_problem`` (the ILP of one stage), ``stage_cost_program`` and
``timeline_program`` (the program of one stage cut, with the schedule in it).
"""
