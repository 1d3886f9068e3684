"""How do the user's tensors, which are DTensors on several ranks, behave like those of one device?

``sharding`` (plain tensors to DTensors), ``data_assignment`` (``parameter.data = value``),
``program_handlers`` (operators that do not work as torch's), of which ``random_fill`` (``nn.init``)
and ``scalar_reads`` (``item()``) are two kinds, ``install`` (of both), ``torch_private`` (every
private name of torch that this needs).
"""
