"""Clusters from tables of measured kernels, and the preset that is made of one."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import b200
import b200_preset
import numpy as np
import pytest

from autopar.cost_model import Cluster, ComputeCosts
from autopar.cost_model.products import Product, ProductRates
from autopar.errors import PlanError

HEADER = "kernel,shape,TFLOP/s\n"
TABLE = f"""{HEADER}matmul,"b=1, m=4096, k=8192, n=1024",500
matmul,"m=4096, k=8192, n=2048, layout=TN",800
sdp_fwd,"batch=1, seq_len=4096, head_num=8, kv_head_num=1, qk_head_dim=128, v_head_dim=128",400
sdp_bwd,"batch=1, seq_len=4096, head_num=8, kv_head_num=1, qk_head_dim=128, v_head_dim=128",300
"""


@pytest.fixture
def measured(tmp_path: Path) -> Cluster:
    (tmp_path / "kernels.csv").write_text(TABLE)
    return Cluster.load("h100-sxm").from_measurements(tmp_path / "kernels.csv", "mine")


def test_measured_sizes_take_the_measured_seconds(measured: Cluster, tmp_path: Path) -> None:
    compute = ComputeCosts(measured)
    for columns, rate in ((1024, 500e12), (2048, 800e12)):
        flops = 2.0 * 4096 * 8192 * columns
        for product in ((1, 4096, columns, 8192), (1, columns, 4096, 8192)):
            found = compute.seconds("matmul", "bfloat16", flops, 0.0, product)
            assert flops / float(found) == pytest.approx(rate)
    half = 2.0 * 8 * 4096**2 * 128  # FLOPs of the scores that a causal mask keeps
    forward, backward = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    )
    for operator, flops, rate in ((forward, half, 400e12), (backward, 2.5 * half, 300e12)):
        found = compute.seconds("attention", "bfloat16", flops, 0.0, operator=operator)
        assert 2 * flops / float(found) == pytest.approx(rate, rel=1e-3)  # all scores count
    measured.save(tmp_path / "mine.json")
    assert Cluster.load(tmp_path / "mine.json") == measured
    assert measured.sources["device.products"] == "measured: kernels.csv"


def test_other_sizes_lie_between_their_neighbours(measured: Cluster) -> None:
    rates = ProductRates(measured.device.products)
    one, middle, far = (
        float(rates.share(np.array(1.0), np.array(4096.0), np.array(n), np.array(8192.0)))
        for n in (1024.0, 1448.0, 2.0**40)
    )
    shares = sorted(p.share for p in measured.device.products)
    assert one == shares[0] < middle < shares[1]
    assert middle == pytest.approx(sum(shares) / 2, rel=0.01)
    assert shares[0] <= far <= shares[1]
    assert rates.largest == shares[1]
    twice = ProductRates([Product(1, 8, 8, 8, 0.25), Product(1, 8, 8, 8, 0.75)])
    assert float(twice.share(*(np.array(n) for n in (1.0, 8.0, 8.0, 8.0)))) == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernel,shape\n", "has the columns kernel, shape: give kernel, shape, and one of"),
        (
            f"{HEADER}fft,n=4,5\n",
            "line 2: kernel 'fft' is unknown; the kernels are matmul, group_m",
        ),
        (f'{HEADER}matmul,"m=1, k=2, n=3",fast\n', "line 2: TFLOP/s is 'fast': give a number"),
        (f'{HEADER}matmul,"m=1, k=2, n=3",2000\n', "line 2: device.products.share is 2.0"),
        (f'{HEADER}matmul,"m=1, k=2",5\n', "line 2: device.products.columns is 0"),
        (f"{HEADER}sdp_fwd,batch=1,5\n", "line 2: the shape of sdp_fwd lacks 'head_num'"),
    ],
)
def test_a_bad_table_is_told_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "kernels.csv").write_text(text)
    with pytest.raises(PlanError, match=message) as error:
        Cluster.load("h100-sxm").from_measurements(tmp_path / "kernels.csv", "mine")
    assert "kernels.csv" in str(error.value)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the table"):
        Cluster.load("h100-sxm").from_measurements(tmp_path / "none.csv", "mine")


def test_the_preset_is_made_of_the_table_alone() -> None:
    assert json.loads(b200_preset.PRESET.read_text()) == json.loads(
        json.dumps(b200_preset.preset())
    )


@pytest.mark.slow
def test_measured_runs_are_predicted() -> None:
    """Four runs that nothing was fitted to: the mean error of the step is at most 5 %."""
    on = Cluster.load("b200-sxm", software=b200_preset.SOFTWARE)
    off = [abs(b200.predicted(run, on).step_time / run.seconds - 1) for run in b200.runs()]
    assert len(off) == 4
    assert statistics.mean(off) < 0.05
