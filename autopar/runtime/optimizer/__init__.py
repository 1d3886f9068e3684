"""What happens to a program's parameters between the backward and the next step?

``gradient_clipping``, ``step_hooks`` (every step of one of torch's optimizers), ``local_updates``
(of this rank's parts of DTensors), ``host_state`` (the state that the host keeps between steps),
``checkpoints`` (the optimizer's state under a pipeline), ``untrained_model`` (a warning where the
model that was compiled is saved).
"""
