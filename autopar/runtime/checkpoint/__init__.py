"""How is a run saved, and how does it go on?

``saver`` (one save, in the ``background``), ``restore`` (one load), ``methods`` (what ``compiled``
has of it), ``storage`` (torch.distributed.checkpoint's writer and reader of a folder of
safetensors), ``manifest`` and ``folder`` (which files a checkpoint has, and how it becomes
complete), ``find`` (the newest one that is whole), ``optimizer_state``, ``plain_state`` and
``generators`` (what is saved besides the model's tensors).
"""
