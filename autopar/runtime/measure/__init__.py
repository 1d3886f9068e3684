"""How long do the parts of a step take, how much memory does a step take, and did the plan predict
both?

In reading order: ``step_recorder`` (times), ``live_bytes`` and ``peak_memory`` (bytes),
``compare`` (predicted beside measured), ``comparison`` (the result as a table and a file).
"""
