"""How does a program go through inductor, torch's compiler?

In reading order:

- ``backends``: the two ways to run a program, eager and inductor, and when one is compiled;
- ``compiler_graph``: a program as the compiler takes it, with what the backward recomputes;
- ``random_masks``: dropout in a compiled program;
- ``cuda_graphs``: a compiled program of one GPU, recorded and replayed;
- ``inductor``: the private names of torch's compiler;
- ``overlap``, ``early_products``: where it computes products: beside collectives, and where their
  operands are there;
- ``inductor_fixes``: its faults.
"""
