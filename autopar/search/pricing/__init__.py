"""How many seconds and bytes does one choice for one node cost on one rank?

The rules say how much work a choice leaves to a rank, and the cost model says how long that work
takes. In reading order: ``costs`` (the costs of every choice of a node, and of conversions),
``kernel_costs`` (the kernels of a node and the collectives that they launch), ``kernel_seconds``
(one rank's share of a kernel, and its seconds), ``parameter_costs`` (storage, gradient
synchronisation and optimizer step of a parameter), ``layout_pairs`` (what conversions do),
``node_sizes`` (bytes and dtypes of a node's tensors), ``resize`` (the same graph for another batch
size).
"""
