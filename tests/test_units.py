"""Models are cut between layers and halves of layers, where fewest tensors are alive; and where the
user cuts them.
"""

from __future__ import annotations

import itertools

import pytest
import small_graphs
import torch.fx as fx
import zoo

from autopar.errors import PlanError
from autopar.rules.analysis import Analysis
from autopar.search.pipeline.units import Units, split_into_units
from autopar.search.space.user_cuts import user_cut_nodes

HEAVY = ("matmul", "conv", "attention")
MODELS = ["gpt2", "llama", "mixtral", "bert", "vit", "t5", "unet", "cnn", "mixer", "mlp"]


def analysed(name: str, layers: int = 2) -> Analysis:
    return small_graphs.analyse(*getattr(zoo, name)(batch=8, layers=layers))


def found(analysis: Analysis) -> Units:
    return split_into_units(analysis, analysis.duplicated)


def calls(analysis: Analysis) -> list[fx.Node]:
    return [
        n for n in analysis.graph.nodes if n.op == "call_function" and n not in analysis.duplicated
    ]


def alive(analysis: Analysis, start: fx.Node) -> list[fx.Node]:
    """The tensors that a stage which starts here would receive."""
    order = calls(analysis)
    place = {n: i for i, n in enumerate(order)}
    at = place[start]
    return [n for n in order[:at] if any(place.get(user, -1) >= at for user in n.users)]


def modules(analysis: Analysis) -> list[str]:
    return [start.meta["module"] for start in found(analysis).starts[1:]]


@pytest.mark.parametrize("name", MODELS)
def test_units_are_the_graph_in_order(name: str) -> None:
    """Every call is in one unit, except calls that each stage runs for itself. Each unit has a
    heavy call.
    """
    analysis = analysed(name)
    parts = found(analysis)
    assert [n for unit in parts.nodes for n in unit] == calls(analysis)
    assert parts.duplicated == analysis.duplicated
    for unit in parts.nodes[:-1]:
        rules = [analysis.rules[n] for n in unit]
        assert (
            any(rule is not None and rule.kind in HEAVY for rule in rules) or unit is parts.nodes[0]
        )


@pytest.mark.parametrize("name", MODELS)
def test_no_place_near_by_is_better(name: str) -> None:
    """The tensors at one cut never contain all tensors of the next cut."""
    analysis = analysed(name)
    crossing = [set(alive(analysis, start)) for start in found(analysis).starts[1:]]
    for one, other in itertools.pairwise(crossing):
        assert not one < other
        assert not other < one


@pytest.mark.parametrize(
    ("name", "halves"),
    [
        ("gpt2", "transformer.h.{}.ln_1 transformer.h.{}.ln_2"),
        ("llama", "model.layers.{}.input_layernorm model.layers.{}.post_attention_layernorm"),
        ("mixtral", "model.layers.{}.input_layernorm model.layers.{}.post_attention_layernorm"),
    ],
)
def test_transformers_are_cut_where_only_the_residual_stream_goes_on(
    name: str, halves: str
) -> None:
    analysis, layers = analysed(name, 4), 4
    starts = [half.format(i) for i in range(layers) for half in halves.split()]
    assert modules(analysis)[: 2 * layers] == starts
    assert all(len(alive(analysis, start)) == 1 for start in found(analysis).starts[1:])
    assert len(found(analysis).nodes) == 2 * layers + 2  # the embedding, and the head


def test_vit_is_cut_between_its_layers() -> None:
    analysis = analysed("vit", 4)
    single = [s.meta["module"] for s in found(analysis).starts[1:] if len(alive(analysis, s)) == 1]
    halves = [
        f"vit.layers.{i}.layernorm_{when}" for i in range(1, 4) for when in ("before", "after")
    ]
    assert set(halves) <= set(single)


def test_t5_takes_the_encoders_result_along() -> None:
    analysis = analysed("t5", 3)
    places = {s.meta["module"]: alive(analysis, s) for s in found(analysis).starts[1:]}
    assert {f"encoder.block.{i}.layer.0.layer_norm" for i in range(1, 3)} <= set(places)
    halves = {f"decoder.block.{i}.layer.{j}.layer_norm" for i in range(1, 3) for j in range(3)}
    assert halves <= set(places)
    encoded = next(n for n in reversed(calls(analysis)) if n.meta["module"].startswith("encoder."))
    for module in halves - {
        "decoder.block.2.layer.2.layer_norm"
    }:  # the last reader of the encoder is before this cut
        sent = places[module]
        assert any(n.meta["module"].startswith("encoder.") for n in sent), (module, encoded)
        assert (
            len(sent) <= 3
        )  # also the decoder's residual stream, and the position bias while layers read it


def test_a_unet_is_cut_where_few_skips_are_open() -> None:
    """On the way down skip connections pile up. The cuts are before and after them, and not at the
    bottom, where all of them would cross.
    """
    analysis = analysed("unet", 3)
    parts = found(analysis)
    crossing = {s: alive(analysis, s) for s in parts.starts[1:]}
    assert all(len(sent) == 1 for sent in crossing.values())
    assert {s.meta["module"] for s in parts.starts} >= {"enter", "leave"}
    below = [n for n in calls(analysis) if n.meta["module"].startswith("down.2")]
    assert not set(below) & set(parts.starts)


def test_a_cnn_is_cut_between_its_blocks() -> None:
    analysis = analysed("cnn", 4)
    single = [s.meta["module"] for s in found(analysis).starts[1:] if len(alive(analysis, s)) == 1]
    for block in range(4, 9):  # blocks of the body, after the stem
        assert any(module.startswith(f"body.{block}") for module in single), (block, single)


def test_a_cut_asked_for_is_a_start() -> None:
    analysis = analysed("gpt2")
    inside = next(n for n in calls(analysis) if n.meta["module"] == "transformer.h.0.mlp.c_proj")
    assert inside not in found(analysis).starts
    parts = split_into_units(analysis, analysis.duplicated, [inside])
    assert inside in parts.starts
    assert set(found(analysis).starts) < set(parts.starts)


def test_cuts_by_hand() -> None:
    analysis = analysed("gpt2", 12)
    cuts = user_cut_nodes(analysis, ["transformer.h.1", "transformer.h.10", "transformer.ln_f"])
    assert [n.meta["module"] for n in cuts] == [
        "transformer.h.1.ln_1",
        "transformer.h.10.ln_1",
        "transformer.ln_f",
    ]
    assert all(n in found(analysis).starts for n in cuts)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["transformer.h.7"],
            r"'transformer.h.7', which is no module that runs; nearest: .*transformer.h.1",
        ),
        (["transformer"], "where the model begins: stage 0 would be empty"),
        (["transformer.wte"], "where the model begins: stage 0 would be empty"),
        (
            ["transformer.h.1", "transformer.h.0"],
            "makes a cycle: 'transformer.h.0' runs before 'transformer.h.1'",
        ),
        (
            ["transformer.h.1", "transformer.h.1"],
            "names 'transformer.h.1' twice: the stage between would be empty",
        ),
        (["nonsense"], "which is no module that runs; nearest: "),
    ],
)
def test_bad_cuts_by_hand(names: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        user_cut_nodes(analysed("gpt2"), names)
