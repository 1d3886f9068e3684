"""What does one microbatch compute?

Read ``time_types`` first: it infers which part of each tensor a microbatch has.
``derive_microbatch`` then writes the graph of a microbatch.
"""
