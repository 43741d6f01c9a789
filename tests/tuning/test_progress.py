"""How far a tuning is."""

from triax.tuning import progress


def test_what_takes_longer_is_logged_now_and_then(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = progress.Progress("kernel", 3)
    for seconds in (1, 2, 3, 7, 8):
        now[0] = 100.0 + seconds
        shown.step()
    assert caplog.messages == [
        "tuning kernel: 2 of 6 steps after 2 s",
        "tuning kernel: 4 of 6 steps after 7 s",
    ]
