"""How does one step run on this rank: the call of a program, and the backward through its outputs?

In reading order: ``step_runner`` (a step from begin to end), ``work_order`` (whole, in
microbatches, or staged), ``step_work`` (forward, backward, gradient synchronisation, timing),
``prologue`` (values of the whole batch), ``autograd_bridge`` (outputs and gradients as autograd
sees them), ``autograd_engine`` (private names of torch's engine), ``loss`` (its sum over ranks),
``program_variants`` (train and eval), ``matmul_precision`` (tf32).
"""
