"""How long do the parts of a step take, how much memory does a step take, and did the plan predict
both?

In reading order:

- ``step_recorder``: the times of a step's parts;
- ``live_bytes``, ``peak_memory``: the bytes of tensors, and of a step;
- ``rank_memory``: the bytes that stay between steps;
- ``compare``: predicted beside measured;
- ``comparison``: the result, as a table and as a file;
- ``rehearsal``: the same of one rank that runs alone.
"""
