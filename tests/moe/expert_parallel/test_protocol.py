"""`_exchange_rows_kernel` between GPUs that run at the same time.

The kernel's programs are interpreted in processes of their own, whose memory is shared. That takes
some orders of their steps. A model of the kernel goes through every order, for few programs: two or
three devices exchange a few times. On each, one program reads, and one writes for each peer.
A program is a list of steps on the devices' memory, each of which may have to wait: the kernel's,
one for each access of memory that another program writes. All states that any order of steps leads
to are visited: no row may be read that is not of the exchange it is read for, and no state may be
stuck.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest


class Device(NamedTuple):
    """A device's memory, and where its programs are. Flags and rows are of two turns."""

    come: tuple[int, ...]  # by peer
    flags: tuple[int, ...]
    rows: tuple[int, ...]  # the exchange that they are of
    epoch: int
    at: tuple[int, ...]  # the next step of each program


State = tuple[Device, ...]
Step = Callable[[State], State | None]  # None: it has to wait


def put(items: tuple, index: int, item: object) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def steps(me: int, devices: int, program: int, fault: str) -> list[Step]:
    """The steps of one program of a device; program 0 reads."""

    def epoch(state: State) -> int:
        return state[me].epoch + 1

    def place(state: State, sender: int, of: str) -> int:
        """Where the flag or row of a sender is. Chunks differ in each exchange, and so do flags."""
        turn = 0 if fault == f"one set of {of}" else epoch(state) % 2
        return turn * devices + (sender + (epoch(state) if of == "flags" else 0)) % devices

    def is_sent(state: State, sender: int, receiver: int) -> bool:
        """Not every device has rows for every other one."""
        return sender < receiver or epoch(state) % 3 == 0

    def changed(state: State, device: int, **fields: object) -> State:
        return put(state, device, state[device]._replace(**fields))

    def come(peer: int) -> Step:
        return lambda state: changed(state, peer, come=put(state[peer].come, me, epoch(state)))

    def wait_for_come(peer: int) -> Step:
        return lambda state: state if state[me].come[peer] >= epoch(state) else None

    def put_there(peer: int, of: str) -> Step:
        """Writes a row, or raises its flag."""

        def run(state: State) -> State:
            if not is_sent(state, me, peer):
                return state
            items = put(getattr(state[peer], of), place(state, me, of), epoch(state))
            return changed(state, peer, **{of: items})

        return run

    def wait_for_flag(peer: int) -> Step:
        def run(state: State) -> State | None:
            raised = state[me].flags[place(state, peer, "flags")] == epoch(state)
            return state if raised or not is_sent(state, peer, me) else None

        return run

    def read(peer: int) -> Step:
        def run(state: State) -> State:
            row = state[me].rows[place(state, peer, "rows")]
            assert row == epoch(state) or not is_sent(state, peer, me), "a wrong row"
            return state

        return run

    peers = [peer for peer in range(devices) if peer != me]
    if program:
        peer = peers[program - 1]
        ways = [put_there(peer, "rows"), put_there(peer, "flags")]
        return ways[::-1] if fault == "the flag first" else ways
    reads = [step for peer in peers for step in (wait_for_flag(peer), read(peer))]
    if fault == "no wait for flags":
        reads = reads[1::2]
    waits = [] if fault == "no wait for peers" else [wait_for_come(peer) for peer in peers]
    return [*(come(peer) for peer in peers), *reads, *waits]


def explore(devices: int, exchanges: int, fault: str = "") -> int:
    """Visits all states; returns how many there are. Raises for a wrong row or a stuck state."""
    of = [[steps(d, devices, p, fault) for p in range(devices)] for d in range(devices)]
    ends = tuple(map(len, of[0]))

    def following(state: State) -> Iterator[State]:
        for me, here in enumerate(state):
            if here.epoch == exchanges:
                continue
            for program, at in enumerate(here.at):
                if at == ends[program]:
                    continue
                after = of[me][program][at](state)
                if after is None:
                    continue
                now = after[me]._replace(at=put(here.at, program, at + 1))
                if now.at == ends:  # the last program counts, and the next launch may begin
                    now = now._replace(at=(0,) * devices, epoch=now.epoch + 1)
                yield put(after, me, now)

    zeros = (0,) * devices
    start = Device(zeros, 2 * zeros, 2 * zeros, 0, zeros)
    states = {(start,) * devices}
    todo = list(states)
    while todo:
        state = todo.pop()
        new = set(following(state))
        assert new or all(device.epoch == exchanges for device in state), "stuck"
        new -= states
        states |= new
        todo += new
    return len(states)


@pytest.mark.parametrize(
    ("devices", "exchanges", "states"),
    [(2, 7, 1_000), pytest.param(3, 2, 600_000, marks=pytest.mark.slow("visits 683,541 states"))],
)
def test_every_order_is_right(devices, exchanges, states):
    assert explore(devices, exchanges) > states


@pytest.mark.parametrize(
    ("fault", "devices", "exchanges"),
    [
        ("the flag first", 2, 1),
        ("no wait for flags", 2, 1),
        ("no wait for peers", 2, 5),
        ("one set of rows", 2, 3),
        ("one set of flags", 3, 3),
    ],
)
def test_faults_are_found(fault, devices, exchanges):
    with pytest.raises(AssertionError, match=r"stuck|a wrong row"):
        explore(devices, exchanges, fault)


@pytest.mark.parametrize(
    ("devices", "seed"),
    [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow("35 processes that interpret"))],
)
def test_programs_in_processes_of_their_own(devices, seed):
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.moe.expert_parallel.programs_of_gpus",
            str(devices),
            str(seed),
        ],
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    # Of each GPU: the exchanges, no peer that has died, and nothing that is still counted.
    ends = [[5, 0, 0, 0]] * devices
    assert done.stdout == f"exit codes {{0}}, {ends}\n", done.stderr
