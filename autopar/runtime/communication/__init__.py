"""How do the ranks of a program talk to each other, and how do they notice that they disagree?

In reading order. Groups and tensors: ``mesh`` (process groups and this rank's place),
``collectives`` (conversions of a tensor between types, differentiable), ``kernel_collectives``
(collectives without a gradient), ``placements`` (layouts as DTensor writes them) and
``random_streams`` (draws that are equal wherever a tensor is). Agreement: ``all_ranks`` (work that
succeeds or fails on all ranks together), ``replicas`` (checks that replicas are equal), ``desync``
(each call is compared between ranks; with ``input_digests``, ``record_exchange`` and
``desync_messages``) and ``watchdog`` (a rank that waits in vain ends with an error; with
``abort``).
"""
