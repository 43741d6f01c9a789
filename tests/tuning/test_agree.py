"""How long a process of a job waits for the config of another, by an imaginary clock."""

import types

import pytest

from triax.compat import jax_private
from triax.tuning import agree


class Client:
    """The service as process 1 of two sees it, where process 0 does all this.

    Attributes:
      claims: from when to when it has claimed the key.
      publishes: when it publishes a config, in seconds; None for never.
      unable: whether it cannot measure.
    """

    process, num_processes = 1, 2

    def __init__(self, claims=(0, 0), publishes=None, unable=False):
        self.claims, self.publishes = claims, publishes
        self.unable = {"0"} if unable else set()
        self.now = 0.0

    def find(self, key):
        if key == "triax/config/key":
            return "theirs" if self.publishes is not None and self.now >= self.publishes else None
        assert key == "triax/claim/key"
        return "0" if self.claims[0] <= self.now < self.claims[1] else None

    def claim(self, key, value):
        return self.find(key) or value

    def set_first(self, key, value, timeout_ms):
        assert key == "triax/unable/key/1"
        self.unable.add(value)
        return value

    def count(self, folder):
        assert folder == "triax/unable/key"
        return len(self.unable)


@pytest.mark.parametrize(("claimed_by", "withdrawn"), [("1", True), ("0", False), (None, False)])
def test_only_the_own_claim_is_withdrawn(claimed_by, withdrawn, monkeypatch):
    """Another process may have claimed the key meanwhile."""
    deleted = []
    client = types.SimpleNamespace(
        process=1, find={"triax/claim/key": claimed_by}.get, delete=deleted.append
    )
    monkeypatch.setattr(jax_private, "key_value_client", lambda: client)
    agree.release("key")
    assert deleted == ["triax/claim/key"] * withdrawn


@pytest.mark.parametrize(
    ("able", "client", "config", "waited_s"),
    [
        (False, Client(unable=True), None, 0),
        (False, Client(), None, agree._UNCLAIMED_S),
        # The wait for a claim begins again where one has ended.
        (False, Client(claims=(5, 20), publishes=25), "theirs", 25),
        (False, Client(claims=(5, 20)), None, 20 + agree._UNCLAIMED_S),
        (False, Client(claims=(0, 1000)), None, agree._CLAIMED_S),
        (True, Client(), None, 0),
        (True, Client(claims=(0, 40), publishes=30), "theirs", 30),
        (True, Client(claims=(0, 40)), None, 40),
        (True, Client(claims=(0, 1000)), None, agree._CLAIMED_S),
    ],
)
def test_what_is_waited_for(able, client, config, waited_s, monkeypatch, caplog):
    monkeypatch.setattr(jax_private, "key_value_client", lambda: client)
    pauses = []

    def sleep(pause):
        pauses.append(pause)
        client.now += pause

    clock = types.SimpleNamespace(monotonic=lambda: client.now, sleep=sleep)
    monkeypatch.setattr(agree, "time", clock)
    assert agree.settle("key", able=able) == config
    assert waited_s <= client.now <= waited_s + 0.25
    assert len(pauses) < 20 + 4 * waited_s
    # Who waits for a claimed key says so once, and once more if it waits no longer.
    claimed = min(client.claims[1], client.publishes or 1000) - client.claims[0]
    told = caplog.text.count("has not decided on a config of key")
    assert told == (claimed > 10) + (claimed > agree._CLAIMED_S)
