"""How does a rank run microbatches and the stages of a pipeline, and what does it compute again?

``microbatches`` (of the batch), ``torch_pipelining`` (stages on torch's schedules),
``stage_backward`` and ``split_backward`` (the backward of one microbatch), ``recompute`` and
``recomputed_call`` (activations that the backward computes again).
"""
