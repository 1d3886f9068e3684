"""How does a model become a graph? torch.export traces it on a sample of its input.

Reading order: ``capture_graph`` is the entry. ``sample_call`` calls a model with a sample,
``export_program`` runs torch.export and explains its failures, and ``exported_graph`` turns the
result into a captured model. ``function_operator`` and ``function_tracer`` keep calls of
``torch.autograd.Function`` whole, ``function_graph`` traces the operators of one,
``refused_calls`` refuses calls that a graph cannot contain.
``hooks`` checks a model's hooks, ``module_state`` restores a model after a run. ``trace_state``
tells whether anything changed that a trace may read, ``code_names``, ``state_parts`` and
``process_state`` help it.
"""
