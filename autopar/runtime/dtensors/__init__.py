"""How do the user's tensors, which are DTensors on several ranks, behave like those of one device?

``sharding`` (plain tensors to DTensors), ``data_assignment`` (``parameter.data = value``),
``random_fill`` (``nn.init``), ``torch_private`` (every private name of torch that this needs).
"""
