"""What may be chosen?

In reading order: ``options`` (what the user fixed), ``backend`` (which one is asked for),
``modes`` (kinds of tensor and sequence parallelism, as restrictions of the search space),
``meshes`` (the axes of a stage and their uses),
``configuration`` (mesh, microbatches and schedule, which the outer search enumerates),
``check_schedule`` and ``user_cuts`` (which schedules and which cuts are possible),
``zero_options`` (what the option ``zero`` fixes), ``strategies``
(how a node or a parameter lies on a mesh), ``choices`` (the strategies that each node may have),
``recompute_policy`` (which results may be saved or recomputed), ``repeated_blocks`` (which nodes
share one decision) and ``gather_groups`` (which parameters may be gathered together).
"""
