"""Cluster files: the contents of the presets, and the errors of invalid files."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autopar.cost_model import Cluster, Level
from autopar.errors import PlanError

PRESETS = ("a100-sxm", "b200-sxm", "cpu", "h100-sxm", "h200-sxm", "p100", "v100-sxm2")


def figures(cluster: Cluster) -> set[str]:
    """The path of each number in a cluster."""
    device = asdict(cluster.device)
    paths = {f"device.{name}.{key}" for name in ("peak", "efficiency") for key in device.pop(name)}
    if not cluster.device.products:
        device.pop("products")
    if not cluster.device.tiles:
        paths -= {"device.tiles"}
        device = {
            name: value for name, value in device.items() if name not in ("units", "tiles", "inner")
        }
    alike = [n for n in ("ranks_per_core", "unaligned") if getattr(cluster.device, n) == 1]
    told = ("name", "kind", *alike)
    paths |= {f"device.{name}" for name in device if name not in told}
    # Eager PyTorch joins no kernels; software that does so says where that is known from.
    without = ("name", *["fuses"] * (not cluster.software.fuses))
    software = [name for name in asdict(cluster.software) if name not in without]
    paths |= {f"software.{cluster.software.name}.{name}" for name in software}
    for level in cluster.links:
        paths |= {
            f"links.{level.name}.{name}"
            for name in ("size", "latency", "bandwidth", "efficiency", "startup")
        }
        paths |= {
            f"links.{level.name}.{name}"
            for name in ("by_ranks", "collectives", "measured")
            if getattr(level, name)
        }
    return paths


@pytest.mark.parametrize("name", PRESETS)
def test_each_figure_of_a_preset_has_a_source(name: str) -> None:
    cluster = Cluster.load(name)
    assert (cluster.name, cluster.software.name) == (name, "eager")
    assert set(cluster.sources) == figures(cluster)


def test_a_figure_that_is_said_to_be_another_presets_is() -> None:
    """Sources that begin with "as in the NAME preset" are true."""
    found = 0
    for name in PRESETS:
        cluster = Cluster.load(name)
        for path, source in cluster.sources.items():
            if source.startswith("as in the "):
                other = Cluster.load(source.split()[3])
                assert figure(cluster, path) == figure(other, path), (name, path)
                found += 1
    assert found


def figure(cluster: Cluster, path: str) -> object:
    """The figure of a cluster that a path such as "links.nvlink.latency" names."""
    part, name, *rest = path.split(".")
    if part == "links":
        return next(getattr(level, rest[0]) for level in cluster.links if level.name == name)
    if part == "software":
        return getattr(cluster.software, rest[0])
    value = getattr(cluster.device, name)
    return value[".".join(rest)] if rest else value


def test_the_software_is_a_part_of_a_cluster_apart_from_the_hardware() -> None:
    """One file, one hardware, several programs; the name of the cluster says which."""
    eager = Cluster.load("a100-sxm")
    megatron = Cluster.load("a100-sxm", software="megatron-deepspeed")
    assert megatron == Cluster.load("a100-sxm:megatron-deepspeed")
    assert (megatron.device, megatron.links) == (eager.device, eager.links)
    assert megatron.software.launch > eager.software.launch
    assert megatron.name == "a100-sxm:megatron-deepspeed"
    assert set(megatron.sources) == figures(megatron)
    with pytest.raises(
        PlanError, match="software='lightning': this cluster describes eager, inductor, mega"
    ):
        Cluster.load("a100-sxm", software="lightning")


def test_the_reserve_is_no_memory_for_tensors() -> None:
    a100 = Cluster.load("a100-sxm")
    assert a100.usable_memory == 80 * 10**9 == a100.device.memory - a100.software.reserve
    with pytest.raises(PlanError, match=r"reserve is .* of a device's 85899345920: give less"):
        replace(a100, software=replace(a100.software, reserve=a100.device.memory))


def test_presets_are_those_of_the_datasheets() -> None:
    assert Cluster.presets() == PRESETS
    a100, h100 = Cluster.load("a100-sxm"), Cluster.load("h100-sxm")
    assert a100.device.peak["bfloat16"] == 312e12
    assert h100.device.peak["bfloat16"] == 989e12
    assert [level.bandwidth for level in a100.links] == [300e9, 8 * 200e9 / 8]
    assert [level.bandwidth for level in h100.links] == [450e9, 8 * 400e9 / 8]
    assert a100.capacity == math.inf
    assert [Cluster.load(name).device.kind for name in PRESETS] == [
        "cuda",
        "cuda",
        "cpu",
        "cuda",
        "cuda",
        "cuda",
        "cuda",
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_saved_and_loaded_is_the_same(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name)
    cluster.save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert loaded == cluster
    assert loaded.sources == cluster.sources
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    cluster = Cluster.load("cpu")
    cluster.save(path)
    broken = replace(cluster, sources={"device.memory": object()})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        broken.save(path)
    assert Cluster.load(path) == cluster
    assert [found.name for found in tmp_path.iterdir()] == ["cluster.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=0), "schema is 0, this version reads 3"),
        (lambda d: d.pop("schema"), "schema is None"),
        (lambda d: d["device"].pop("memory_bandwidth"), "missing device.memory_bandwidth"),
        (lambda d: d["links"][0].pop("latency"), r"missing links\[0\].latency"),
        (lambda d: d["device"].update(speed=1), "unknown device.speed"),
        (lambda d: d["device"].update(memory="80 GB"), "device.memory is '80 GB'"),
        (lambda d: d["device"].update(kind="gpu"), "device.kind is 'gpu': give cpu or cuda"),
        (lambda d: d["software"]["eager"].update(overlap=1.5), "software.eager.overlap is 1.5"),
        (lambda d: d["software"]["eager"].pop("launch"), "missing software.eager.launch"),
        (lambda d: d["software"]["eager"].update(speed=1), "unknown software.eager.speed"),
        (lambda d: d.update(software={}), "figures of at least one software by name"),
        (
            lambda d: d["links"][0].update(measured={"gossip": {}}),
            "links.loopback gives figures of 'gossip'",
        ),
        (
            lambda d: d["links"][0].update(collectives={"all_gather": {"startup": 1.0}}),
            r"missing links\[0\].collectives.all_gather.latency",
        ),
        (
            lambda d: d["device"]["efficiency"].pop("matmul"),
            "give points for matmul and elementwise at least",
        ),
        (
            lambda d: d["device"]["efficiency"].update({"conv.int8": [[1, 1]]}),
            "device.efficiency.conv.int8: give a kind of kernel",
        ),
        (
            lambda d: d["device"]["efficiency"].update(conv=[[1, 2, 3]]),
            "device.efficiency.conv is .* give a list of points",
        ),
        (
            lambda d: d["device"]["efficiency"].update(conv=[[2, 0.1], [1, 0.2]]),
            "the work of its points must grow",
        ),
        (
            lambda d: d["device"]["efficiency"].update(conv=[[1, 99]]),
            "device.efficiency.conv at 1 is 99: at most 20",
        ),
        (
            lambda d: d["links"][0].update(measured={"all_reduce": {"2": []}}),
            "measured.all_reduce.2 is",
        ),
        (lambda d: d["device"]["peak"].pop("float32"), "float32 is required"),
        (lambda d: d["device"].update(peak=3e12), "device.peak is 3"),
        (lambda d: d["links"][0].update(bandwidth=0), "links.loopback.bandwidth is 0"),
        (lambda d: d["links"][0].update(size="8"), "links.loopback.size is '8'"),
        (lambda d: d.update(links=[]), "no links"),
        (lambda d: d.update(links={}), "links is dict"),
        (lambda d: d.update(device=[]), "device is list"),
        (lambda d: d.update(sources=[]), "sources is list: give an object"),
        (lambda d: d["links"][0].update(measured=[]), r"links\[0\].measured is list: give"),
        (lambda d: d["links"][0].update(collectives=[]), r"links\[0\].collectives is list"),
    ],
)
def test_a_bad_file_is_told_what_is_wrong(change, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    Cluster.load("cpu").save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message) as error:
        Cluster.load(path)
    assert str(path) in str(error.value)


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match="no cluster 'h100': the presets are a100-sxm, b200-sxm, cpu, h100-sxm"
    ):
        Cluster.load("h100")
    with pytest.raises(PlanError, match="No such file"):
        Cluster.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(PlanError, match="not JSON"):
        Cluster.load(tmp_path / "text.json")


def test_levels_must_nest() -> None:
    cluster = Cluster.load("a100-sxm")
    nvlink, network = cluster.links
    with pytest.raises(PlanError, match="12 devices, no multiple of the 8"):
        replace(cluster, links=(nvlink, replace(network, size=12)))
    with pytest.raises(PlanError, match="'nvlink' has no size"):
        replace(cluster, links=(replace(nvlink, size=None), network))


def test_a_cluster_of_one_node_has_a_capacity() -> None:
    node = replace(Cluster.load("a100-sxm"), links=(Level("nvlink", 8, 3e-6, 300e9),))
    node.check(8)
    with pytest.raises(PlanError, match="world_size=16 needs 16 devices, cluster 'a100-sxm' has 8"):
        node.check(16)
