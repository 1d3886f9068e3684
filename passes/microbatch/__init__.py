"""What does one microbatch compute?

Read ``time_types`` first: the types say which part of each tensor a microbatch has.
``infer_time_types`` chooses the inputs that microbatches divide. ``derive_microbatch`` writes the
graph of a microbatch.
"""
