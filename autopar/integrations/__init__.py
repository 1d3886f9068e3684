"""Which trainer that people already use runs a compiled model?

One file a trainer, imported only when asked for, because each imports a package of others:

- ``accelerate``: an ``Accelerator``;
- ``transformers``: a ``Trainer``, on that accelerator.
"""
