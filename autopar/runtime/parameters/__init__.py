"""What does a rank hold of each parameter, and what does a step communicate for it?

``weight`` (one parameter on one rank), ``model_state`` (all of them), ``initial_values`` and
``missing_values`` (where the values come from), ``gather`` (before the forward),
``gradient_bucket`` and ``gradients`` (in the last backward), ``holders`` and ``shared_parameters``
(under a pipeline).
"""
