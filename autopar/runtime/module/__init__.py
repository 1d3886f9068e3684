"""What does a user call, train and save: the compiled module?

In reading order:

- ``compiled``: the module;
- ``signature``: its arguments and outputs;
- ``call_agreement``: all ranks make the same call;
- ``module_tree``: its parts, under the model's names;
- ``load_hooks``: the hooks of its parts on ``load_state_dict``;
- ``mode_overrides``: a model's own ``train()`` and ``eval()``;
- ``measurement``: how its steps are measured;
- ``wrappers``: which it refuses.
"""
