"""Which plan is the fastest that fits? Everything that chooses is here.

``outer_search`` compares parallel configurations: pipeline sizes, meshes, microbatches, schedules
and modes. ``enumeration`` lists them. Each folder answers one question, in reading order:
``space`` (what may be chosen), ``pricing`` (what does a choice cost), ``ilp`` (which choices are
best together), ``pipeline`` (where are the stages cut), ``inner`` (what is the best of one
configuration), ``result`` (which plan is that, and does it fit), ``plan_check`` (is an edited plan
legal).
"""
