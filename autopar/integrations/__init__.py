"""Which trainer that people already use runs a compiled model?

One file a trainer, imported only when asked for, because each imports a package of others:

- ``transformers``: a ``Trainer``, on the ``Accelerator`` of
- ``accelerate``;
- ``lightning``: a strategy of Fabric, and one of Lightning's ``Trainer``;
- ``peft``: the adapter of a compiled ``PeftModel``, to a folder and back.

What they share: ``replicas`` (values that trainers gather from processes), ``full_batches``
(loaders), ``checkpoints``.
"""
