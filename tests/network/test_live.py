"""Real nodes on loopback: bodies cross whole, and whatever dies comes back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from swarm_protocols.limits import DEFAULT_LIMITS

from swarm_node.network import addresses
from swarm_node.network.addresses import Address, ListenError, check_free, free_addresses
from swarm_node.network.gossip import Received
from swarm_node.network.identity import load_or_create
from swarm_node.network.libp2p.peers_file import read_peers
from swarm_node.network.live import Libp2pGossip, Totals
from swarm_node.network.swarm_id import swarm_id
from tests.support.live_network import SWARM, await_bodies, await_peers, exchange, listening, loopback, make_body, node
from tests.support.waiting import await_condition

Pair = tuple[Libp2pGossip, Libp2pGossip]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes that are connected."""
    folder = tmp_path_factory.mktemp("pair")
    with node(folder / "alice") as alice, node(folder / "bob", peers=listening(alice)) as bob:
        await_peers(bob, alice)
        await_peers(alice, bob)
        yield alice, bob


def test_a_small_group_travels_inline_and_whole(pair: Pair) -> None:
    alice, bob = pair
    exchange(alice, bob)
    exchange(bob, alice)


def test_a_large_group_is_announced_and_pulled(pair: Pair) -> None:
    alice, bob = pair
    body = make_body(alice.peer_id, tokens=30_000)
    assert DEFAULT_LIMITS.inline_bytes < len(body) < DEFAULT_LIMITS.body_bytes
    alice.publish(body)
    assert await_bodies(bob, 1) == [Received(alice.peer_id, body)]


def test_a_burst_arrives_complete_and_in_order(pair: Pair) -> None:
    # More than libp2p's queues of 32 hold; the sender's own queue holds 64.
    alice, bob = pair
    bodies = [make_body(alice.peer_id, tokens=400) for _ in range(60)]
    for body in bodies:
        alice.publish(body)
    assert [received.body for received in await_bodies(bob, 60)] == bodies


def test_what_admission_refuses_is_counted_and_not_delivered(pair: Pair) -> None:
    alice, bob = pair
    before = dict(bob.report().rejections)
    alice.publish(make_body(bob.peer_id))  # a problem that alice was not given
    exchange(alice, bob)
    await_condition(lambda: bob.report().rejections.get("not_assigned", 0) == before.get("not_assigned", 0) + 1, "the refusal is counted")


def test_the_report_names_what_others_dial(pair: Pair) -> None:
    alice, bob = pair
    report = alice.report()
    assert report.peers == 1
    assert report.peer_ids == (bob.peer_id,)
    assert report.trouble == ""
    assert report.directory_addresses == ()
    (address,) = report.addresses
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert address.endswith(f"/p2p/{alice.peer_id}")
    assert "/tcp/0/" not in address


@pytest.mark.parametrize("module", ["live", "simulated.network"])
def test_the_main_process_imports_neither_libp2p_nor_hivemind(module: str) -> None:
    program = f"import sys, swarm_node.network.{module}; print([m for m in ('libp2p', 'hivemind', 'torch', 'trio') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_node_alone_says_what_it_waits_for_and_never_blocks(tmp_path: Path) -> None:
    with node(tmp_path / "alone") as alone:
        for _ in range(200):
            alone.publish(make_body(alone.peer_id))
            alone.progress(3, "tiny")
            assert alone.drain() == []
        listening(alone)
        assert "no peers yet" in alone.report().trouble
        assert alone.report().published == 0
        alone.close()
        alone.close()
        alone.publish(b"after the end")
        assert alone.drain() == []


def test_a_dead_bootstrap_is_dialled_until_it_comes_up_and_late_joiners_get_the_last_groups(tmp_path: Path) -> None:
    identity = load_or_create(tmp_path / "alice")
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    with node(tmp_path / "bob", peers=(address,)) as bob:
        waiting = make_body(bob.peer_id)
        bob.publish(waiting)
        await_condition(lambda: "did not answer 2 times (" in bob.report().trouble, "two failed attempts are shown")
        assert address in bob.report().trouble
        with node(tmp_path / "alice", listen=(f"/ip4/127.0.0.1/tcp/{port}",)) as alice:
            await_peers(bob, alice)
            assert await_bodies(alice, 1) == [Received(bob.peer_id, waiting)]
            exchange(alice, bob)


def test_a_restart_keeps_the_identity_and_finds_remembered_peers(pair: Pair, tmp_path: Path) -> None:
    alice, _ = pair
    with node(tmp_path, peers=listening(alice)) as carol:
        first_life = carol.peer_id
        await_peers(carol, alice)
        exchange(carol, alice)
        await_condition(lambda: alice.peer_id in [address.peer for address in read_peers(tmp_path)], "the peer is remembered")
    await_condition(lambda: first_life not in alice.report().peer_ids, "the leaver is noticed")
    with node(tmp_path) as carol:  # no peers given
        assert carol.peer_id == first_life
        await_peers(carol, alice)
        exchange(carol, alice)
        exchange(alice, carol)


def test_a_third_node_knows_only_a_name_and_hears_of_the_first_over_the_second(pair: Pair, tmp_path: Path) -> None:
    alice, bob = pair
    port = listening(bob)[0].split("/")[4]
    with node(tmp_path / "carol", peers=(f"/dns4/localhost/tcp/{port}",), remember=False, max_peers=1) as carol:
        await_peers(carol, bob)
        exchange(alice, carol)
        exchange(carol, alice, tokens=30_000)  # alice is not connected to carol: the body is pulled from bob, who pulled it
        assert alice.peer_id not in carol.report().peer_ids


def test_a_swarm_that_began_around_one_node_survives_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with node(tmp_path / "hub") as hub:
            spokes = [stack.enter_context(node(tmp_path / name, peers=listening(hub), remember=False)) for name in ("dan", "eve")]
            await_peers(hub, *spokes)
            await_peers(spokes[0], spokes[1])  # each heard of the other from the hub
        exchange(spokes[0], spokes[1])
        await_condition(lambda: spokes[0].report().peer_ids == (spokes[1].peer_id,), "the hub is gone")
        exchange(spokes[0], spokes[1])


def test_nodes_of_another_swarm_never_exchange(pair: Pair, tmp_path: Path) -> None:
    alice, bob = pair
    with node(tmp_path / "stranger", peers=listening(alice), swarm="f" * 32) as stranger:
        await_condition(lambda: "none of them is in this swarm" in stranger.report().trouble, "the stranger says why it is alone")
        assert stranger.peer_id not in alice.report().peer_ids
        stranger.publish(make_body(stranger.peer_id))
        exchange(bob, alice)
        exchange(alice, bob)
        assert stranger.drain() == []
        assert stranger.report().published == 0


def test_a_taken_port_is_replaced_and_said_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        free, moved = free_addresses([Address("ip4", "127.0.0.1", port), Address("ip4", "127.0.0.1", 0)])
        assert [address.port for address in free] == [0, 0]
        assert len(moved) == 1
        assert str(port) in moved[0]
    free, notices = free_addresses([Address("ip4", "192.0.2.77", port)])
    assert free == []
    assert "cannot listen on /ip4/192.0.2.77" in notices[0]
    assert free_addresses([Address("ip4", "127.0.0.1", port)]) == ([Address("ip4", "127.0.0.1", port)], ())


def test_addresses_that_were_asked_for_are_had_together_or_an_error_names_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "PATIENCE_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"/tcp/{port}: process {os.getpid()} \(.+\) holds port {port}\. Stop it"):
            check_free([Address("ip4", "127.0.0.1", 0), Address("ip4", "127.0.0.1", port)])
        for family in ("ip4", "ip6"):  # another family, or another address: not taken
            host = {"ip4": "127.0.0.2", "ip6": "::1"}[family]
            check_free([Address(family, host, port)])
    twice = Address("ip4", "127.0.0.1", port)
    check_free([twice])
    with pytest.raises(ListenError, match=f"holds port {port}"):
        check_free([twice, twice])
    with pytest.raises(ListenError, match=r"192\.0\.2\.77/tcp/0: Cannot assign .*Give an address of this machine"):
        check_free([Address("ip4", "192.0.2.77", 0)])


def test_a_port_that_becomes_free_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        taken.close()

    monkeypatch.setattr(time, "sleep", wait)
    check_free([Address("ip4", "127.0.0.1", taken.getsockname()[1])])
    assert len(waits) == 1


def test_a_host_that_was_told_where_to_listen_listens_nowhere_else(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with node(tmp_path, listen=(f"/ip4/127.0.0.1/tcp/{port}",)) as alone:
            await_condition(lambda: "cannot listen on" in alone.report().trouble, "the trouble says what cannot be had")
            assert f"/ip4/127.0.0.1/tcp/{port}" in alone.report().trouble
            assert alone.report().addresses == ()
            taken.close()
            assert str(port) in listening(alone)[0]


def test_a_killed_network_process_comes_back_and_delivers(pair: Pair) -> None:
    alice, bob = pair
    exchange(alice, bob)
    killed = bob.pids["network"]
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await_condition(lambda: bob.report().restarts == 1, "the process is started again")
    bob.publish(make_body(bob.peer_id))  # no method minds
    assert bob.drain() == []
    await_peers(bob, alice)
    assert bob.pids["network"] != killed
    exchange(alice, bob)
    exchange(bob, alice)


def test_counts_go_on_over_restarts_of_the_process_that_counts() -> None:
    totals = Totals()
    totals.begin()
    totals.update({"published": 3, "rejections": {"stale": 2}})
    totals.update({"published": 5, "rejections": {"stale": 2, "replay": 1}})
    totals.begin()
    assert totals.current()["published"] == 5
    totals.update({"published": 1, "rejections": {"stale": 1}})
    current = totals.current()
    assert current["published"] == 6
    assert current["rejections"] == {"stale": 3, "replay": 1}
    assert current["received"] == 0
    totals.begin()
    totals.begin()  # a process that ended before it told anything
    assert totals.current()["published"] == 6
    assert totals.current()["rejections"] == {"stale": 3, "replay": 1}


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.support.live_network import loopback, RULES, SWARM, listening
from tests.support.waiting import await_condition
from swarm_node.network.live import Libp2pGossip, Totals
options = loopback(directory=True, directory_listen="/ip4/127.0.0.1/tcp/0")
gossip = Libp2pGossip.start(options, Path({str(tmp_path / "home")!r}), SWARM, RULES)
listening(gossip)
await_condition(lambda: gossip.report().directory_addresses, "the directory listens")
print("up", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) >= 3  # network, directory, and the directory's daemon
        parent.kill()
    await_condition(lambda: not any(_alive(member) for member in family), "every process of the node ended")


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_options_refuse_addresses_that_nobody_can_dial() -> None:
    for bad, why in [
        ("/ip4/127.0.0.1/tcp/4001", "/p2p/PEER-ID"),
        ("/ip4/0.0.0.0/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB", "cannot be dialled"),
        ("/dns4/node/tcp/0", "port 0"),
        ("/ip4/300.0.0.1/tcp/1", "not an IPv4 address"),
        ("/ip4/127.0.0.1/udp/1/quic-v1", "only TCP"),
        ("node-a:31310", "starts with /ip4/"),
        ("/dns4/node/tcp/4001/p2p/nobody", "not a peer id"),
        ("/dns4/node/tcp/4001/ws", "may follow the port"),
    ]:
        with pytest.raises(ValueError, match=why) as caught:
            loopback(peers=(bad,))
        assert bad in str(caught.value)
        assert "/ip4/192.0.2.7/tcp/31310/p2p/12D3KooW" in str(caught.value)
    assert loopback(peers=("/dns4/node-a/tcp/31310",)).peers == ("/dns4/node-a/tcp/31310",)


def test_the_swarm_id_separates_what_cannot_learn_together() -> None:
    same = swarm_id("test", "chain-sum", "0" * 16)
    assert same == SWARM
    others = {swarm_id("test2", "chain-sum", "0" * 16), swarm_id("test", "gsm8k", "0" * 16), swarm_id("test", "chain-sum", "1" * 16)}
    others.add(swarm_id("test", "chain-sum", "0" * 16, protocol_major=2))
    others.add(swarm_id("tes", "tchain-sum", "0" * 16))  # no boundary is lost
    assert len(others | {same}) == 6
