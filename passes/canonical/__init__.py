"""How does a captured graph get the one form that rules, search and lowering read?

Read ``canonicalise`` first: it has the order of the passes, and the reasons for it. The passes, in
that order: ``inline_regions``, ``decompose``, ``split_to_slices``, ``functionalise`` (with
``out_of_place`` and ``scatter_view``), ``mixed_precision``, ``simplify``, ``simplify_constants``,
``matmul_to_linear``, ``decompose_losses``, ``normal_form``. Last, ``name_nodes`` gives nodes the
names, and the graph the fingerprint, that plans go by. Beside the passes, ``function_rules`` (with
``function_types``) makes the rule of a ``torch.autograd.Function``.
"""
