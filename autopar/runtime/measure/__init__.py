"""How long do the parts of a step take, how much memory does a step take, and did the plan predict
both?

In reading order:

- ``step_recorder``: the times of a step's parts;
- ``live_bytes``, ``peak_memory``: the bytes of tensors, and of a step;
- ``compare``: predicted beside measured;
- ``comparison``: the result, as a table and as a file.
"""
