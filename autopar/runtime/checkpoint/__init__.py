"""How is a run saved, and how does it go on?

``saver`` (one save, in the ``background``), ``restore`` (one load), ``methods`` (what ``compiled``
has of it), ``program_state`` (the model's tensors), and what is saved besides:
``optimizer_state``, ``saved_plain_data`` and ``generators``. ``files`` is the folder on the disk.
"""
