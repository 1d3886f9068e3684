"""What does torch do for one operator call? Saved tensors, kernels and memory, without a device.

Reading order: ``tensor_spec`` describes a tensor without values. ``operator_trace`` runs a call on
meta tensors and collects the results. ``kernel_launches`` records the kernels, ``footprint``
measures the memory, ``meta_kernels`` replaces operators that run other kernels on meta tensors, and
``fake_mesh`` lets kernels with collectives run without processes.
"""
