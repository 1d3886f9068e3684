"""Which kinds of tensor and sequence parallelism are there?

In reading order: ``mode`` (the base class: the axes of a mode, and the splits that it allows),
``builtin_modes`` ("1d", "2d", "2.5d", "3d" and "sequence") and ``registry`` (modes by name, with
those of the user).
"""
