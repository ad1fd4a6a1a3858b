"""How a watch ends: at once where the store is gone, and on rank 0 after the others have read what was found."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from cornstarch.health import watch as watch_file
from cornstarch.health.heartbeat import Heartbeat
from cornstarch.health.watch import HealthWatch
from cornstarch.parallel import distributed
from cornstarch.parallel.activity import Activity

PATIENCE = 60.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> HealthWatch:
    """The watch of rank 0 of 3, without its threads."""
    monkeypatch.setattr(watch_file, "default_store", dist.HashStore)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(watch_file, "_READ_SECONDS", 10 * PATIENCE)
    return HealthWatch(Activity(), 1.0, lambda text, has_store: None)


def test_nobody_waits_for_a_store_that_does_not_answer(watch: HealthWatch) -> None:
    blocked = mock.Mock(spec=threading.Thread)
    watch._threads.append(blocked)
    watch._conclude("Rank 0, which hosts the store of the run, has not answered.", has_store=False)
    watch.stop()
    blocked.join.assert_called_once_with(0.0)


def test_rank_0_stays_until_the_others_have_read_who_hangs(watch: HealthWatch) -> None:
    """Else they would find the store gone, and name rank 0."""
    beats = {rank: Heartbeat(rank, 1) for rank in (1, 2)}
    for rank, beat in beats.items():
        watch._store.set(f"beat/{rank}", beat.to_json())
    watch._hanging = (1,)
    stopping = threading.Thread(target=watch.stop)
    stopping.start()
    assert stopping.is_alive()
    watch._store.set("beat/2", replace(beats[2], has_left=True).to_json())  # rank 1 never does
    stopping.join(PATIENCE)
    assert not stopping.is_alive()
