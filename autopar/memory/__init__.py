"""The bytes that a plan's program holds, storage by storage, with nothing run: torch is asked what
each call makes, saves and gives back.

``calls`` is the program of one rank, ``saved`` and ``held`` what it keeps for the backward,
``liveness`` and ``backward`` what is alive in one microbatch, ``leaves`` the gradients of
parameters, ``walk`` and ``peak`` a whole step. ``live_bytes`` counts what really is alive.
"""
