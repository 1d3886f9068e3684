"""How do the ranks of a program talk to each other?

In reading order: ``rank_device``, ``join`` and ``groups`` (this rank's device, process groups),
``mesh`` (this rank's place), ``functional`` (torch's collectives, for every dtype), ``collectives``
(conversions of a tensor between types, differentiable), ``bucket_sums`` and ``zero_buckets``
(gathers of several parameters in one collective, and the sums of their gradients),
``kernel_collectives`` (collectives without a gradient), ``placements`` (layouts as DTensor writes
them), ``random_streams`` (draws that are equal wherever a tensor is), ``stand_ins`` (what a rank
receives that runs alone), ``all_ranks`` (work that succeeds or fails on all ranks together) and
``watch`` (a rank that waits in vain ends with an error).
"""
