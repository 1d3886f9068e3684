"""How does one step run on this rank: the call of a program, and the backward through its outputs?

In reading order:

- ``step_runner``: a step from begin to end;
- ``work_order``: the order of forwards and backwards, whole, in microbatches, or staged;
- ``step_work``: one forward, one backward, and the synchronisation of gradients, all timed;
- ``prologue``: values that are computed from the whole batch before its microbatches;
- ``rank_stages``, ``gradient_paths``, ``stage_gradients``: the stages of a pipeline rank, which
  tensors have a gradient in a call, and how stages synchronise gradients;
- ``autograd_bridge``, ``autograd_engine``: outputs and gradients as autograd sees them, and the
  private names of torch's engine;
- ``loss``: the sum of the loss over ranks;
- ``program_variants``: the program for the modes train and eval of the model and its parts;
- ``matmul_precision``: tf32 while a program runs.
"""
