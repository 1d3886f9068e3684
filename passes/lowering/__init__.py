"""How does a plan become the programs that a rank runs?

Read ``lower`` first: it has the order of the passes, and the reasons for it. The passes, in that
order: ``admit_gradients``, ``place_batch`` (with ``local_batch`` and ``conversion_path``),
``insert_conversions``, ``choose_kernels``, ``localise``, ``evaluation_mode``, ``mark_recomputed``,
``bucket_gathers``, ``prefetch_gathers``, ``join_slices``, ``split_stages``. ``verify_lowered`` and
``check_functions`` check the program between them. ``cut_stages`` runs before ``lower``: it inserts
``send`` nodes, whose layouts a plan chooses, and at which ``split_stages`` splits.
"""
