"""The file of a measured machine: kept, read again, and refused when it is broken, old or of another machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.planner.hardware import find_hardware
from fourfold.planner.hardware.machine import Cluster, Device, Node
from fourfold.planner.hardware.measured import Identity, Measurement, NotMeasured, measurement_file

DEVICE = Device("Mine", "cpu", 10**10 + 1, 3.25e9, {"float32": 1.5e11}, source="measured")
CLUSTER = Cluster(Node(DEVICE, host_memory=10**10 + 1, disk=7, disk_bandwidth=0.1), notes=("a note",))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def keep(identity: Identity | None = None, age: float = 0.0) -> Path:
    file = measurement_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    measured = Measurement(
        measured_at=time.time() - age, identity=identity or Identity.of_this(), cluster=CLUSTER, findings={"x, s": 0.1}
    )
    file.write_text(measured.model_dump_json())
    return file


def test_a_measured_machine_is_read_exactly(tmp_path: Path) -> None:
    file = keep()
    assert file == tmp_path / "cache" / "fourfold" / "machine.json"
    assert find_hardware("detect") == CLUSTER


def test_the_folder_without_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert measurement_file() == Path.home() / ".cache" / "fourfold" / "machine.json"


def test_no_measurement_says_how_to_make_one() -> None:
    with pytest.raises(NotMeasured, match=r"has not been measured; `fourfold bench machine`"):
        find_hardware("detect")


def test_another_machine_is_refused_with_what_changed() -> None:
    this = Identity.of_this()
    for other, said in (
        (replace(this, processor="6502"), "processor was '6502'"),
        (replace(this, cores=this.cores + 1), f"cores was {this.cores + 1} and is {this.cores}"),
        (replace(this, memory=this.memory // 2), "memory was"),
        (replace(this, gpus=("NVIDIA H200",)), "gpus was"),
    ):
        keep(other)
        with pytest.raises(NotMeasured, match="is not of this machine now") as caught:
            find_hardware("detect")
        assert said in str(caught.value)


def test_what_a_kernel_keeps_at_a_start_is_no_other_machine() -> None:
    this = Identity.of_this()
    keep(replace(this, memory=round(this.memory * 1.01)))
    assert find_hardware("detect") == CLUSTER


def test_an_old_measurement_is_refused() -> None:
    keep(age=29 * 86400)
    assert find_hardware("detect") == CLUSTER
    for age in (31 * 86400, -3 * 86400):
        keep(age=age)
        with pytest.raises(NotMeasured, match=r"days old, allowed are 30"):
            find_hardware("detect")


def test_broken_files_and_those_of_another_version_are_refused() -> None:
    file = keep()
    tree = json.loads(file.read_text())
    texts = ["", "{", "[]", json.dumps({**tree, "format": 1}), json.dumps({**tree, "more": 1})]
    texts.append(json.dumps({**tree, "cluster": {**tree["cluster"], "nodes": "1"}}))
    texts.append(json.dumps({key: value for key, value in tree.items() if key != "cluster"}))
    for text in texts:
        file.write_text(text)
        with pytest.raises(NotMeasured, match=r"broken or of another version \(.*bench machine"):
            find_hardware("detect")


def test_it_is_read_without_torch() -> None:
    keep()
    code = (
        "import sys; from fourfold.planner.hardware import find_hardware; find_hardware('detect'); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
