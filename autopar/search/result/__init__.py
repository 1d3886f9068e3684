"""What does the search return: which plan does a candidate become, and does it fit?

In reading order: ``fit`` (from a candidate to a plan that fits the memory), ``assemble`` (every
node of the graph with what the candidate decides, as a priced plan), ``staged_graph`` (the graph
cut into stages), ``priced_plan`` (seconds, bytes and timeline of a solution), ``chosen_program``
(how each node of a priced plan runs), ``counted_memory`` (the memory of a step, counted storage by
storage), ``exact_search`` (small problems, solved to the optimum), ``least_memory`` (the plan that
needs least memory, where nothing fits), ``end_of_step`` (gradient synchronisation in buckets, and
the optimizer), ``share_cores`` (ranks that share cores), ``cost_items`` (each kernel and collective
of a priced plan), ``write_plan`` (the priced plan as plan data).
"""
