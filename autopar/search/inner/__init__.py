"""What is the best that one parallel configuration can do: a lower bound, an estimate, a candidate?

In reading order: ``inner_search`` (the sharding problem of a configuration's mesh, solved at a few
prices of memory), ``step_bounds`` (bounds of a configuration's step time and memory),
``candidate`` (a configuration with stage cuts and an estimated step time), ``inner_searches`` (one
inner search for the whole batch, one for microbatches), ``search_cache`` (what all searches of one
graph share) with its ``lru_cache``, ``kept_solutions`` (solutions at prices of memory, within the
time left), ``solver_work`` (operations that solves share, or for which time is left),
``no_plan_errors`` (the messages where a configuration has no plan).
"""
