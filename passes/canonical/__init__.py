"""How does a captured graph get the one form that rules, search and lowering read?

Read ``canonicalise`` first: it has the order of the passes, and the reasons for it. The passes, in
that order: ``inline_regions``, ``decompose``, ``functionalise``, ``mixed_precision``, ``simplify``,
``simplify_constants``, ``matmul_to_linear``, ``decompose_losses``, ``normal_form``.
"""
