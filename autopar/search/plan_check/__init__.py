"""Is a plan, which anyone may have edited, a legal program of this graph?

A plan may contain only what the search chooses from. The layouts of a node are one of the
strategies of its rule. A parameter is stored in one of the ways that the runtime knows. A tensor
that a reader wants in another layout is converted, in steps that exist. A plan that passes computes
the loss and the gradients of one device.

In reading order: ``check_plan`` (all checks, in order), ``plan_view`` (the plan beside its graph),
``check_nodes``, ``check_parameters``, ``check_conversions`` and ``check_buckets`` (the checks of
each),
``data_degree`` (into how many parts a plan splits the batch).
"""
