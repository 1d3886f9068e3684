"""Which samples does a rank load, and when do they come to its device?

In reading order:

- ``rank_batch``: the part of the global batch that a rank passes to a call, and the part that its
  program takes;
- ``data_loading``: what a user calls for it on the compiled module;
- ``sampler``: the samples of a replica, epoch by epoch;
- ``device_batches``: a loader whose next batch is copied to the device while a step runs.
"""
