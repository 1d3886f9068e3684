"""Which files does a checkpoint have, and when is it complete?

``storage`` (torch.distributed.checkpoint's writer and reader of a folder of safetensors), ``index``
(where each tensor lies), ``plain_state`` (all other data), ``manifest`` and ``folder`` (which files
there are, and how a checkpoint becomes complete), ``find`` (the newest one that is whole).
"""
