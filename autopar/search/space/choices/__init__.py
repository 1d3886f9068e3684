"""Which strategies may each node have?

In reading order: ``node_choices`` (the choices of every node on a mesh), ``option_filter`` (what
axes and modes leave of the options of a rule), ``node_strategies`` (one option for each mesh axis),
``axis_options`` (the options along one axis), ``parameter_strategies`` (stored and used layouts),
``fused_weights`` (dims that consist of equal parts) and ``constraints`` (layouts that the user
fixed).
"""
