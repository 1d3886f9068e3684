"""What happens between a user's call and the search? ``traced_model`` traces a model once for all
uses of its graph, and ``planner`` checks the options and the cluster, searches, and writes the
plan. ``compile_arguments`` checks those of ``compile``. ``many_plans`` plans for a sweep, in
``forked_workers``. ``evaluation_trace`` traces ``eval()`` of a compiled model when it is first
used, with a ``model_twin`` in the model's place. ``kept_models`` and ``kept_plans`` keep graphs and
plans for further calls of the process, ``plan_files`` keeps plans for other processes.
"""
