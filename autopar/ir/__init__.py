"""What are a layout, a graph and a plan, as data?

In reading order: ``layout`` (the types along a mesh axis), ``captured`` (a captured model),
``nodes`` (reading and editing graph nodes), ``precision`` (the names of dtypes), ``plan_data`` (a
plan), ``plan_json`` (a plan as JSON), ``parameter_collectives`` (the collectives that a step makes
for parameters), ``zero_buckets`` (the parameters that the graph gathers together) and
``state_buckets`` (the optimizer's state that comes from the host).
"""
