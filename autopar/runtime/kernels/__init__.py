"""What runs in place of an operator whose split form is more than the operator on each part?

In reading order: ``graph_kernels`` (all kernels that lowered graphs call), ``accumulation`` (the
dtype of sums), ``vocabulary`` (embedding and cross entropy with a cut vocabulary),
``normalisation`` (batch norm and layer norm with statistics over ranks), ``halo`` (convolution with
cut spatial dims), ``summa`` (a linear layer on a square of ranks) and ``ring_attention`` (attention
over a cut sequence). Ring attention stands on ``causal_tiles`` (which rank's queries attend to
which keys), ``fused_attention`` (torch's fused kernels for one block of keys) and
``plain_attention`` (the same from its definition).
"""
