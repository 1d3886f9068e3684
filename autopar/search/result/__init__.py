"""What is a plan made of?

In reading order: ``assemble`` (every node of the graph with what the candidate decides, as a priced
plan), ``staged_graph`` (the graph cut into stages), ``priced_plan`` (seconds, bytes and timeline of
a solution), ``end_of_step`` (gradient synchronisation in buckets, and the optimizer),
``best_plan`` (the plan with its gaps), ``chosen_program`` (how each node of a priced plan runs),
``bucket_prices`` (the plan's gathers at the sizes of its ZeRO buckets),
``share_cores`` (ranks that share cores), ``cost_items`` (each kernel and collective of a priced
plan), ``write_plan`` (the priced plan as plan data).
"""
