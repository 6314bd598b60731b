"""The list of faults stays current: each can still be put in, and names tests that exist."""

from __future__ import annotations

import pytest

from tests.mutants.faults import ROOT, Fault, load_faults

FAULTS = load_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    faulty = fault.applied(source)
    if fault.file.endswith(".py"):
        compile(faulty, fault.file, "exec")
    assert [test for test in fault.tests if not (ROOT / test.partition("::")[0]).exists()] == []


def test_the_list_covers_every_room_and_has_few_known_survivors() -> None:
    rooms = {fault.file.split("/")[1] for fault in FAULTS}
    packages = [
        path for top in ("swarm_node", "kernels", "protocols") for path in (ROOT / top).iterdir() if (path / "__init__.py").exists()
    ]
    assert {path.name for path in packages} <= rooms
    assert len(FAULTS) >= 60
    assert len([fault for fault in FAULTS if fault.survives]) <= 3
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
