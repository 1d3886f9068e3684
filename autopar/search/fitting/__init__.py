"""Does a candidate fit the memory, and is its plan the best of its configuration?

In reading order: ``fitting_plans`` (the plans that fit), ``fit`` (from a candidate to a plan that
fits), ``counted_memory`` (the memory of a step, counted storage by storage), ``reserves`` (bytes
that similar plans had to leave free), ``exact_plan`` (a plan with its proof), ``exact_search``
(small problems, solved to the optimum), ``cut_problem`` (one of them), ``hiding_search`` (plans
without stage cuts, by what computation hides), ``price_rounds`` (plans chosen anew at the prices of
their own buckets), and ``least_memory`` (the plan that needs least memory, where nothing fits).
"""
