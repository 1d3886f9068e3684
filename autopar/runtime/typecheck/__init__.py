"""Are the types of a lowered program right? A check that is independent of the rules that made it.

In reading order: ``checker`` (infers the type of every node and compares it with the graph's
claim), ``typed_tensors`` (meta tensors that carry a type), ``equations`` (types by einsum-like
equations), ``type_rules`` (the registry), ``type_rules_elementwise``, ``type_rules_reduce``,
``type_rules_shape``, ``type_rules_nn`` and ``type_rules_kernels`` (the rules), ``conversion_types``
(the types of conversions) and ``kernel_shapes`` (the results of calls without communication).
"""
