"""How do ranks notice that they disagree?

``desync`` (each call is compared between ranks; with ``input_digests``, ``record_exchange`` and
``desync_messages``), ``batch_comparison`` (ranks of one replica were given the same samples, and
those of other replicas other samples) and ``replicas`` (checks that replicas hold equal values).
"""
