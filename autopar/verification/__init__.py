"""Do the captured graph and the plan compute what the model computes on one device?

Reading order: ``differences`` compares the results of two steps. ``one_step`` runs one step of the
model, and of its graph. ``whole_batch`` compares them on the whole sample, with the help of
``first_difference`` for the error message. ``few_samples`` compares them on a few samples, in less
time.
"""
