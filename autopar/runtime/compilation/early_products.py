"""Products are computed where their operands are there, and not where they are added. The private
names of inductor's passes over graphs are in this file alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@contextmanager
def early_products() -> Iterator[None]:
    """A context in which inductor does not defer a product to where another result is added to it.

    Inductor makes one kernel of a product and a sum. Where the embedding and the head of a language
    model share a weight, their gradients are added at the end of the backward, so the product for
    the head would keep the gradients of the logits until then.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class EarlyProducts(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            _take_apart(graph)

        def uuid(self) -> str:  # a part of the key of inductor's cache
            return "autopar's early products, 1"

    if config.post_grad_custom_post_pass is not None:  # the user's own pass takes its place
        yield
        return
    with config.patch(post_grad_custom_post_pass=EarlyProducts()):
        yield


def _take_apart(graph: fx.Graph) -> None:
    """Replaces a product with a sum by both, where other products come between the operands of the
    product and what is added to it.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    products = [i for node, i in place.items() if _is_product(node)]
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        added, *factors = node.args
        if node.kwargs or added.meta["val"].shape != node.meta["val"].shape:
            continue  # a bias, say
        last = max(factors, key=place.__getitem__)
        if not any(place[last] < i < place[added] for i in products):
            continue
        while last.op == "placeholder" and last.next.op == "placeholder":
            last = last.next
        with graph.inserting_after(last):
            product = graph.call_function(aten.mm.default, tuple(factors))
        with graph.inserting_before(node):
            total = graph.call_function(aten.add.Tensor, (added, product))
        product.meta, total.meta = dict(node.meta), dict(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _is_product(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry
