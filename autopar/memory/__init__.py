"""How many bytes does a plan's program hold? Counted storage by storage, with nothing run.

Reading order: ``saved_tensors`` gives the tensors that autograd saves for each call of the whole
model. ``traced_call`` and ``call_trace`` are the program of one rank, with ``local_operator`` for
one rank's part of a call, ``conversion_trace`` for its conversions and ``prefetched_gather`` for
gathers that start early, and ``saved_activations`` are the storages that this program keeps for the
backward. ``live_memory`` counts live bytes, ``stage_calls`` in one forward of a stage,
``stage_backward`` and ``saved_memory`` in one backward, ``gradient_memory`` for the gradients of
parameters. ``fused_calls`` and ``fused_backward`` are for a program whose compiler fuses kernels.
``step_settings``, ``stage_memory``, ``schedule_walk``, ``optimizer_step`` and ``peak_memory`` put a
step together, and ``recorded_step`` makes of it what an allocator meets.
"""
